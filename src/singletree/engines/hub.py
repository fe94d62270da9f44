"""Models on the Hugging Face hub, through huggingface_hub with its cache and its environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from singletree.engines.progress import Progress, growth
from singletree.errors import WeightsUnavailable

# When no quantisation is named the first of these that a repository has is taken; later ones are larger,
# coarser or rarer.
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q8_0", "Q6_K", "Q4_0", "Q4_1", "Q5_K_S", "MXFP4", "F16", "BF16")
_NOT_A_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# What a tokenizer and a template are made of; weights belong to the engine that loads them.
_DESCRIPTION = re.compile(r"[^/]+\.(json|jinja|model|tiktoken|txt)")
_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w.-]+))?")


class Hub(Protocol):
    """What is needed of a hub."""

    def files(self, repo: str) -> Mapping[str, int]:
        """The names and sizes in bytes of what the repository holds. Raises WeightsUnavailable."""

    def fetch(self, repo: str, files: Sequence[str], progress: Progress) -> Path:
        """The folder that holds these files, fetched if they are not there. Raises WeightsUnavailable."""


def parse_id(model: str) -> tuple[str, str | None] | None:
    """Repository and quantisation of ``org/name`` or ``org/name:Q4_K_M``; None if it is neither."""
    found = _ID.fullmatch(model)
    return (found["repo"], found["quant"]) if found else None


def fetch_model(repo: str, quant: str | None, *, gguf: bool, hub: Hub, progress: Progress) -> Path:
    """A GGUF file (the first of a split one) or a folder with ``tokenizer.json`` and what belongs to it.

    ``gguf`` insists on a GGUF file, and looks for it in ``repo-GGUF`` of the same owner, too, which is how
    publishers name it. Raises WeightsUnavailable.
    """
    held = hub.files(repo)
    wants_gguf = gguf or quant is not None or "tokenizer.json" not in held
    if not wants_gguf:
        return hub.fetch(repo, sorted(filter(_DESCRIPTION.fullmatch, held)), progress)
    files = choose_gguf(held, quant)
    if not files and not repo.upper().endswith("-GGUF"):
        repo, files = _sibling(repo, quant, hub)
    if not files:
        what = f"no GGUF file of quantisation {quant}" if quant else "no GGUF file"
        offered = ", ".join(sorted(name for name in held if name.endswith(".gguf"))[:12]) or "none"
        raise WeightsUnavailable(
            f"{repo} has {what} (GGUF files there: {offered}); name a repository that has one, as "
            "org/name-GGUF:Q4_K_M"
        )
    return hub.fetch(repo, files, progress) / files[0]


def _sibling(repo: str, quant: str | None, hub: Hub) -> tuple[str, list[str]]:
    sibling = f"{repo}-GGUF"
    try:
        files = choose_gguf(hub.files(sibling), quant)
    except WeightsUnavailable:
        return repo, []
    return (sibling, files) if files else (repo, [])


def choose_gguf(names: Iterable[str], quant: str | None) -> list[str]:
    """The parts of the GGUF file to take: of ``quant`` if one is named, else of the most usual one."""
    models = [name for name in sorted(names) if name.endswith(".gguf") and not _NOT_A_MODEL.search(name)]
    wanted = (quant,) if quant else _PREFERRED
    matching = [name for each in wanted for name in models if _has_quant(name, each)]
    first = next(iter(matching or (() if quant else models)), None)
    if first is None:
        return []
    part = _PART.search(first)
    if part is None:
        return [first]
    stem = first[: part.start()]
    return [name for name in models if name.startswith(stem) and _PART.fullmatch(name[len(stem) :])]


def _has_quant(name: str, quant: str) -> bool:
    """Whether it is among the name's words; Q4_K is none of Q4_K_M's."""
    pattern = rf"(?<![A-Za-z0-9_]){re.escape(quant)}(?![A-Za-z0-9_])"
    return re.search(pattern, name, re.IGNORECASE) is not None


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise WeightsUnavailable(
            "models on the Hugging Face hub need the package huggingface_hub: pip install 'singletree[serve]'"
        ) from error
    return huggingface_hub


def _unavailable(repo: str, error: BaseException) -> WeightsUnavailable:
    """What went wrong and what helps."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, WeightsUnavailable):
        return error
    if isinstance(error, GatedRepoError):
        cure = "its owner asks for consent: give it on the model's page, then run `hf auth login`"
    elif isinstance(error, RepositoryNotFoundError | HFValidationError):
        cure = "there is none of that name, or it is private: check the name, or run `hf auth login`"
    elif isinstance(error, OfflineModeIsEnabled):
        cure = "HF_HUB_OFFLINE is set and it is not in the cache: unset it, or give a path to a model file"
    else:
        cure = (
            f"the hub cannot be reached ({type(error).__name__}): connect, name a mirror in HF_ENDPOINT, or "
            "give a path to a model file"
        )
    return WeightsUnavailable(f"{repo} cannot be had from the Hugging Face hub: {cure}")


class HuggingFaceHub:
    """The real one. Honours ``HF_HUB_OFFLINE``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HOME``."""

    def files(self, repo: str) -> Mapping[str, int]:
        """See ``Hub``. What is in the cache, when the hub cannot be reached."""
        huggingface_hub = _library()
        from huggingface_hub.errors import DryRunError

        try:
            infos = huggingface_hub.snapshot_download(repo, dry_run=True)
            return {info.filename: info.file_size or 0 for info in infos}
        except DryRunError as error:
            if held := self._cached(repo):
                return held
            raise _unavailable(repo, error.__cause__ or error) from error
        except Exception as error:
            raise _unavailable(repo, error) from error

    def _cached(self, repo: str) -> dict[str, int]:
        from huggingface_hub import CacheNotFound, scan_cache_dir

        try:
            repos = scan_cache_dir().repos
        except CacheNotFound:
            return {}
        revisions = [each for held in repos if held.repo_id == repo for each in held.revisions]
        main = [each for each in revisions if "main" in each.refs]
        return {
            file.file_path.relative_to(each.snapshot_path).as_posix(): file.size_on_disk
            for each in main
            for file in each.files
        }

    def fetch(self, repo: str, files: Sequence[str], progress: Progress) -> Path:
        """See ``Hub``."""
        huggingface_hub = _library()
        from huggingface_hub.constants import HF_HUB_CACHE
        from huggingface_hub.file_download import repo_folder_name
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        label, total = repo, sum(self.files(repo).get(name, 0) for name in files)
        blobs = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
        try:
            with growth(blobs, lambda size: progress(label, min(size, total), total or None)):
                return Path(huggingface_hub.snapshot_download(repo, allow_patterns=list(files)))
        except Exception as error:
            raise _unavailable(repo, error) from error
