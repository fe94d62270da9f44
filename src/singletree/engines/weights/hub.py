"""Finds and downloads models on the Hugging Face Hub, with huggingface_hub, its cache and environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from singletree.engines.weights.progress import Progress, report_folder_size
from singletree.errors import WeightsUnavailable

# If the user names no quantization, the first of these that the repository has is used; later ones are larger, less
# exact or less common.
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q8_0", "Q6_K", "Q4_0", "Q4_1", "Q5_K_S", "MXFP4", "F16", "BF16")
_NOT_A_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# The files of a tokenizer and a chat template; weights are left to the engine that loads them.
_DESCRIPTION = re.compile(r"[^/]+\.(json|jinja|model|tiktoken|txt)")
# The weights of a repository in Hugging Face's layout, and the code that some bring; the first kind that it has counts.
_WEIGHTS = tuple(
    re.compile(each) for each in (r"(?!consolidated)[^/]+\.safetensors", r"pytorch_model[^/]*\.bin")
)
_CODE = re.compile(r"[^/]+\.py")
_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w.-]+))?")


class Hub(Protocol):
    """The interface of a hub of model repositories."""

    def files(self, repo: str) -> Mapping[str, int]:
        """Return name and size in bytes of each file in the repository. Raises WeightsUnavailable."""

    def fetch(self, repo: str, files: Sequence[str], progress: Progress) -> Path:
        """Download files that are not in the cache, and return their folder. Raises WeightsUnavailable."""


def parse_id(model: str) -> tuple[str, str | None] | None:
    """Parse ``org/name`` or ``org/name:Q4_K_M`` into repository and quantization; None if it is neither."""
    found = _ID.fullmatch(model)
    return (found["repo"], found["quant"]) if found else None


def fetch_model(
    repo: str, quant: str | None, *, gguf: bool, hub: Hub, progress: Progress, weights: bool = False
) -> Path:
    """Return a GGUF file (the first part of a split one) or a folder with ``tokenizer.json`` and related files.

    With ``gguf`` only a GGUF file will do; it is also searched in ``repo-GGUF`` of the same owner, the usual name for
    such repositories. With ``weights`` the folder has the weights, too. Raises WeightsUnavailable.
    """
    available = hub.files(repo)
    wants_gguf = gguf or quant is not None or "tokenizer.json" not in available
    if not wants_gguf:
        wanted = set(filter(_DESCRIPTION.fullmatch, available))
        return hub.fetch(repo, sorted(wanted | set(_weights(available) if weights else ())), progress)
    files = choose_gguf(available, quant)
    if not files and not repo.upper().endswith("-GGUF"):
        repo, files = _sibling(repo, quant, hub)
    if not files:
        missing = f"no GGUF file of quantization {quant}" if quant else "no GGUF file"
        offered = ", ".join(sorted(name for name in available if name.endswith(".gguf"))[:12]) or "none"
        raise WeightsUnavailable(
            f"{repo} has {missing} (its GGUF files: {offered}); give a repository that has one, for example "
            "org/name-GGUF:Q4_K_M"
        )
    return hub.fetch(repo, files, progress) / files[0]


def _weights(names: Iterable[str]) -> list[str]:
    """Return the files of the weights in Hugging Face's layout, and of the model's own code."""
    known = list(names)
    kinds = ([name for name in known if kind.fullmatch(name)] for kind in _WEIGHTS)
    return [*next(filter(None, kinds), []), *filter(_CODE.fullmatch, known)]


def offers_gguf(repo: str, quant: str | None, hub: Hub) -> bool:
    """Return whether the hub has a GGUF file of ``repo``, there or in ``repo-GGUF``. Raises WeightsUnavailable."""
    if choose_gguf(hub.files(repo), quant):
        return True
    return not repo.upper().endswith("-GGUF") and bool(_sibling(repo, quant, hub)[1])


def offers_weights(repo: str, hub: Hub) -> bool:
    """Return whether ``repo`` has weights in Hugging Face's layout. Raises WeightsUnavailable."""
    return bool(_weights(hub.files(repo)))


