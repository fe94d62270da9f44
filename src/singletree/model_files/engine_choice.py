"""``--engine auto``: chooses by the model's files, the installed packages and the GPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from singletree.engines.checkpoint import DEFAULT_MODEL, built_in_repository, known_models
from singletree.engines.devices import Gpu, find_gpus
from singletree.errors import BadConfiguration
from singletree.model_files.hub import HuggingFaceHub, offers_gguf, offers_weights, parse_id
from singletree.server.models.model_source import GPU_ENGINES
from singletree.server.settings.config import Config, EngineName


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
