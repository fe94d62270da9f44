"""Tokens that pass from the connection to the consumer in one call: in order, none lost, and others unharmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engines.http_bench import END, STREAM, Bench, chunked, read, says, whole
from engines.vllm_memory import MemoryAnswer, MemoryTransport, ending, event
from engines.vllm_recording import QUESTION, Exchange, vllm_engine
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Deliver, GenerationJob
from singletree.engines.sharing import QueueingEngine
from singletree.engines.workers import Worker
from singletree.errors import EngineFailed
from singletree.remote.engine import RemoteEngine
from singletree.remote.transport import ConnectionLost, StreamedResponse
from singletree.routing.policy import RoundRobinPolicy
from singletree.routing.pool import EnginePool


async def _relayed(bench: Bench) -> StreamedResponse:
    answer = bench.transport.post("/v1/completions", b"{}")
    await answer.begin()
    return answer


def _keeping(keep: Callable[[Any], object]) -> Callable[[Any], bool]:
    def take(data: Any) -> bool:
        keep(data)
        return True

    return take


async def _settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_bytes_are_taken_in_the_call_that_receives_them() -> None:
    taken: list[bytes] = []
    async with Bench(says(STREAM, chunked(b"a")), says(STREAM, chunked(b"z"), END)) as bench:
        answer = await _relayed(bench)
        relaying = asyncio.create_task(answer.relay(_keeping(taken.append)))
        await _settled()
        (wire,) = bench.wires
        wire.receive(chunked(b"b"))
        assert taken == [b"a", b"b"]
        wire.receive(chunked(b"c") + END)
        assert taken == [b"a", b"b", b"c", b""]
        # The connection is free at once: the next request is on it before the first task goes on.
        second = bench.transport.post("/v1/completions", b"{}")
        await relaying
        await second.begin()
        assert await read(second) == b"z"
        assert len(bench.wires) == 1


async def test_what_is_not_wanted_now_is_kept_in_order() -> None:
    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        taken.append(data)
        return len(taken) != 2

    async with Bench(says(STREAM)) as bench:
        answer = await _relayed(bench)
        (wire,) = bench.wires
        relaying = asyncio.create_task(answer.relay(take))
        await _settled()
        wire.receive(chunked(b"1"), chunked(b"2"))
        wire.receive(*(chunked(b"%d" % number * 200_000) for number in range(3, 9)))
        assert wire.paused, "nobody reads: the server is stopped"
        await relaying
        assert taken == [b"1", b"2"]
        relaying = asyncio.create_task(answer.relay(take))
        await _settled()
        assert not wire.paused
        wire.receive(chunked(b"9"), END)
        await relaying
        assert b"".join(taken) == b"12" + b"".join(b"%d" % number * 200_000 for number in range(3, 9)) + b"9"
        assert taken[-1] == b""


@pytest.mark.parametrize("how", ["drop", "close", "silence", "failure", "cancel"])
async def test_a_relay_ends_however_the_connection_does(how: str) -> None:
    options: dict[str, Any] = {"read_timeout": 0.01} if how == "silence" else {}

    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        taken.append(data)
        if how == "failure" and data == b"b":
            raise ValueError(data)
        return True

    async with Bench(says(STREAM, chunked(b"a")), **options) as bench:
        answer = await _relayed(bench)
        relaying = asyncio.create_task(answer.relay(take))
        await _settled()
        (wire,) = bench.wires
        if how == "drop":
            wire.drop(ConnectionResetError())
        elif how == "close":
            answer.close()
        elif how == "failure":
            wire.receive(chunked(b"b"))
        elif how == "cancel":
            relaying.cancel()
        expected = {"failure": ValueError, "cancel": asyncio.CancelledError}.get(how, ConnectionLost)
        with pytest.raises(expected):
            await asyncio.wait_for(relaying, 1)
        before = list(taken)
        wire.receive(chunked(b"late"))
        assert taken == before
        answer.close()


async def _engine(*answers: MemoryAnswer) -> RemoteEngine:
    engine = vllm_engine(transport=MemoryTransport(*answers))
    await engine.start()
    return engine


def _job(deliver: Deliver | None) -> GenerationJob:
    return GenerationJob(QUESTION, Sampling(), "r1", deliver=deliver)


async def test_the_first_chunk_and_the_last_are_yielded_and_the_others_delivered() -> None:
    engine = await _engine(
        MemoryAnswer(body=[*(event([n]) for n in range(1, 5)), event([5], "stop"), ending(3)])
    )
    got: list[tuple[str, Sequence[int]]] = []
    async for chunk in engine.generate(_job(_keeping(lambda ids: got.append(("delivered", [*ids]))))):
        got.append(("yielded", [*chunk.token_ids]))
    ways = [way for way, ids in got if ids]
    assert [id for _, ids in got for id in ids] == [1, 2, 3, 4, 5]
    assert ways[0] == "yielded"
    assert ways[1:4] == ["delivered"] * 3


async def test_a_consumer_that_takes_no_more_is_asked_again_after_a_chunk() -> None:
    engine = await _engine(
        MemoryAnswer(body=[*(event([n]) for n in range(1, 7)), event([], "stop"), ending()])
    )
    got: list[Any] = []

    def deliver(ids: Sequence[int]) -> bool:
        got.append([*ids])
        return ids[0] % 2 == 1

    async for chunk in engine.generate(_job(deliver)):
        got.append(chunk.token_ids if chunk.token_ids else "control")
    assert got[:8] == [[1], [2], "control", [3], [4], "control", [5], [6]]


async def test_an_engine_that_dies_after_deliveries_is_followed_from_the_last_of_them() -> None:
    lost = MemoryAnswer(body=[event([1]), event([2]), event([3]), ConnectionLost("the connection broke")])
    first = vllm_engine(transport=MemoryTransport(lost))
    other = MemoryTransport(MemoryAnswer(body=[event([4]), event([5]), event([6], "stop"), ending()]))
    pool = EnginePool(
        [Worker("1", first), Worker("2", vllm_engine(transport=other))],
        RoundRobinPolicy(),
    )
    await pool.start()
    got: list[int] = []

    def deliver(ids: Sequence[int]) -> bool:
        got.extend(ids)
        return True

    async for chunk in pool.generate(_job(deliver)):
        got.extend(chunk.token_ids)
    await pool.close()
    assert got == [1, 2, 3, 4, 5, 6]
    assert other.bodies[0]["prompt"] == [*QUESTION, 1, 2, 3]


async def test_abort_ends_a_delivery() -> None:
    answer = MemoryAnswer(body=[event([1]), event([2])])
    engine = await _engine(answer)
    chunks: list[Chunk] = []

    async def run() -> None:
        async for chunk in QueueingEngine(engine, 1).generate(_job(lambda ids: True)):
            chunks.append(chunk)

    running = asyncio.create_task(run())
    await _settled()
    await engine.abort("r1")
    await asyncio.wait_for(running, 1)
    assert chunks[-1].finish == "cancelled"
    assert answer.closed


async def test_closing_the_generator_hangs_up() -> None:
    answer = MemoryAnswer(body=[event([1]), event([2])])
    engine = await _engine(answer)
    stream = engine.generate(_job(lambda ids: True))
    await anext(stream)
    waiting = asyncio.create_task(anext(stream))
    await _settled()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert answer.closed


async def test_delivered_over_http() -> None:
    models, version = (Exchange.load(name).answer for name in ("models", "version"))
    events = [chunked(event([number])) for number in range(1, 200)]
    script = (
        says(whole(200, models)),
        says(whole(200, version)),
        says(whole(404, b"")),
        says(STREAM, chunked(event([7], "length")), chunked(ending()), END),
        says(whole(404, b"{}")),
        says(STREAM, b"".join(events), chunked(event([200], "stop")), chunked(ending()), END),
        says(STREAM, *events[:50]),
    )
    bench = Bench(*script)
    engine = vllm_engine(transport=bench.transport)
    await engine.start()
    got: list[int] = []
    async for chunk in engine.generate(_job(_keeping(got.extend))):
        got.extend(chunk.token_ids)
    assert got == list(range(1, 201))
    assert len(bench.wires) == 1
    generating = asyncio.create_task(_drain(engine))
    await _settled()
    await asyncio.sleep(0.01)
    bench.wires[-1].drop(ConnectionResetError())
    with pytest.raises(EngineFailed, match="broke"):
        await asyncio.wait_for(generating, 1)
    await engine.close()


async def _drain(engine: RemoteEngine) -> None:
    async for _ in engine.generate(_job(lambda ids: True)):
        pass
