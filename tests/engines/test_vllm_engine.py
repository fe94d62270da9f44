"""``RemoteEngine`` on vLLM over an in-memory server: recorded exchanges, many at once, failures (C39)."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from engines.vllm_memory import (
    LOST,
    MemoryAnswer,
    MemoryTransport,
    collect,
    ending,
    event,
    outcome,
    started,
    tokens,
)
from engines.vllm_recording import PARIS, SCENARIOS, STREAMS, WINDOW, Exchange
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk
from singletree.errors import (
    ContextOverflow,
    EngineFailed,
    EngineUnfit,
    InvalidRequest,
    Overloaded,
    SingletreeError,
)
from singletree.remote.transport import ConnectionLost


@pytest.mark.parametrize("name", sorted(STREAMS.keys() & SCENARIOS.keys()))
async def test_recorded_exchange(name: str) -> None:
    exchange, scenario = Exchange.load(name), SCENARIOS[name]
    transport = MemoryTransport(MemoryAnswer(exchange.status, [exchange.answer, b""]))
    engine = await started(transport)
    expected, finish, cached, failure = STREAMS[name]
    chunks, error = await outcome(engine, scenario.prompt, scenario.sampling, name, **scenario.more)
    assert type(error) is (failure or type(None))
    if chunks:
        assert (chunks[-1].finish, chunks[-1].cached_tokens) == (finish, cached)
    assert expected is None or tokens(chunks) == expected
    assert transport.bodies == [json.loads(exchange.request)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("bad_top_p", InvalidRequest), ("overflow", ContextOverflow), ("model_gone", EngineFailed)],
)
async def test_recorded_refusal(name: str, kind: type[SingletreeError]) -> None:
    exchange = Exchange.load(name)
    answer = MemoryAnswer(exchange.status, [exchange.answer[:20], exchange.answer[20:], b""])
    engine = await started(MemoryTransport(answer))
    with pytest.raises(kind):
        await collect(engine)
    assert answer.closed


async def test_overload_carries_the_servers_wait() -> None:
    engine = await started(MemoryTransport(MemoryAnswer(503, [b"busy", b""], retry_after="9")))
    with pytest.raises(Overloaded) as caught:
        await collect(engine)
    assert caught.value.retry_after == 9.0


async def test_an_endless_error_body_is_not_read_to_its_end() -> None:
    answer = MemoryAnswer(500, [b"x" * 10000 for _ in range(100)])
    engine = await started(MemoryTransport(answer))
    with pytest.raises(EngineFailed, match="xxx"):
        await collect(engine)


@pytest.mark.parametrize("length", [WINDOW, WINDOW + 1, 10 * WINDOW])
async def test_a_prompt_without_room_behind_it_is_not_even_sent(length: int) -> None:
    transport = MemoryTransport()
    engine = await started(transport)
    with pytest.raises(ContextOverflow, match=f"{length} tokens > {WINDOW} maximum"):
        await collect(engine, [504] * length)
    assert transport.bodies == []


@pytest.mark.parametrize(("asked", "sent"), [(None, 496), (7, 7), (496, 496), (497, 496), (10**9, 496)])
async def test_max_tokens_is_clamped_to_what_fits(asked: int | None, sent: int) -> None:
    transport = MemoryTransport(MemoryAnswer(body=[event([1], "stop") + ending(), b""]))
    await outcome(await started(transport), sampling=Sampling(max_tokens=asked))
    assert transport.bodies[0]["max_tokens"] == sent


@pytest.mark.parametrize("asked", [0, -1])
async def test_nothing_asked_is_nothing_sent(asked: int) -> None:
    transport = MemoryTransport()
    chunks, _ = await outcome(await started(transport), sampling=Sampling(max_tokens=asked))
    assert chunks == [Chunk((), "length")]
    assert transport.bodies == []


async def test_a_prompt_with_room_for_one_token() -> None:
    transport = MemoryTransport(MemoryAnswer(body=[event([1], "length") + ending(), b""]))
    engine = await started(transport)
    assert tokens(await collect(engine, [504] * (WINDOW - 1))) == [1]
    assert transport.bodies[0]["max_tokens"] == 1


async def test_many_at_once_do_not_mix() -> None:
    answers = [MemoryAnswer() for _ in range(40)]
    engine = await started(MemoryTransport(*answers))
    tasks = [asyncio.create_task(collect(engine, name=str(i))) for i in range(40)]
    await asyncio.sleep(0)
    for step in range(5):
        for i, answer in enumerate(answers):
            answer.write(event([100 * i + step], "length" if step == 4 else None))
        await asyncio.sleep(0)
    for answer in answers:
        answer.write(ending(), b"")
    for i, chunks in enumerate(await asyncio.gather(*tasks)):
        assert tokens(chunks) == [100 * i + step for step in range(5)]
    assert all(answer.finished and not answer.closed for answer in answers)


async def test_a_finished_answer_leaves_its_connection_for_the_next() -> None:
    answer = MemoryAnswer(body=[Exchange.load("answer").answer])
    engine = await started(MemoryTransport(answer))
    assert tokens(await collect(engine)) == PARIS
    assert answer.finished
    assert not answer.closed


async def test_missing_cached_tokens_are_complained_about_once(caplog: pytest.LogCaptureFixture) -> None:
    plain = [MemoryAnswer(body=[event([1], "stop") + ending(None), b""]) for _ in range(2)]
    engine = await started(MemoryTransport(*plain, MemoryAnswer(body=[event([1], "stop") + ending(3), b""])))
    with caplog.at_level(logging.WARNING):
        assert [(await collect(engine))[-1].cached_tokens for _ in range(2)] == [None, None]
    assert [r.message for r in caplog.records if "--enable-prompt-tokens-details" in r.message] == [
        "vLLM does not report cached tokens; start it with --enable-prompt-tokens-details"
    ]
    assert (engine.info().details or {})["reports_cached_tokens"] is False
    assert (await collect(engine))[-1].cached_tokens == 3
    assert (engine.info().details or {})["reports_cached_tokens"] is True


@pytest.mark.parametrize(
    "pieces",
    [
        [event([1]), event([2]), LOST],
        [event([1]) + event([2]), b""],
        [event([1]) + event([2]) + event([3])[:40], LOST],
        [event([1]), event([2]) + b"data: nonsense\n\n"],
    ],
)
async def test_a_stream_that_breaks_off_is_a_failure_and_what_came_stands(
    pieces: list[bytes | Exception],
) -> None:
    answer = MemoryAnswer(body=pieces)
    engine = await started(MemoryTransport(answer))
    chunks, error = await outcome(engine)
    assert type(error) is (EngineUnfit if b"nonsense" in repr(pieces[-1]).encode() else EngineFailed)
    assert tokens(chunks) == [1, 2]
    assert answer.closed


async def test_a_stream_lost_behind_its_finish_reason_is_whole() -> None:
    engine = await started(MemoryTransport(MemoryAnswer(body=[event([1]), event([2], "stop"), LOST])))
    chunks = await collect(engine)
    assert (tokens(chunks), [c.finish for c in chunks]) == ([1, 2], [None, None, "stop"])


@pytest.mark.parametrize("why", ["it cannot be reached", "it sent nothing for too long"])
async def test_a_server_lost_before_its_answer(why: str) -> None:
    engine = await started(MemoryTransport(ConnectionLost(why)))
    with pytest.raises(EngineFailed, match=f"connection to vLLM was lost: {why}") as caught:
        await collect(engine)
    assert isinstance(caught.value.__cause__, ConnectionLost)


async def test_a_server_lost_in_the_midst_of_its_refusal() -> None:
    engine = await started(MemoryTransport(MemoryAnswer(400, [b'{"error"', LOST])))
    with pytest.raises(EngineFailed, match="was lost"):
        await collect(engine)


async def test_the_next_request_is_none_the_worse() -> None:
    engine = await started(MemoryTransport(LOST, MemoryAnswer(body=[Exchange.load("answer").answer])))
    with pytest.raises(EngineFailed):
        await collect(engine)
    assert tokens(await collect(engine)) == PARIS
