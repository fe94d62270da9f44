"""The embedded engine as the server loads it: a GGUF file, its vision projector, and the settings of llama.cpp."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

from singletree.engines.checkpoint import DEFAULT_MODEL
from singletree.engines.engine import Engine
from singletree.engines.progress import Progress
from singletree.engines.workers import Worker
from singletree.errors import BadConfiguration
from singletree.llamacpp.engine import LlamaCppEngine
from singletree.llamacpp.picture_prompt import MarkupDecoder
from singletree.llamacpp.preambles import log_first_turns
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.models.model_source import (
    LocalEngine,
    ModelSource,
    checkpoint_source,
    resolve_checkpoint,
    set_only,
)
from singletree.server.settings.config import Config

_MEASURING: set[asyncio.Task[None]] = set()
"""Keeps background tasks alive. One ends with its engine."""


async def _find_source(config: Config, progress: Progress) -> ModelSource:
    checkpoint = await resolve_checkpoint(config, config.model or DEFAULT_MODEL, progress, gguf=True)
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
            prefix_cache_key=config.prefix_cache_key,
            **set_only(
                slots=config.slots,
                temperature=checkpoint.correction.temperature if checkpoint.correction else None,
            ),
        )

    source = checkpoint_source(checkpoint, make, marks_pictures=mmproj is not None)
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


async def _start_and_measure(source: ModelSource, tokenizer: Tokenizer) -> tuple[Worker, ...]:
    workers = await source.start_workers(tokenizer)
    measuring = asyncio.create_task(log_first_turns(workers[0].engine, source.names[0]))
    _MEASURING.add(measuring)
    measuring.add_done_callback(_MEASURING.discard)
    return workers


LOCAL_ENGINE = LocalEngine(_find_source)
