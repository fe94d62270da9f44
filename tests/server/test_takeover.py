"""A request that comes again while it is answered: the second takes the first one's place."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from singletree.engines.engine import Chunk
from singletree.server.sessions.request_headers import (
    SOONEST_REPETITION,
    InFlight,
    RequestKey,
    request_key,
)

from .by_hand import EngineByHand
from .memory import events
from .serving import Served, body, serving
from .test_generation import PATHS

each_protocol = pytest.mark.parametrize("path", PATHS)
stream_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
MESSAGES = "/v1/messages"
SESSION = {"x-claude-code-session-id": "s-1"}
LAST = {"/v1/messages": "error", "/v1/responses": "response.failed"}


KEY = {"idempotency-key": "k-1"}
EVIDENCE = pytest.mark.parametrize("headers", [SESSION, KEY], ids=["client", "key"])


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def waiting(served: Served) -> Clock:
    """The clock by which ``served`` tells how long a request has been under way."""
    clock = Clock()
    served.service.in_flight = InFlight(clock)
    return clock


async def until(holds: Any) -> None:
    """Until ``holds`` is true."""
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)


@each_protocol
@stream_or_not
@EVIDENCE
@pytest.mark.parametrize("tokens", [0, 2])
async def test_the_second_takes_the_place(
    path: str, stream: bool, tokens: int, headers: dict[str, str]
) -> None:  # C11
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        clock = waiting(served)
        asked = body(path, "x", stream=stream)
        async with served.client.open("POST", path, asked, headers) as (first, _):
            for at in range(tokens):
                await engine.waiting.wait()
                engine.emit(Chunk([at + 65]))
            await engine.waiting.wait()
            engine.waiting.clear()
            clock.seconds += SOONEST_REPETITION
            async with served.client.open("POST", path, asked, headers) as (second, _):
                rest = await first.rest()
                assert (engine.emitted, engine.freed) == (tokens, 1), "within one token"
                await engine.waiting.wait()
                engine.emit(Chunk([70], "stop"))
                assert await second.rest()
                assert second.status == 200
        assert served.service.tracing.running == 0
        assert b"came again" in rest, "no silent end, should somebody still read it"
        if stream and tokens:
            assert (first.status, events(rest)[-1][0]) == (200, LAST.get(path, ""))
        else:
            assert (first.status, first.headers["x-should-retry"]) == (409, "false")
    assert engine.freed == 1


@each_protocol
async def test_what_differs_runs_side_by_side(path: str) -> None:
    engine = EngineByHand()
    agent = {**SESSION, "x-claude-code-agent-id": "a"}
    sampler = {"x-session-id": "s-2"}
    others = [
        ("x", SESSION),
        ("y", SESSION),
        ("x", agent),
        ("x", {**SESSION, "idempotency-key": "another"}),
        ("x", KEY),
        ("x", {"idempotency-key": "k-2"}),
        ("x", sampler),
        ("x", sampler),
        ("x", {**sampler, "x-stainless-retry-count": "1"}),
        ("x", {}),
        ("x", {}),
    ]
    async with serving(engine=engine) as served:
        asking = [asyncio.create_task(served.client.post(path, body(path, p), h)) for p, h in others]
        await until(lambda: served.service.tracing.running == len(others))
        for _ in range(50):
            await asyncio.sleep(0)
        assert served.service.tracing.running == len(others), "nobody was told to give way"
        for _ in others:
            engine.emit(Chunk([65], "stop"))
        replies = await asyncio.gather(*asking)
    assert [reply.status for reply in replies] == [200] * len(others)
    assert engine.freed == 0


@each_protocol
@stream_or_not
@pytest.mark.parametrize("header", ["x-session-id", "x-singletree-session", "x-affinity"])
async def test_samples_under_one_session_are_all_answered(path: str, stream: bool, header: str) -> None:
    """However late they come: a program that samples has only so many requests under way at once."""
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        clock, asked = waiting(served), body(path, "x", stream=stream)
        asking = []
        for _ in range(4):
            asking.append(asyncio.create_task(served.client.post(path, asked, {header: "s"})))
            await until(lambda: served.service.tracing.running == len(asking))
            clock.seconds += 60
        engine.emit(*(Chunk([65], "stop") for _ in asking))
        assert [reply.status for reply in await asyncio.gather(*asking)] == [200] * len(asking)
    assert engine.freed == 0


async def test_agents_with_one_task_that_start_at_once_are_all_answered() -> None:
    """A client that repeats starts two sub-agents with the same words, and repeats one of their requests later: which
    of the two it repeats cannot be known, so nobody gives way.
    """
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        clock, asked = waiting(served), body(MESSAGES, "x")
        asking = []
        for seconds in (SOONEST_REPETITION / 2, 300.0, 300.0):
            asking.append(asyncio.create_task(served.client.post(MESSAGES, asked, SESSION)))
            await until(lambda: served.service.tracing.running == len(asking))
            clock.seconds += seconds
        engine.emit(*(Chunk([65], "stop") for _ in asking))
        assert [reply.status for reply in await asyncio.gather(*asking)] == [200] * len(asking)
        assert not served.service.in_flight._held


async def test_the_same_request_afterwards_is_another() -> None:
    engine = EngineByHand()
    engine.emit(Chunk([65], "stop"), Chunk([65], "stop"))
    async with serving(engine=engine) as served:
        for _ in range(2):
            assert (await served.client.post(MESSAGES, body(MESSAGES, "x"), SESSION)).status == 200
        assert not served.service.in_flight._held


async def test_a_third_takes_the_place_of_the_second() -> None:
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        clock = waiting(served)
        asking = []
        for _ in range(3):
            asking.append(asyncio.create_task(served.client.post(MESSAGES, body(MESSAGES, "x"), SESSION)))
            await engine.waiting.wait()
            engine.waiting.clear()
            clock.seconds += SOONEST_REPETITION
        await until(lambda: engine.freed == 2)
        engine.emit(Chunk([65], "stop"))
        replies = await asyncio.gather(*asking)
        assert not served.service.in_flight._held
    assert [reply.status for reply in replies] == [409, 409, 200]


def test_a_place_is_the_session_and_the_body() -> None:
    place = request_key(SESSION, "/v1/messages", b"{}")
    assert place is not None
    assert place == request_key({**SESSION, "x-stainless-retry-count": "1"}, "/v1/messages", b"{}")
    assert place != request_key(SESSION, "/v1/responses", b"{}")
    assert request_key({}, "/v1/messages", b"{}") is None, "samples of one prompt share a cache key"
    assert request_key({"x-session-id": "s"}, "/v1/messages", b"{}") is None, "and a session's name"
    keyed = request_key({**SESSION, **KEY}, "/v1/messages", b"{}")
    assert keyed not in (None, place, request_key(KEY, "/v1/messages", b"{}"))


async def test_compression_is_not_the_request() -> None:
    plain = json.dumps(body(MESSAGES, "x")).encode()
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        clock = waiting(served)
        packed = {**SESSION, "content-encoding": "gzip"}
        first = asyncio.create_task(served.client.post(MESSAGES, gzip.compress(plain), packed))
        await engine.waiting.wait()
        clock.seconds += SOONEST_REPETITION
        second = asyncio.create_task(served.client.post(MESSAGES, plain, SESSION))
        assert (await first).status == 409
        engine.emit(Chunk([65], "stop"))
        assert (await second).status == 200


def test_who_left_frees_nobody_elses_place() -> None:
    clock, reported = Clock(), []
    places, place = InFlight(clock), RequestKey(b"p")
    with places.guard(place, lambda: reported.append("first")):
        clock.seconds += SOONEST_REPETITION
        with places.guard(place, lambda: reported.append("second")):
            clock.seconds += SOONEST_REPETITION
        with places.guard(place, lambda: reported.append("third")):
            pass
    assert reported == ["first"]
    assert not places._held
