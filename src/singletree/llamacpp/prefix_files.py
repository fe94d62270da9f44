"""Keeps states of llama.cpp's KV cache in a folder, each with the token ids that it was computed from.

A file is what llama.cpp saved, then the token ids (int32, little-endian), then a footer with the sizes and a SHA-256 of
everything before it and of the key. llama.cpp ends its process when it restores a state that is damaged
(``GGML_ASSERT`` in llama-context.cpp), so a file is restored only after its checksum was compared. It reads the state
only, and ignores what follows.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import struct
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from singletree.errors import BadConfiguration
from singletree.prefixes import common_text_prefix
from singletree.private_files import open_private

_LOG = logging.getLogger(__name__)

_FOOTER = struct.Struct("<QQ32s8s")  # bytes of the state, number of token ids, checksum, magic
_MAGIC = b"stprefx1"
_KEY_DIGITS = 16
_SAVED = re.compile(rf"[0-9a-f]{{{_KEY_DIGITS}}}-[0-9a-f]{{32}}\.prefix")
_PART = re.compile(rf"[0-9a-f]{{{_KEY_DIGITS}}}-[0-9a-f]{{32}}\.part")
_OLD_PART_SECONDS = 3600.0  # Another server may be writing a younger one.
_CHUNK = 1 << 20
_MODEL_STRIDE = 1 << 20
_MODEL_SAMPLE = 1 << 12
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_OTHERS_MAY_WRITE = 0o022
_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """A saved state.

    Attributes:
        packed_ids: the token ids that it was computed from, as of ``pack_ids``.
    """

    path: Path
    packed_ids: bytes

    @property
    def tokens(self) -> int:
        return len(self.packed_ids) // _ID_BYTES


def pack_ids(token_ids: Sequence[int], salt: str = "") -> bytes:
    """Return token ids as bytes, four of them each; none if one is out of range.

    Args:
        token_ids: may be the numbers of ``comparable_tokens``.
        salt: changes every id, so that the same prompts of two salts have no beginning in common.
    """
    try:
        packed = array("I", token_ids)
    except OverflowError:
        return b""
    if sys.byteorder == "big":
        packed.byteswap()
    data = packed.tobytes()
    if not salt or not data:
        return data
    mask = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_ID_BYTES).digest()
    masks = int.from_bytes(mask * len(packed))
    return (int.from_bytes(data) ^ masks).to_bytes(len(data))


def common_tokens(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix of two packed sequences, in tokens."""
    return common_text_prefix(one, other) // _ID_BYTES


def model_key(path: Path, *settings: str) -> str:
    """Return the key of a model's states: a digest of its GGUF file, all parts of it, and of ``settings``.

    Of each MiB of a file the first 4 KiB are read: another quantization or another training changes all of them, and
    to read the whole file would take as long as to load it.
    """
    digest = hashlib.sha256("\0".join(settings).encode())
    for part in _parts(path):
        size = part.stat().st_size
        digest.update(struct.pack("<Q", size))
        with part.open("rb") as file:
            for start in range(0, size, _MODEL_STRIDE):
                file.seek(start)
                digest.update(file.read(_MODEL_SAMPLE))
    return digest.hexdigest()[:_KEY_DIGITS]


def _parts(path: Path) -> list[Path]:
    split = _SPLIT.search(path.name)
    if split is None:
        return [path]
    stem, total = path.name[: split.start()], split[1]
    parts = [path.with_name(f"{stem}-{at:05}-of-{total}.gguf") for at in range(1, int(total) + 1)]
    return [part for part in parts if part.exists()]


