"""Finds and downloads models on the Hugging Face Hub, with huggingface_hub, its cache and environment variables."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from singletree.engines.checkpoint import Checkpoint
from singletree.engines.progress import Progress, in_own_thread, looking
from singletree.errors import WeightsUnavailable

_CURES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EACCES: "allow this user to write there",
    errno.EPERM: "allow this user to write there",
    errno.EROFS: "make its file system writable",
    errno.ENOTDIR: "remove the file in the place of a folder",
}
"""What helps, by error number."""

_ALSO_OF_SOCKETS = {errno.EACCES, errno.EPERM}


def storage_failure(
    number: int | None, folder: object, variable: str, *, names_file: bool = True
) -> str | None:
    """Return reason and cure for an error number of the file system; None for any other error.

    Args:
        number: ``errno`` of an OSError.
        folder: where the file was to be stored.
        variable: the environment variable that names another folder.
        names_file: whether the error is known to be of a file: a firewall's refusal has the number of a missing right.
    """
    if number not in _CURES or (number in _ALSO_OF_SOCKETS and not names_file):
        return None
    return (
        f"it cannot be stored in {folder} ({os.strerror(number)}): {_CURES[number]}, or set {variable} to another "
        "folder"
    )


# If the user names no quantization, the first of these that the repository has is used; later ones are larger, less
# exact or less common.
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q8_0", "Q6_K", "Q4_0", "Q4_1", "Q5_K_S", "MXFP4", "F16", "BF16")
_NOT_A_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_TOKENIZER = "tokenizer.json"
# The files of a tokenizer and a chat template; weights are left to the engine that loads them.
_DESCRIPTION = re.compile(r"[^/]+\.(json|jinja|model|tiktoken|txt)")
# The weights of a repository in Hugging Face's layout, and the code that some bring; the first kind that it has counts.
_WEIGHTS = tuple(
    re.compile(each) for each in (r"(?!consolidated)[^/]+\.safetensors", r"pytorch_model[^/]*\.bin")
)
_CODE = re.compile(r"[^/]+\.py")
_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?::(?P<quant>[\w.-]+))?")


_Result = TypeVar("_Result")


class HubUnreachable(WeightsUnavailable):
    """The hub did not answer, or is not to be asked; it may well have the model.

    Args:
        reason: why, in a few words.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def parse_id(model: str) -> tuple[str, str | None] | None:
    """Parse ``org/name`` or ``org/name:Q4_K_M`` into repository and quantization; None if it is neither."""
    found = _ID.fullmatch(model)
    return (found["repo"], found["quant"]) if found else None


def fetch_gguf(repo: str, quant: str | None, *, hub: HuggingFaceHub, progress: Progress) -> Path:
    """Return a GGUF file (the first part of a split one) of ``repo``.

    It is also searched in ``repo-GGUF`` of the same owner, the usual name for such repositories. Raises
    WeightsUnavailable.
    """
    try:
        source, files = _find_gguf(repo, quant, hub)
    except HubUnreachable:
        if (path := _cached_gguf(repo, quant, hub)) is not None:
            return path
        raise
    if not files:
        missing = f"no GGUF file of quantization {quant}" if quant else "no GGUF file"
        offered = (
            ", ".join(sorted(name for name in hub.files(source) if name.endswith(".gguf"))[:12]) or "none"
        )
        raise WeightsUnavailable(
            f"{source} has {missing} (its GGUF files: {offered}); give a repository that has one, for example "
            "org/name-GGUF:Q4_K_M"
        )
    return hub.fetch(source, files, progress) / files[0]


def fetch_weights(repo: str, quant: str | None, *, hub: HuggingFaceHub, progress: Progress) -> Path:
    """Return a folder with tokenizer and weights; a GGUF file if ``quant`` is given or ``repo`` has nothing else.

    Raises WeightsUnavailable.
    """
    available = hub.files(repo)
    if quant is not None or _TOKENIZER not in available:
        return fetch_gguf(repo, quant, hub=hub, progress=progress)
    weights = _weights(available)
    if not weights:
        raise WeightsUnavailable(
            f"{repo} has no weights, or the hub cannot be reached and the cache has none of it"
        )
    return hub.fetch(repo, sorted({*_description(available), *weights}), progress)