def _sibling(repo: str, quant: str | None, hub: Hub) -> tuple[str, list[str]]:
    sibling = f"{repo}-GGUF"
    try:
        files = choose_gguf(hub.files(sibling), quant)
    except WeightsUnavailable:
        return repo, []
    return (sibling, files) if files else (repo, [])


def choose_gguf(names: Iterable[str], quant: str | None) -> list[str]:
    """Return the parts of the GGUF file to use: of quantization ``quant`` if given, else of the most common one."""
    models = [name for name in sorted(names) if name.endswith(".gguf") and not _NOT_A_MODEL.search(name)]
    quants = (quant,) if quant else _PREFERRED
    matching = [name for each in quants for name in models if _has_quant(name, each)]
    first = next(iter(matching or (() if quant else models)), None)
    if first is None:
        return []
    part = _PART.search(first)
    if part is None:
        return [first]
    stem = first[: part.start()]
    return [name for name in models if name.startswith(stem) and _PART.fullmatch(name[len(stem) :])]


def _has_quant(name: str, quant: str) -> bool:
    """Return whether ``quant`` is a whole word of ``name``; Q4_K does not match Q4_K_M."""
    pattern = rf"(?<![A-Za-z0-9_]){re.escape(quant)}(?![A-Za-z0-9_])"
    return re.search(pattern, name, re.IGNORECASE) is not None


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise WeightsUnavailable(
            "models on the Hugging Face Hub need the package huggingface_hub: pip install 'singletree[serve]'"
        ) from error
    return huggingface_hub


def _unavailable(repo: str, error: BaseException) -> WeightsUnavailable:
    """Return the error with its cause and the cure."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, WeightsUnavailable):
        return error
    if isinstance(error, GatedRepoError):
        cure = "its owner requires consent: accept the terms on the model's page, then run `hf auth login`"
    elif isinstance(error, RepositoryNotFoundError | HFValidationError):
        cure = "it does not exist or is private: check the name, or run `hf auth login`"
    elif isinstance(error, OfflineModeIsEnabled):
        cure = (
            "HF_HUB_OFFLINE is set and the model is not in the cache: unset the variable, or give the path of a "
            "model file"
        )
    else:
        cure = (
            f"the hub cannot be reached ({type(error).__name__}): check the network, set HF_ENDPOINT to a mirror, or "
            "give the path of a model file"
        )
    return WeightsUnavailable(f"{repo} is not available from the Hugging Face Hub: {cure}")


class HuggingFaceHub:
    """The Hugging Face Hub. Respects ``HF_HUB_OFFLINE``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HOME``."""

    def files(self, repo: str) -> Mapping[str, int]:
        """Return name and size of each file; of those in the cache, when the hub cannot be reached."""
        huggingface_hub = _library()
        from huggingface_hub.errors import DryRunError

        try:
            infos = huggingface_hub.snapshot_download(repo, dry_run=True)
            return {info.filename: info.file_size or 0 for info in infos}
        except DryRunError as error:
            if cached := self._cached(repo):
                return cached
            raise _unavailable(repo, error.__cause__ or error) from error
        except Exception as error:
            raise _unavailable(repo, error) from error

    def _cached(self, repo: str) -> dict[str, int]:
        from huggingface_hub import CacheNotFound, scan_cache_dir

        try:
            repos = scan_cache_dir().repos
        except CacheNotFound:
            return {}
        revisions = [revision for each in repos if each.repo_id == repo for revision in each.revisions]
        main = [each for each in revisions if "main" in each.refs]
        return {
            file.file_path.relative_to(each.snapshot_path).as_posix(): file.size_on_disk
            for each in main
            for file in each.files
        }

    def fetch(self, repo: str, files: Sequence[str], progress: Progress) -> Path:
        """Download files that are not in the cache, and return their folder."""
        huggingface_hub = _library()
        from huggingface_hub.constants import HF_HUB_CACHE
        from huggingface_hub.file_download import repo_folder_name
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        label, total = repo, sum(self.files(repo).get(name, 0) for name in files)
        blobs = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
        try:
            with report_folder_size(blobs, lambda size: progress(label, min(size, total), total or None)):
                return Path(huggingface_hub.snapshot_download(repo, allow_patterns=list(files)))
        except Exception as error:
            raise _unavailable(repo, error) from error
