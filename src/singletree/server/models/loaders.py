"""Loads the served model for each kind of engine: its names, its tokenizer, a started engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from singletree.engines.engine import Engine
from singletree.engines.engine_arguments import (
    ArgumentNames,
    EngineSettings,
    agent_arguments,
    engine_arguments,
)
from singletree.engines.routing.worker import Worker
from singletree.engines.scripted.engine import ScriptedEngine
from singletree.engines.weights import resolve
from singletree.engines.weights.progress import Progress
from singletree.engines.weights.resolve import Checkpoint
from singletree.errors import BadConfiguration
from singletree.prompts.tokenizer.neutral_text import MarkupDecoder
from singletree.prompts.tokenizer.tokenizer import Tokenizer, load_tokenizer
from singletree.server.models import byte_model
from singletree.server.models.engine_choice import GPU_ENGINES, choose_engine, engine_arguments_apply
from singletree.server.models.engine_servers import EngineServers
from singletree.server.models.preambles import log_first_turns

if TYPE_CHECKING:
    # Imported for its type alone: it brings in the command-line library.
    from singletree.server.models.config import Config


_MEASURING: set[asyncio.Task[None]] = set()
"""Keeps background tasks alive. One ends with its engine."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that is about to be loaded.

    Attributes:
        names: its names, the usual one first.
        load_tokenizer: reads the checkpoint's tokenizer; blocks.
        start_workers: starts the engine, or connects to all engines, and returns them when they are ready.
        close: frees what was started, if a later step fails.
        engine: the engine that was chosen.
        notes: lines for the user, such as settings that were made.
    """

    names: tuple[str, ...]
    load_tokenizer: Callable[[], Tokenizer]
    start_workers: Callable[[Tokenizer], Awaitable[tuple[Worker, ...]]]
    close: Callable[[], Awaitable[None]]
    engine: str = ""
    notes: tuple[str, ...] = ()


FindSource = Callable[["Config", Progress], Awaitable[ModelSource]]
"""``find_model_source``, or what finds engines elsewhere."""


async def find_model_source(config: Config, progress: Progress) -> ModelSource:
    """Find the model that ``config`` names; download it if it is not on this machine.

    Raises:
        BadConfiguration, WeightsUnavailable, EngineFailed.
    """
    if config.engine_url:
        engine_arguments_apply(config, config.engine)
        return await _servers(config, progress)
    engine = await asyncio.to_thread(choose_engine, config)
    engine_arguments_apply(config, engine)
    source = await _FINDERS[engine](config, progress)
    return replace(source, engine=engine)


async def _llamacpp(config: Config, progress: Progress) -> ModelSource:
    from singletree.engines.llamacpp.engine import LlamaCppEngine

    checkpoint = await _resolve(config.model or resolve.DEFAULT_MODEL, progress, gguf=True)
    mmproj = _find_projector(config, checkpoint.path)

    def make(tokenizer: Tokenizer) -> Engine:
        return LlamaCppEngine(
            checkpoint.path,
            name=checkpoint.name,
            context_window=config.context_window,
            threads=config.threads,
            mmproj=mmproj,
            decoder=MarkupDecoder(tokenizer),
            prefix_cache_path=config.prefix_cache_path,
            prefix_cache_limit=config.prefix_cache_limit,
            **_set_only(slots=config.slots),
        )

    source = _of(checkpoint, make, marks_pictures=mmproj is not None)
    return replace(source, start_workers=partial(_start_and_measure, source))


def _find_projector(config: Config, model: Path) -> Path | None:
    """Return the vision projector: the given one, or the only one beside the model's file in a folder of its own.

    Raises:
        BadConfiguration: the given file is missing, or several lie beside the model.
    """
    if config.mmproj is not None:
        if not config.mmproj.is_file():
            raise BadConfiguration(f"--mmproj {config.mmproj}: there is no such file")
        return config.mmproj
    found = sorted(path for path in model.parent.glob("mmproj*.gguf") if path != model)
    others = [path for path in model.parent.glob("*.gguf") if path not in (model, *found)]
    if not found or others:  # in a folder of several models, it may belong to another one
        return None
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise BadConfiguration(
            f"several vision projectors lie beside the model ({names}): name one with --mmproj"
        )
    return found[0]


async def _scripted(config: Config, progress: Progress) -> ModelSource:
    def make(tokenizer: Tokenizer) -> Engine:
        return ScriptedEngine(
            tokenizer.encode,
            tokenizer.decode,
            config.script_dir,
            delay=config.script_delay,
            log_path=config.script_log,
            log_text=True,
            end_token_id=tokenizer.added_tokens.get(tokenizer.eos_token),
            **_set_only(slots=config.slots, context_window=config.context_window or tokenizer.context_window),
        )

    if config.model is None:
        return ModelSource((byte_model.NAME,), byte_model.byte_tokenizer, partial(_start, make), _nothing)
    return _of(await _resolve(config.model, progress), make)


async def _vllm(config: Config, progress: Progress) -> ModelSource:
    """Start vLLM in this process, when the tokenizer has been loaded."""
    from singletree.engines.vllm.in_process import InProcessVllmEngine
    from singletree.engines.vllm.startup import ARGUMENTS

    return await _in_process(config, progress, InProcessVllmEngine, ARGUMENTS)


async def _sglang(config: Config, progress: Progress) -> ModelSource:
    """Start SGLang in this process, when the tokenizer has been loaded."""
    from singletree.engines.sglang.in_process import InProcessSglangEngine
    from singletree.engines.sglang.startup import ARGUMENTS

    return await _in_process(config, progress, InProcessSglangEngine, ARGUMENTS)


async def _in_process(
    config: Config, progress: Progress, engine: Callable[..., Engine], names: ArgumentNames
) -> ModelSource:
    checkpoint = await _resolve_weights(config, progress)
    settings = EngineSettings(
        str(checkpoint.path), config.context_window, config.slots, config.engine_arguments
    )
    engine_arguments(settings, names)  # Raises BadConfiguration before the model is loaded.

    def make(tokenizer: Tokenizer) -> Engine:
        return engine(settings, name=checkpoint.name, progress=progress)

    notes = tuple(
        f"set        {' '.join(words)}: {why}"
        for words, why in agent_arguments(settings.arguments, names.agent)
    )
    return replace(_of(checkpoint, make), notes=notes)


async def _servers(config: Config, progress: Progress) -> ModelSource:
    """Connect to the servers at ``--engine-url``, and find out what kind each is unless ``--engine`` names one.

    The tokenizer is that of ``--model``, else of the model that the servers report.
    """
    servers = EngineServers(config)
    info = await servers.start()
    try:
        checkpoint = await _resolve(config.model or info.checkpoint or info.name, progress)
        await servers.complete(checkpoint)
    except BaseException:
        await servers.close()
        raise

    async def started(tokenizer: Tokenizer) -> tuple[Worker, ...]:
        return servers.workers

    names = tuple(dict.fromkeys((info.name, checkpoint.name, *checkpoint.aliases)))
    load = partial(load_tokenizer, checkpoint.path, facts_folder=_facts_folder())
    return ModelSource(names, load, started, servers.close, servers.title)


_FINDERS: dict[str, Callable[[Config, Progress], Awaitable[ModelSource]]] = {
    "llamacpp": _llamacpp,
    "scripted": _scripted,
    "sglang": _sglang,
    "vllm": _vllm,
}


async def _resolve(model: str, progress: Progress, *, gguf: bool = False) -> Checkpoint:
    return await asyncio.to_thread(resolve.resolve, model, progress=progress, gguf=gguf)


async def _resolve_weights(config: Config, progress: Progress) -> Checkpoint:
    """Return the checkpoint with its weights in Hugging Face's layout. Raises BadConfiguration for a GGUF file."""
    if config.model is None:
        raise BadConfiguration(
            f"--engine {config.engine} needs --model, such as Qwen/Qwen3-8B, or --engine-url of a server that runs"
        )
    checkpoint = await asyncio.to_thread(resolve.resolve, config.model, progress=progress, weights=True)
    if checkpoint.is_gguf:
        raise BadConfiguration(
            f"{config.model} is a GGUF file, which only llama.cpp runs well: give --engine llamacpp, or for "
            f"{config.engine} the repository of the original weights"
        )
    return checkpoint