def open_folder(folder: Path) -> None:
    """Create the folder, for its owner only.

    Raises BadConfiguration if it cannot be used, or if others may write into it: llama.cpp trusts what it restores.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise BadConfiguration(
            f"--prefix-cache-path {folder}: {reason}; give a folder to write into"
        ) from None
    if status.st_mode & _OTHERS_MAY_WRITE or status.st_uid != os.geteuid():
        raise BadConfiguration(
            f"--prefix-cache-path {folder}: other users may write into it; give a folder of your own, or chmod 700 it"
        )


class PrefixFiles:
    """The saved states of one model in a folder, which may have those of others as well. Every call blocks.

    Files that do not have the name of a saved state are never touched.

    Args:
        folder: where they are; see ``open_folder``.
        limit: largest size of all saved states in the folder, in bytes; the least recently used are removed first.
        key: what they must have been saved for, as of ``model_key``.
    """

    def __init__(self, folder: Path, limit: int, key: str) -> None:
        self.folder = folder
        self._limit = limit
        self._key = key
        self._saved: dict[Path, SavedPrefix] = {}
        for path in self._named(_PART):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _OLD_PART_SECONDS:
                    path.unlink()
        for path in self._named(_SAVED):
            if path.name.startswith(key):
                self._index(path)
        self._evict()

    def __len__(self) -> int:
        return len(self._saved)

    def longest(self, packed_ids: bytes, most: float) -> tuple[SavedPrefix, int] | None:
        """Find the state that shares the longest prefix with a prompt.

        Args:
            most: the most tokens that the state may have.

        Returns:
            The state, and how many tokens it shares; None if no state shares any.
        """
        found = [(common_tokens(each.packed_ids, packed_ids), each) for each in self._states()]
        shared = [(common, -each.tokens, each) for common, each in found if common and each.tokens <= most]
        if not shared:
            return None
        common, _, best = max(shared, key=lambda entry: entry[:2])
        return best, common

    def is_intact(self, saved: SavedPrefix) -> bool:
        """Compare the checksum of a state and mark it as used now. One that is damaged or gone is removed."""
        try:
            with saved.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                _, checksum = self._read_footer(file, size)
                file.seek(0)
                intact = self._checksum(file, size - _FOOTER.size).digest() == checksum
            if intact:
                os.utime(saved.path)
                return True
        except (OSError, ValueError):
            pass
        self.remove(saved.path)
        return False

    def remove(self, path: Path) -> None:
        self._saved.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink()

    def has_room(self, size: int) -> bool:
        """Return whether a state of ``size`` bytes is within the limit, and leaves as much free on the disk."""
        with contextlib.suppress(OSError):
            return size <= self._limit and 2 * size <= shutil.disk_usage(self.folder).free
        return False

    def add(self, source: Path, packed_ids: bytes) -> None:
        """Keep a copy of ``source``, which llama.cpp has saved, and evict others if the limit is exceeded.

        States that this one continues are removed: it serves every prompt that they serve. Raises OSError; then
        nothing has changed.
        """
        part = self.folder / f"{self._key}-{secrets.token_hex(16)}.part"
        try:
            with source.open("rb") as state, open(part, "xb", opener=open_private) as file:
                self._write(state, packed_ids, file)
                file.flush()
                os.fsync(file.fileno())
            path = part.rename(part.with_suffix(".prefix"))
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._saved[path] = SavedPrefix(path, packed_ids)
        for other in [each for each in self._states() if packed_ids.startswith(each.packed_ids)]:
            if other.path != path:
                self.remove(other.path)
        self._evict()

    def _write(self, state: BinaryIO, packed_ids: bytes, file: BinaryIO) -> None:
        digest, size = hashlib.sha256(self._key.encode()), 0
        while data := state.read(_CHUNK):
            file.write(data)
            digest.update(data)
            size += len(data)
        digest.update(packed_ids)
        file.write(packed_ids + _FOOTER.pack(size, len(packed_ids) // _ID_BYTES, digest.digest(), _MAGIC))

    def _states(self) -> list[SavedPrefix]:
        return list(self._saved.values())  # at once: a thread may add one meanwhile

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        return [path for path in self.folder.iterdir() if pattern.fullmatch(path.name)]

    def _index(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                ids_at, _ = self._read_footer(file, file.seek(0, os.SEEK_END))
                file.seek(ids_at)
                self._saved[path] = SavedPrefix(path, file.read()[: -_FOOTER.size])
        except (OSError, ValueError) as error:
            _LOG.warning("a saved prefix is not usable and is removed: %s (%s)", path, error)
            self.remove(path)

    @staticmethod
    def _read_footer(file: BinaryIO, size: int) -> tuple[int, bytes]:
        """Return where the token ids begin, and the checksum. Raises ValueError if there is no valid footer."""
        if size < _FOOTER.size:
            raise ValueError("it is cut")
        file.seek(size - _FOOTER.size)
        state, tokens, checksum, magic = _FOOTER.unpack(file.read(_FOOTER.size))
        if magic != _MAGIC or state + tokens * _ID_BYTES + _FOOTER.size != size:
            raise ValueError("its footer does not fit")
        return state, checksum

    def _checksum(self, file: BinaryIO, size: int) -> hashlib._Hash:
        digest = hashlib.sha256(self._key.encode())
        while size > 0 and (data := file.read(min(size, _CHUNK))):
            digest.update(data)
            size -= len(data)
        return digest

    def _evict(self) -> None:
        """Remove the least recently used states, of any key, until the rest is within the limit."""
        files: list[tuple[float, int, Path]] = []
        for path in self._named(_SAVED):
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._limit:
                return
            self.remove(path)
            total -= size
