"""Every way to leave a generation frees the server at once (C40)."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from engines.vllm_memory import (
    DEFAULT,
    MemoryAnswer,
    MemoryTransport,
    collect,
    ending,
    event,
    outcome,
    started,
)
from engines.vllm_recording import QUESTION, Exchange, vllm_engine
from singletree.engines.engine import Chunk, GenerationJob
from singletree.errors import (
    EngineFailed,
)
from singletree.remote.transport import ConnectionLost


async def until(done: Any) -> None:
    """Let the loop run until ``done()``."""
    for _ in range(1000):
        if done():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


async def test_abort_before_the_answer() -> None:
    transport = MemoryTransport(MemoryAnswer())
    transport.gate = asyncio.Event()
    engine = await started(transport)
    task = asyncio.create_task(collect(engine))
    await until(lambda: transport.bodies)
    await engine.abort("r1")
    assert await asyncio.wait_for(task, 5) == [Chunk([], "cancelled")]


async def test_abort_in_the_midst() -> None:
    answer = MemoryAnswer(body=[event([1])])
    engine = await started(MemoryTransport(answer))
    stream = engine.generate(GenerationJob(QUESTION, DEFAULT, "r1"))
    assert (await anext(stream)).token_ids == [1]
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    await engine.abort("r1")
    await engine.abort("r1")
    assert answer.closed
    assert await waiting == Chunk([], "cancelled")
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_abort_while_nobody_reads() -> None:
    answer = MemoryAnswer(body=[event([1])])
    engine = await started(MemoryTransport(answer))
    stream = engine.generate(GenerationJob(QUESTION, DEFAULT, "r1"))
    await anext(stream)
    await engine.abort("r1")
    assert answer.closed
    assert [c async for c in stream] == [Chunk([], "cancelled")]


async def test_abort_ends_all_of_that_id_and_no_other() -> None:
    answers = [MemoryAnswer(body=[event([i])]) for i in range(3)]
    engine = await started(MemoryTransport(*answers))
    streams = [engine.generate(GenerationJob(QUESTION, DEFAULT, name)) for name in ("a", "a", "b")]
    for stream in streams:
        await anext(stream)
    await engine.abort("nobody")
    await engine.abort("a")
    assert [a.closed for a in answers] == [True, True, False]
    for stream in streams:
        await stream.aclose()


async def test_abort_after_the_end_is_nothing() -> None:
    answer = MemoryAnswer(body=[Exchange.load("answer").answer])
    engine = await started(MemoryTransport(answer))
    await collect(engine)
    await engine.abort("r1")
    assert not answer.closed


async def test_closing_the_stream_hangs_up() -> None:
    answer = MemoryAnswer(body=[event([1])])
    engine = await started(MemoryTransport(answer))
    stream = engine.generate(GenerationJob(QUESTION, DEFAULT, "r1"))
    await anext(stream)
    await stream.aclose()
    assert answer.closed


async def test_cancelling_the_reader_hangs_up() -> None:
    answer = MemoryAnswer(body=[event([1])])
    engine = await started(MemoryTransport(answer))
    task = asyncio.create_task(collect(engine))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: answer.closed)


async def test_cancelling_before_the_answer_gives_the_request_up() -> None:
    answer = MemoryAnswer()
    transport = MemoryTransport(answer)
    transport.gate = asyncio.Event()
    engine = await started(transport)
    task = asyncio.create_task(collect(engine))
    await until(lambda: transport.bodies)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert answer.closed


async def test_an_answer_that_arrives_with_the_cancellation_is_hung_up_on() -> None:
    answer = MemoryAnswer()
    transport = MemoryTransport(answer)
    transport.gate = asyncio.Event()
    engine = await started(transport)
    task = asyncio.create_task(collect(engine))
    await until(lambda: transport.bodies)
    transport.gate.set()
    await until(lambda: not transport.answers)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert answer.closed


async def test_close_fails_what_is_in_flight() -> None:
    transport = MemoryTransport(MemoryAnswer(body=[event([1])]), MemoryAnswer())
    engine = await started(transport)
    stream = engine.generate(GenerationJob(QUESTION, DEFAULT, "a"))
    await anext(stream)
    transport.gate = asyncio.Event()
    waiting = asyncio.create_task(collect(engine, name="b"))
    await until(lambda: len(transport.bodies) == 2)
    await engine.close()
    for pending in (anext(stream), waiting):
        with pytest.raises(EngineFailed, match="closed"):
            await pending
    with pytest.raises(EngineFailed, match="closed"):
        await collect(engine)
    await engine.close()


async def test_what_was_aborted_before_the_close_was_aborted() -> None:
    engine = await started(MemoryTransport(MemoryAnswer(body=[event([1])])))
    stream = engine.generate(GenerationJob(QUESTION, DEFAULT, "a"))
    await anext(stream)
    await engine.abort("a")
    await engine.close()
    assert [c.finish async for c in stream] == ["cancelled"]


@pytest.mark.parametrize("last", [event([2], "stop") + ending(), b"data: nonsense\n\n", None])
async def test_nothing_is_kept_of_a_generation(last: bytes | None) -> None:
    # A lost connection of this test's own: an exception keeps the frames that it went through.
    transport = MemoryTransport(
        MemoryAnswer(body=[event([1]), last or ConnectionLost("the connection broke")])
    )
    answer = weakref.ref(transport.answers[0])
    engine = await started(transport)
    await outcome(engine)
    gc.collect()
    assert answer() is None


async def test_generate_before_start() -> None:
    with pytest.raises(EngineFailed, match="not started"):
        await collect(vllm_engine(transport=MemoryTransport()))


async def test_a_stream_that_nobody_starts_leaves_nothing() -> None:
    transport = MemoryTransport()
    engine = await started(transport)
    stream = engine.generate(GenerationJob(QUESTION, DEFAULT, "r1"))
    await stream.aclose()
    assert transport.bodies == []
