"""Finds the model that a configuration names: its names, its tokenizer and the engine that generates with it.

``--engine auto`` goes by the model's files, the installed packages and the GPUs. The packages of the engines that run
here share what is below.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from singletree.engines.checkpoint import DEFAULT_MODEL, Checkpoint, FindCheckpoint, cache_folder
from singletree.engines.devices import ENGINE_PACKAGES
from singletree.engines.engine import Engine
from singletree.engines.progress import Progress, in_own_thread
from singletree.engines.workers import Worker
from singletree.errors import BadConfiguration
from singletree.prompts.tokenizer.tokenizer import Tokenizer, load_tokenizer
from singletree.server.doors import open_door
from singletree.server.settings.config import WEIGHTLESS_ENGINES, Config, EngineName


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that is about to be loaded.

    Attributes:
        names: its names, the usual one first.
        load_tokenizer: reads the checkpoint's tokenizer; blocks.
        start_workers: starts the engine, or connects to all engines, and returns them when they are ready.
        close: frees what was started, if a later step fails.
        notes: lines for the user, such as settings that were made.
        template_origin: where the tokenizer's chat template comes from, for the user.
    """

    names: tuple[str, ...]
    load_tokenizer: Callable[[], Tokenizer]
    start_workers: Callable[[Tokenizer], Awaitable[tuple[Worker, ...]]]
    close: Callable[[], Awaitable[None]]
    engine: str = ""
    notes: tuple[str, ...] = ()
    template_origin: str = "the model's own"


ChooseEngine = Callable[[Config], EngineName]
"""Chooses the engine of ``--engine auto``. Blocks. Raises BadConfiguration and WeightsUnavailable."""

FindSource = Callable[[Config, Progress], Awaitable[ModelSource]]
"""Finds the model that a configuration names; downloads it if it is not on this machine."""


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine that runs here, as its package offers it (``server.doors``); some have a model without any files."""

    find_source: FindSource
    built_in: tuple[str, Callable[[], Tokenizer]] | None = None


async def resolve_checkpoint(
    config: Config, model: str, progress: Progress, *, gguf: bool = False, weights: bool = False
) -> Checkpoint:
    """Find a model; see ``FindCheckpoint`` for what is downloaded of it if it is not on this machine."""
    find: FindCheckpoint = open_door("model files")
    packages = config.package_weights
    return await run_abandonable(
        partial(find, model, progress=progress, gguf=gguf, weights=weights, packages=packages)
    )


async def resolve_weights(config: Config, progress: Progress) -> Checkpoint:
    """Return the checkpoint with its weights in Hugging Face's layout. Raises BadConfiguration for a GGUF file."""
    if config.model is None:
        raise BadConfiguration(
            f"--engine {config.engine} needs --model, such as Qwen/Qwen3-8B, or --engine-url of a server that runs"
        )
    checkpoint = await resolve_checkpoint(config, config.model, progress, weights=True)
    if checkpoint.is_gguf:
        raise BadConfiguration(
            f"{config.model} is a GGUF file, which only llama.cpp runs well: give --engine llamacpp, or for "
            f"{config.engine} the repository of the original weights"
        )
    return checkpoint


def checkpoint_source(
    checkpoint: Checkpoint, make: Callable[[Tokenizer], Engine], *, marks_pictures: bool = False
) -> ModelSource:
    """Return the source of a model whose engine ``make`` makes, once the tokenizer is loaded."""
    names = (checkpoint.name, *checkpoint.aliases)
    load = partial(load_checkpoint, checkpoint, marks_pictures=marks_pictures)
    origin = describe_template(checkpoint)
    return ModelSource(names, load, partial(start_engine, make), do_nothing, template_origin=origin)


def load_checkpoint(checkpoint: Checkpoint, *, marks_pictures: bool = False) -> Tokenizer:
    """Return the tokenizer of ``checkpoint``, with the chat template that corrects its own if there is one."""
    facts = cache_folder() / "tokenizers"
    tokenizer = load_tokenizer(checkpoint.path, marks_pictures=marks_pictures, facts_folder=facts)
    correction, own = checkpoint.correction, tokenizer.chat_template
    return (
        tokenizer if correction is None or own is None else tokenizer.with_template(correction.correct(own))
    )


