"""The scripted engine as the server loads it: with a checkpoint's tokenizer, or with one whose tokens are bytes."""

from __future__ import annotations

from functools import partial

from singletree.engines.engine import Engine
from singletree.engines.weights.progress import Progress
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.models.model_source import (
    LocalEngine,
    ModelSource,
    checkpoint_source,
    do_nothing,
    resolve_checkpoint,
    set_only,
    start_engine,
)
from singletree.server.settings.config import Config
from singletree.testing import byte_model
from singletree.testing.scripted_engine import ScriptedEngine


async def _find_source(config: Config, progress: Progress) -> ModelSource:
    def make(tokenizer: Tokenizer) -> Engine:
        return ScriptedEngine(
            tokenizer.encode,
            tokenizer.decode,
            config.script_dir,
            delay=config.script_delay,
            log_path=config.script_log,
            log_text=True,
            end_token_id=tokenizer.added_tokens.get(tokenizer.eos_token),
            **set_only(slots=config.slots, context_window=config.context_window or tokenizer.context_window),
        )

    if config.model is None:
        return ModelSource(
            (byte_model.NAME,), byte_model.byte_tokenizer, partial(start_engine, make), do_nothing
        )
    return checkpoint_source(await resolve_checkpoint(config, config.model, progress), make)


LOCAL_ENGINE = LocalEngine(_find_source, (byte_model.NAME, byte_model.byte_tokenizer))
