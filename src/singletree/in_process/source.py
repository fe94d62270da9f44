"""vLLM and SGLang as the server loads them: the weights, the arguments of the engine, the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from singletree.engines.engine import Engine
from singletree.engines.progress import Progress
from singletree.in_process.startup import ArgumentNames, EngineSettings, agent_arguments, engine_arguments
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.models.model_source import LocalEngine, ModelSource, checkpoint_source, resolve_weights
from singletree.server.settings.config import Config


async def _vllm(config: Config, progress: Progress) -> ModelSource:
    from singletree.in_process.vllm_engine import InProcessVllmEngine
    from singletree.in_process.vllm_startup import PACKAGE

    return await _in_process(config, progress, InProcessVllmEngine, PACKAGE.arguments)


async def _sglang(config: Config, progress: Progress) -> ModelSource:
    from singletree.in_process.sglang_engine import InProcessSglangEngine
    from singletree.in_process.sglang_startup import PACKAGE

    return await _in_process(config, progress, InProcessSglangEngine, PACKAGE.arguments)


async def _in_process(
    config: Config, progress: Progress, engine: Callable[..., Engine], names: ArgumentNames
) -> ModelSource:
    checkpoint = await resolve_weights(config, progress)
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
    return replace(checkpoint_source(checkpoint, make), notes=notes)


VLLM = LocalEngine(_vllm)
SGLANG = LocalEngine(_sglang)