def describe_template(checkpoint: Checkpoint) -> str:
    """Tell the user where the chat template comes from."""
    correction = checkpoint.correction
    return "the model's own" if correction is None else f"the model's own, corrected: {correction.reason}"


async def start_engine(make: Callable[[Tokenizer], Engine], tokenizer: Tokenizer) -> tuple[Worker, ...]:
    """Make the engine in a thread, start it, and return it as the only worker."""
    engine = await asyncio.to_thread(make, tokenizer)
    await engine.start()
    return (Worker("0", engine),)


async def do_nothing() -> None:
    """Do nothing: nothing was started."""


def set_only(**settings: Any) -> dict[str, Any]:
    """Return the settings that are not None; the engine has defaults for the others."""
    return {name: value for name, value in settings.items() if value is not None}


_Result = TypeVar("_Result")


async def run_abandonable(work: Callable[[], _Result]) -> _Result:
    """Return what ``work`` returns or raises, from a thread of its own, which a cancelled caller leaves to itself."""
    return await asyncio.wrap_future(in_own_thread(work, "abandonable work"))


def local_engine(name: str) -> LocalEngine:
    """Return the engine ``name``, which runs here. Raises BadConfiguration if its package is not installed."""
    engine: LocalEngine = open_door(f"engine {name}")
    return engine


def built_in_model(engine: EngineName) -> tuple[str, Callable[[], Tokenizer]] | None:
    """Return the name and the tokenizer of the model that ``engine`` has without any files; None if it needs some."""
    # The others would be loaded for nothing: they need a model.
    return local_engine(engine).built_in if engine in WEIGHTLESS_ENGINES else None


async def find_model_source(config: Config, progress: Progress) -> ModelSource:
    """Find the model that ``config`` names. Raises BadConfiguration, WeightsUnavailable and EngineFailed."""
    if config.engine_url:
        engine_arguments_apply(config, config.engine)
        find: FindSource = open_door("engine URLs")
        return await find(config, progress)
    engine = config.engine
    if engine == "auto":
        choose: ChooseEngine = open_door("choice of an engine")
        engine = await run_abandonable(partial(choose, config))
    engine_arguments_apply(config, engine)
    check_installed(engine)
    source = await local_engine(engine).find_source(config, progress)
    return replace(source, engine=engine)


def find_tokenizer(config: Config, progress: Progress) -> tuple[str, Tokenizer]:
    """Return the name and the tokenizer of the model that ``config`` names, without an engine. Blocks."""
    if config.model is None and (config.engine in GPU_ENGINES or config.engine_url):
        raise BadConfiguration(
            f"--engine {config.engine}: name the model with --model to render without the server"
        )
    built_in = built_in_model(config.engine)
    if config.model is None and built_in is not None:
        name, make_tokenizer = built_in
        return name, make_tokenizer()
    find: FindCheckpoint = open_door("model files")
    checkpoint = find(config.model or DEFAULT_MODEL, progress=progress, packages=config.package_weights)
    return checkpoint.name, load_checkpoint(checkpoint)


GPU_ENGINES: tuple[EngineName, ...] = ("vllm", "sglang")
"""Engines that read weights in Hugging Face's layout, the preferred one first; the names of their packages."""


def check_installed(engine: EngineName) -> None:
    """Raise BadConfiguration if the package of ``engine`` is missing: before a model is fetched for it."""
    title, module, _ = ENGINE_PACKAGES.get(engine, ("", "", ()))
    if module and importlib.util.find_spec(module) is None:
        raise BadConfiguration(
            f"{title} is not installed: pip install 'singletree[{engine}]', or give --engine-url of a "
            "server that runs"
        )


def engine_arguments_apply(config: Config, engine: EngineName) -> None:
    """Raise BadConfiguration if ``config`` has arguments for an engine that does not run here or takes none."""
    if not config.engine_arguments:
        return
    given = " ".join(config.engine_arguments)
    if engine not in GPU_ENGINES:
        raise BadConfiguration(f"unknown arguments: {given}; --engine {engine} takes none of its own")
    if config.engine_url:
        raise BadConfiguration(
            f"{given}: give the arguments to the server at --engine-url, which runs already"
        )
