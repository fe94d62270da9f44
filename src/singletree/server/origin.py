"""Where the served model comes from, for each kind of engine: a name, a tokenizer, a started engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from singletree.engines import weights
from singletree.engines.engine import Engine
from singletree.engines.progress import Progress
from singletree.engines.scripted import ScriptedEngine
from singletree.engines.weights import Checkpoint
from singletree.errors import BadConfiguration
from singletree.prompts.tokenizer import Tokenizer, load_tokenizer
from singletree.server import bytes_model
from singletree.server.config import Config


@dataclass(frozen=True, slots=True)
class Origin:
    """A model before it is served.

    Attributes:
        names: what it is called, the usual name first.
        load_tokenizer: reads the checkpoint's tokenizer; blocks.
        start_engine: gives the engine, ready.
        close: frees what was started, when the rest fails.
    """

    names: tuple[str, ...]
    load_tokenizer: Callable[[], Tokenizer]
    start_engine: Callable[[Tokenizer], Awaitable[Engine]]
    close: Callable[[], Awaitable[None]]


async def find(config: Config, progress: Progress) -> Origin:
    """The model that ``config`` names, on this machine.

    Raises:
        BadConfiguration, WeightsUnavailable, EngineFailed.
    """
    return await _FINDERS[config.engine](config, progress)


async def _llamacpp(config: Config, progress: Progress) -> Origin:
    from singletree.engines.llamacpp import LlamaCppEngine

    checkpoint = await _resolve(config.model or weights.DEFAULT_MODEL, progress, gguf=True)

    def make(tokenizer: Tokenizer) -> Engine:
        return LlamaCppEngine(
            checkpoint.path,
            name=checkpoint.name,
            context_window=config.context_window,
            threads=config.threads,
            **_given(slots=config.slots),
        )

    return _of(checkpoint, make)


async def _scripted(config: Config, progress: Progress) -> Origin:
    def make(tokenizer: Tokenizer) -> Engine:
        return ScriptedEngine(
            tokenizer.encode,
            tokenizer.decode,
            config.script_dir,
            delay=config.script_delay,
            log_path=config.script_log,
            log_text=True,
            end_token_id=tokenizer.added_tokens.get(tokenizer.eos_token),
            **_given(slots=config.slots, context_window=config.context_window or tokenizer.context_window),
        )

    if config.model is None:
        return Origin((bytes_model.NAME,), bytes_model.bytes_tokenizer, partial(_start, make), _nothing)
    return _of(await _resolve(config.model, progress), make)


async def _vllm(config: Config, progress: Progress) -> Origin:
    """The server says what it serves; the tokenizer is that of ``--model``, else of the server's own root."""
    from singletree.engines.vllm import VllmEngine

    engine = VllmEngine(config.engine_url or "", api_key=config.engine_api_key, **_given(slots=config.slots))
    await engine.start()
    try:
        info = engine.info()
        checkpoint = await _resolve(
            config.model or str((info.details or {}).get("root") or info.name), progress
        )
    except BaseException:
        await engine.close()
        raise

    async def started(tokenizer: Tokenizer) -> Engine:
        return engine

    names = tuple(dict.fromkeys((info.name, checkpoint.name, *checkpoint.aliases)))
    return Origin(names, partial(load_tokenizer, checkpoint.path), started, engine.close)


_FINDERS: dict[str, Callable[[Config, Progress], Awaitable[Origin]]] = {
    "llamacpp": _llamacpp,
    "scripted": _scripted,
    "vllm": _vllm,
}


async def _resolve(model: str, progress: Progress, *, gguf: bool = False) -> Checkpoint:
    return await asyncio.to_thread(weights.resolve, model, progress=progress, gguf=gguf)


def _of(checkpoint: Checkpoint, make: Callable[[Tokenizer], Engine]) -> Origin:
    names = (checkpoint.name, *checkpoint.aliases)
    return Origin(names, partial(load_tokenizer, checkpoint.path), partial(_start, make), _nothing)


async def _start(make: Callable[[Tokenizer], Engine], tokenizer: Tokenizer) -> Engine:
    engine = make(tokenizer)
    await engine.start()
    return engine


async def _nothing() -> None:
    """Nothing was started."""


def _given(**settings: Any) -> dict[str, Any]:
    """Those that are set; the engine knows what to do about the others."""
    return {name: value for name, value in settings.items() if value is not None}


def tokenizer_of(config: Config, progress: Progress) -> tuple[str, Tokenizer]:
    """Name and tokenizer of the model that ``config`` names, without an engine. Blocks.

    Raises:
        BadConfiguration, WeightsUnavailable.
    """
    if config.engine == "vllm" and config.model is None:
        raise BadConfiguration("--engine vllm: name the model with --model to render without the server")
    if config.engine == "scripted" and config.model is None:
        return bytes_model.NAME, bytes_model.bytes_tokenizer()
    checkpoint = weights.resolve(config.model or weights.DEFAULT_MODEL, progress=progress)
    return checkpoint.name, load_tokenizer(checkpoint.path)
