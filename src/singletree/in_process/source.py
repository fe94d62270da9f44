"""vLLM and SGLang as the server loads them: the weights, the arguments of the engine, the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from singletree.engines.checkpoint import Checkpoint
from singletree.engines.engine import Engine
from singletree.engines.progress import Progress
from singletree.errors import BadConfiguration
from singletree.in_process.startup import (
    EnginePackage,
    EngineSettings,
    SavedCache,
    agent_arguments,
    engine_arguments,
    find_saved_cache,
)
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.models.model_source import LocalEngine, ModelSource, checkpoint_source, resolve_weights
from singletree.server.settings.config import Config


async def _vllm(config: Config, progress: Progress) -> ModelSource:
    from singletree.in_process.vllm_engine import InProcessVllmEngine
    from singletree.in_process.vllm_startup import PACKAGE

    return await _in_process(config, progress, InProcessVllmEngine, PACKAGE)


async def _sglang(config: Config, progress: Progress) -> ModelSource:
    from singletree.in_process.sglang_engine import InProcessSglangEngine
    from singletree.in_process.sglang_startup import PACKAGE

    return await _in_process(config, progress, InProcessSglangEngine, PACKAGE)


async def _in_process(
    config: Config, progress: Progress, engine: Callable[..., Engine], package: EnginePackage
) -> ModelSource:
    checkpoint = await resolve_weights(config, progress)
    path, window, slots = str(checkpoint.path), config.context_window, config.slots
    settings = EngineSettings(path, window, slots, config.engine_arguments)
    engine_arguments(settings, package)  # Raises BadConfiguration before the model is loaded.

    def make(tokenizer: Tokenizer) -> Engine:
        # Not before: after idle-unload the weights may be others, and with Ray they are on another machine.
        saved = _saved(config, checkpoint, package)
        return engine(replace(settings, saved=saved), name=checkpoint.name, progress=progress)

    wanted = agent_arguments(settings.arguments, package.agent)
    notes = tuple(f"set        {' '.join(words)}: {why}" for words, why in wanted)
    return replace(checkpoint_source(checkpoint, make), notes=notes)


def _saved(config: Config, checkpoint: Checkpoint, package: EnginePackage) -> SavedCache | None:
    if config.prefix_cache_path is None:
        return None
    if config.prefix_cache_key is not None:
        raise BadConfiguration(
            f"--prefix-cache-key: {package.title} writes its files in plain form; leave the key out, and give a "
            "--prefix-cache-path on an encrypted disk"
        )
    root, limit, given = config.prefix_cache_path, config.prefix_cache_limit, config.engine_arguments
    engine = f"{package.name}-{package.version()}"
    return find_saved_cache(root, limit, checkpoint.path, engine, given, config.context_window)


VLLM = LocalEngine(_vllm)
SGLANG = LocalEngine(_sglang)
