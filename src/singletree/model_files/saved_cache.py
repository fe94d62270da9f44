"""The folder of ``--prefix-cache-path``: who may write into it, whose weights its files belong to, and its limit."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from singletree.errors import BadConfiguration
from singletree.private_files import FOLDER_MODE

_OTHERS_MAY_WRITE = 0o022
_STRIDE = 1 << 20
_SAMPLE = 1 << 12
_SMALL = 64 << 20


def open_folder(folder: Path) -> None:
    """Create the folder, for its owner only.

    Raises BadConfiguration if it cannot be used, or if others may write into it: an engine trusts what it restores.
    """
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise BadConfiguration(
            f"--prefix-cache-path {folder}: {error.strerror}; give a folder to write into"
        ) from None
    if status.st_mode & _OTHERS_MAY_WRITE or status.st_uid != os.geteuid():
        raise BadConfiguration(
            f"--prefix-cache-path {folder}: other users may write into it; give a folder of your own, or chmod 700 it"
        )


def digest_weights(files: Iterable[Path]) -> str:
    """Return a digest of the files of a model, in hex. Raises OSError.

    Of a file over 64 MiB the first 4 KiB of each MiB are read: another quantization or another training changes all
    of them, and to read the whole file would take as long as to load it.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(struct.pack("<Q", size))
        sample = _STRIDE if size <= _SMALL else _SAMPLE
        with path.open("rb") as file:
            for start in range(0, size, _STRIDE):
                file.seek(start)
                digest.update(file.read(sample))
    return digest.hexdigest()


def oldest_beyond(files: Iterable[Path], limit: int) -> list[Path]:
    """Return the files that have to go, oldest first, so that the rest has at most ``limit`` bytes. Blocks."""
    found: list[tuple[float, int, Path]] = []
    for path in files:
        with contextlib.suppress(OSError):  # it is gone already
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    beyond = sum(size for _, size, _ in found) - limit
    oldest: list[Path] = []
    for _, size, path in sorted(found):
        if beyond <= 0:
            break
        oldest.append(path)
        beyond -= size
    return oldest
