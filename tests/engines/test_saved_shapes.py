"""Models of each shape go on from a saved state exactly as without it: whole, and after a break."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.contract import collect, tokens_of
from engines.tiny_shapes import SHAPES, VOCABULARY, tiny_model
from singletree.conversation import Sampling
from singletree.engines.engine import GenerationJob
from singletree.llamacpp.engine import LlamaCppEngine

pytestmark = pytest.mark.embedded

_NUMBERS = random.Random(1)
PROMPT = [_NUMBERS.randrange(1, VOCABULARY) for _ in range(900)]
MORE = PROMPT[100:140]
GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
BATCH = 256


@asynccontextmanager
async def running(shape: str, folder: Path | None, **settings: Any) -> AsyncIterator[LlamaCppEngine]:
    engine = LlamaCppEngine(
        tiny_model(shape), slots=2, context_window=2048, threads=1, prefix_cache_path=folder, **settings
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def ask(engine: LlamaCppEngine, prompt: Sequence[int]) -> tuple[int, list[int]]:
    """Return how many tokens of the prompt were cached, and the answer."""
    chunks = await collect(engine.generate(GenerationJob(prompt, GREEDY, "test")))
    cached = next(chunk.cached_tokens for chunk in chunks if chunk.cached_tokens is not None)
    return cached, tokens_of(chunks)


async def read_anew(shape: str, prompt: Sequence[int]) -> list[int]:
    async with running(shape, None) as engine:
        cached, answer = await ask(engine, prompt)
    assert cached == 0
    return answer


async def kill(engine: LlamaCppEngine) -> None:
    """Kill llama.cpp when it has saved what was due."""
    assert engine._states is not None
    assert engine._process is not None
    if (prefixes := engine._states.prefixes) is not None and prefixes._saving is not None:
        await prefixes._saving
    os.kill(engine._process.pid, signal.SIGKILL)
    await engine._process.exit_reason(10)


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_next_turn_goes_on_after_kill(tmp_path: Path, shape: str) -> None:
    async with running(shape, tmp_path) as engine:
        _, answer = await ask(engine, PROMPT)
        assert len(set(answer)) > 4, "an answer that always is the same shows nothing"
        await kill(engine)
        prompt = [*PROMPT, *answer, *MORE]
        cached, restored = await ask(engine, prompt)
    # The window of a sliding one begins again at the checkpoint before the end of the prompt.
    assert cached == len(PROMPT) + len(answer) - 1 or (shape == "sliding" and cached > len(PROMPT) - 10)
    async with running(shape, None) as engine:
        await ask(engine, PROMPT)
        assert restored == (await ask(engine, prompt))[1], "as if it had never been killed"
    assert restored == await read_anew(shape, prompt)


@pytest.mark.parametrize("at", [600, 700, 898])
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_break_goes_back_to_the_nearest_checkpoint(tmp_path: Path, shape: str, at: int) -> None:
    """llama.cpp makes one a batch before the end of a prompt, and saves it with the state."""
    async with running(shape, tmp_path) as engine:
        await ask(engine, PROMPT)
        await kill(engine)
        prompt = [*PROMPT[:at], *MORE]
        cached, restored = await ask(engine, prompt)
    checkpoint = at if shape == "dense" else len(PROMPT) - BATCH - 4
    assert at >= cached >= (checkpoint - 1 if at >= checkpoint else 0)
    assert restored == await read_anew(shape, prompt)