def fetch_tokenizer(repo: str, quant: str | None, *, hub: HuggingFaceHub, progress: Progress) -> Path:
    """Return a folder with tokenizer, chat template and configuration, a few MB; no weights are fetched for them.

    For a repository of GGUF files, the folder is that of the model from which they were made, if it has the same owner
    and name without ``-GGUF``. A GGUF file that is in the cache does as well. Raises WeightsUnavailable.
    """
    unreachable: HubUnreachable | None = None
    cached = cache(
        partial(_cached_gguf, repo, quant, hub)
    )  # Both sources would look through the whole cache.
    original = re.sub("-GGUF$", "", repo, flags=re.IGNORECASE)
    for source in dict.fromkeys((repo, original)):
        available: Mapping[str, int] = {}
        try:
            available = hub.files(source)
        except HubUnreachable as error:
            unreachable = unreachable or error
        except WeightsUnavailable:
            if source == repo:
                raise
        if _TOKENIZER in available:
            return hub.fetch(source, _description(available), progress)
        if (path := cached()) is not None:
            return path
    raise unreachable or WeightsUnavailable(
        f"{repo} has no {_TOKENIZER}, and weights are not downloaded for a tokenizer: give --model with the repository "
        "of the model from which it was made, or with the path of a GGUF file"
    )


def find_in_hub(
    repo: str, quant: str | None, gguf: bool, weights: bool, hub: HuggingFaceHub, progress: Progress
) -> Checkpoint:
    """Return the model of a repository, fetched if it is not on this machine."""
    fetch = fetch_gguf if gguf else fetch_weights if weights else fetch_tokenizer
    path = fetch(repo, quant, hub=hub, progress=progress)
    short = repo.partition("/")[2]
    return Checkpoint(repo, path, window_of(path), (short, f"{repo}:{quant}") if quant else (short,))


def _description(names: Iterable[str]) -> list[str]:
    return sorted(filter(_DESCRIPTION.fullmatch, names))


def _weights(names: Iterable[str]) -> list[str]:
    known = list(names)
    kinds = ([name for name in known if kind.fullmatch(name)] for kind in _WEIGHTS)
    return [*next(filter(None, kinds), []), *filter(_CODE.fullmatch, known)]


def window_of(path: Path) -> int | None:
    """Return the context window of the model, None if unknown. Raises WeightsUnavailable for a bad GGUF file."""
    if path.is_file():
        from singletree.gguf import read_header

        return read_header(path).context_window
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    nested = config.get("text_config")  # of multimodal models
    for each in (config, nested if isinstance(nested, dict) else {}):
        window = each.get("max_position_embeddings")
        if isinstance(window, int) and window > 0:
            return window
    return None


def offers_gguf(repo: str, quant: str | None, hub: HuggingFaceHub) -> bool:
    """Return whether the hub has a GGUF file of ``repo``, there or in ``repo-GGUF``. Raises WeightsUnavailable."""
    try:
        return bool(_find_gguf(repo, quant, hub)[1])
    except HubUnreachable:
        if _cached_gguf(repo, quant, hub) is not None:
            return True
        raise


def offers_weights(repo: str, hub: HuggingFaceHub) -> bool:
    """Return whether ``repo`` has weights in Hugging Face's layout. Raises WeightsUnavailable."""
    return bool(_weights(hub.files(repo)))


def _find_gguf(repo: str, quant: str | None, hub: HuggingFaceHub) -> tuple[str, list[str]]:
    """Return the repository that has a GGUF file, and its parts; ``repo`` and no parts if there is none."""
    if files := choose_gguf(hub.files(repo), quant):
        return repo, files
    if (sibling := _sibling(repo)) != repo:
        try:
            files = choose_gguf(hub.files(sibling), quant)
        except HubUnreachable:
            raise
        except WeightsUnavailable:
            files = []
    return (sibling, files) if files else (repo, [])


def _cached_gguf(repo: str, quant: str | None, hub: HuggingFaceHub) -> Path | None:
    for source in dict.fromkeys((repo, _sibling(repo))):
        cached = hub.cached(source)
        if files := choose_gguf(cached, quant):
            return cached[files[0]]
    return None


def _sibling(repo: str) -> str:
    return repo if repo.upper().endswith("-GGUF") else f"{repo}-GGUF"


def choose_gguf(names: Iterable[str], quant: str | None) -> list[str]:
    """Return the parts of the GGUF file to use: of quantization ``quant`` if given, else of the most common one.

    A split file of which parts are missing, as in a cache that was filled in part, is passed over.
    """
    models = [name for name in sorted(names) if name.endswith(".gguf") and not _NOT_A_MODEL.search(name)]
    quants = (quant,) if quant else _PREFERRED
    matching = [name for each in quants for name in models if _has_quant(name, each)]
    candidates = matching or ([] if quant else models)
    return next(filter(None, (_parts(name, models) for name in candidates)), [])


def _parts(name: str, names: Sequence[str]) -> list[str]:
    """Return all parts of the file that ``name`` is or is a part of; none if one is missing."""
    part = _PART.search(name)
    if part is None:
        return [name]
    stem = name[: part.start()]
    found = [other for other in names if other.startswith(stem) and _PART.fullmatch(other[len(stem) :])]
    return found if len(found) == int(part[2]) else []


