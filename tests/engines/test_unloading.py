"""An engine that nobody uses is stopped, and the next request starts it again."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from singletree.conversation import Sampling
from singletree.engines.engine import GenerationJob, count_picture_tokens
from singletree.engines.lifetime import UnloadingEngine
from singletree.errors import EngineFailed, WeightsUnavailable
from singletree.pictures import PromptPicture
from singletree.testing.byte_model import byte_tokenizer
from singletree.testing.scripted_engine import ScriptedEngine

SOON = 0.001
NEVER = 1000.0
TOKENIZER = byte_tokenizer()


class Machine:
    """Starts scripted engines, and counts them."""

    def __init__(self) -> None:
        self.started = 0
        self.missing = False

    async def start(self) -> ScriptedEngine:
        """Start another engine."""
        if self.missing:
            raise WeightsUnavailable("the file is gone; restore it")
        self.started += 1
        engine = ScriptedEngine(TOKENIZER.encode, TOKENIZER.decode)
        await engine.start()
        return engine


async def _unloading(seconds: float) -> tuple[Machine, UnloadingEngine]:
    machine = Machine()
    return machine, UnloadingEngine(await machine.start(), machine.start, seconds)


async def _generated(engine: UnloadingEngine) -> list[int]:
    job = GenerationJob(TOKENIZER.encode("hi"), Sampling(max_tokens=4), "r")
    return [id async for chunk in engine.generate(job) for id in chunk.token_ids]


async def _stopped(engine: UnloadingEngine) -> None:
    for _ in range(10_000):
        await asyncio.sleep(SOON)
        if not engine.is_loaded:
            return
    pytest.fail("the engine is not stopped")


async def test_a_picture_is_counted_by_the_engine_that_is_started_for_it() -> None:
    machine, engine = await _unloading(SOON)
    await _stopped(engine)
    picture = PromptPicture(0, 1, "ab", "image/png", b"png")
    assert await count_picture_tokens(engine, picture) == await (await machine.start()).count_picture_tokens(
        picture
    )
    assert machine.started == 3
    await engine.close()


async def test_it_is_stopped_and_started_again() -> None:
    machine, engine = await _unloading(SOON)
    info = engine.info()
    await _stopped(engine)
    first = await _generated(engine)
    await _stopped(engine)
    assert (await _generated(engine), machine.started, engine.info()) == (first, 3, info)
    await engine.close()


async def test_a_generation_keeps_it() -> None:
    machine, engine = await _unloading(SOON)
    job = GenerationJob(TOKENIZER.encode("hi"), Sampling(max_tokens=100), "r")
    async with aclosing(engine.generate(job)) as chunks:
        await anext(chunks)
        await asyncio.sleep(20 * SOON)
        assert engine.is_loaded
    await _stopped(engine)
    assert machine.started == 1
    await engine.close()


async def test_two_requests_start_it_once() -> None:
    machine, engine = await _unloading(SOON)
    await _stopped(engine)
    both = await asyncio.gather(_generated(engine), _generated(engine))
    assert (both[0], machine.started) == (both[1], 2)
    await engine.close()


async def test_what_keeps_it_from_starting_is_an_engine_failure() -> None:
    machine, engine = await _unloading(SOON)
    await _stopped(engine)
    machine.missing = True
    with pytest.raises(EngineFailed, match="did not start again: the file is gone"):
        await _generated(engine)
    machine.missing = False
    assert await _generated(engine)
    await engine.close()


async def test_closed_for_good() -> None:
    machine, engine = await _unloading(NEVER)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineFailed, match="closed"):
        await _generated(engine)
    assert (machine.started, engine.is_loaded) == (1, False)