def _of(
    checkpoint: Checkpoint, make: Callable[[Tokenizer], Engine], *, marks_pictures: bool = False
) -> ModelSource:
    names = (checkpoint.name, *checkpoint.aliases)
    load = partial(
        load_tokenizer, checkpoint.path, marks_pictures=marks_pictures, facts_folder=_facts_folder()
    )
    return ModelSource(names, load, partial(_start, make), _nothing)


def _facts_folder() -> Path:
    return resolve.cache_folder() / "tokenizers"


async def _start(make: Callable[[Tokenizer], Engine], tokenizer: Tokenizer) -> tuple[Worker, ...]:
    engine = make(tokenizer)
    await engine.start()
    return (Worker("0", engine),)


async def _start_and_measure(source: ModelSource, tokenizer: Tokenizer) -> tuple[Worker, ...]:
    """Start an engine on this machine, and measure in the background how fast it reads."""
    workers = await source.start_workers(tokenizer)
    measuring = asyncio.create_task(log_first_turns(workers[0].engine, source.names[0]))
    _MEASURING.add(measuring)
    measuring.add_done_callback(_MEASURING.discard)
    return workers


async def _nothing() -> None:
    """Do nothing: nothing was started."""


def _set_only(**settings: Any) -> dict[str, Any]:
    """Return the settings that are not None; the engine has defaults for the others."""
    return {name: value for name, value in settings.items() if value is not None}


def find_tokenizer(config: Config, progress: Progress) -> tuple[str, Tokenizer]:
    """Return the name and the tokenizer of the model that ``config`` names, without an engine. Blocks.

    Raises:
        BadConfiguration, WeightsUnavailable.
    """
    if config.model is None and (config.engine in GPU_ENGINES or config.engine_url):
        raise BadConfiguration(
            f"--engine {config.engine}: name the model with --model to render without the server"
        )
    if config.engine == "scripted" and config.model is None:
        return byte_model.NAME, byte_model.byte_tokenizer()
    checkpoint = resolve.resolve(config.model or resolve.DEFAULT_MODEL, progress=progress)
    return checkpoint.name, load_tokenizer(checkpoint.path)