def _has_quant(name: str, quant: str) -> bool:
    """Return whether ``quant`` is a whole word of ``name``; Q4_K does not match Q4_K_M."""
    pattern = rf"(?<![A-Za-z0-9_]){re.escape(quant)}(?![A-Za-z0-9_])"
    return re.search(pattern, name, re.IGNORECASE) is not None


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise HubUnreachable(
            "models on the Hugging Face Hub need the package huggingface_hub: pip install 'singletree[serve]'",
            "huggingface_hub is not installed",
        ) from error
    return huggingface_hub


def _unavailable(repo: str, error: BaseException) -> WeightsUnavailable:
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, WeightsUnavailable):
        return error
    unreachable = ""
    for each in _chain(error):
        # A network's errors are OSErrors, too.
        number, names_file = getattr(each, "errno", None), getattr(each, "filename", None) is not None
        if reason := storage_failure(number, HF_HUB_CACHE, "HF_HUB_CACHE", names_file=names_file):
            return WeightsUnavailable(f"{repo}: {reason}")
    if isinstance(error, GatedRepoError):
        cure = "its owner requires consent: accept the terms on the model's page, then run `hf auth login`"
    elif isinstance(error, RepositoryNotFoundError | HFValidationError):
        cure = "it does not exist or is private: check the name, or run `hf auth login`"
    elif isinstance(error, OfflineModeIsEnabled):
        unreachable = "HF_HUB_OFFLINE is set"
        cure = (
            "HF_HUB_OFFLINE is set and the model is not in the cache: unset the variable, or give the path of a "
            "model file"
        )
    else:
        unreachable = type(error).__name__
        cure = (
            f"the hub cannot be reached ({unreachable}): check the network, set HF_ENDPOINT to a mirror, or "
            "give the path of a model file"
        )
    message = f"{repo} is not available from the Hugging Face Hub: {cure}"
    return HubUnreachable(message, unreachable) if unreachable else WeightsUnavailable(message)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def report_folder_size(folder: Path, report: Callable[[int], None]) -> AbstractContextManager[None]:
    """Call ``report`` with the size of ``folder`` in bytes, again and again, until the context ends."""
    return looking(lambda: report(_size(folder)), "download progress")


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # Files may disappear meanwhile.
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


class HuggingFaceHub:
    """The Hugging Face Hub. Respects ``HF_HUB_OFFLINE``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HOME``.

    Args:
        answer_seconds: after which a list of files that has not come counts as unreachable; None to leave that to the
            library.
    """

    def __init__(self, answer_seconds: float | None = None) -> None:
        self._answer_seconds = answer_seconds

    def files(self, repo: str) -> Mapping[str, int]:
        """Return name and size in bytes of each file in the repository; of those in the cache, if it is unreachable.

        Raises WeightsUnavailable.
        """
        huggingface_hub = _library()
        from huggingface_hub.errors import DryRunError

        try:
            listing = in_own_thread(lambda: huggingface_hub.snapshot_download(repo, dry_run=True), "hub")
            infos = listing.result(self._answer_seconds)
            return {info.filename: info.file_size or 0 for info in infos}
        except (DryRunError, TimeoutError) as error:
            if cached := self.cached(repo):
                return {name: path.stat().st_size for name, path in cached.items()}
            raise _unavailable(repo, error.__cause__ or error) from error
        except Exception as error:
            raise _unavailable(repo, error) from error

    def cached(self, repo: str) -> Mapping[str, Path]:
        """Return name and path of each file that is on this machine already."""
        try:
            from huggingface_hub import CacheNotFound, scan_cache_dir
        except ImportError:
            return {}
        try:
            repos = scan_cache_dir().repos
        except CacheNotFound:
            return {}
        revisions = [revision for each in repos if each.repo_id == repo for revision in each.revisions]
        return {
            file.file_path.relative_to(each.snapshot_path).as_posix(): file.file_path
            for each in revisions
            if "main" in each.refs
            for file in each.files
        }

    def fetch(self, repo: str, files: Sequence[str], progress: Progress) -> Path:
        """Download files that are not in the cache, and return their folder. Raises WeightsUnavailable."""
        huggingface_hub = _library()
        from huggingface_hub.constants import HF_HUB_CACHE
        from huggingface_hub.file_download import repo_folder_name
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        sizes = self.files(repo)
        label, total = repo, sum(sizes.get(name, 0) for name in files)
        blobs = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
        try:
            with report_folder_size(blobs, lambda size: progress(label, min(size, total), total or None)):
                return Path(huggingface_hub.snapshot_download(repo, allow_patterns=list(files)))
        except Exception as error:
            raise _unavailable(repo, error) from error
