"""An engine that is full: requests are held in their order, with signs of life, and refused at last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from singletree.conversation import Sampling
from singletree.engines import sharing
from singletree.engines.engine import Chunk, EngineInfo, GenerationJob
from singletree.engines.sharing import QueueingEngine
from singletree.errors import Overloaded
from singletree.server.models.catalog import load_models
from singletree.server.settings.config import Config

from .memory import Reply, events
from .serving import TOKENIZER, body, serving
from .test_generation import PATHS, final, outcome
from .test_takeover import until

each_protocol = pytest.mark.parametrize("path", PATHS)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "PAUSE_SECONDS", 0.01)


class Full:
    """An engine with ``free`` places that refuses whoever finds none.

    Attributes:
        served: the requests that got one, in order.
        going_on: set to let the generations end.
    """

    def __init__(self, free: int = 0) -> None:
        self.free = free
        self.served: list[str] = []
        self.refused: list[str] = []
        self.going_on = asyncio.Event()

    async def start(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    def info(self) -> EngineInfo:
        """Roomy."""
        return EngineInfo("full", 8192)

    async def abort(self, request_id: str) -> None:
        """Never called."""
        raise AssertionError

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """See Engine."""
        if not self.free:
            self.refused.append(job.request_id)
            raise Overloaded("every place is taken", retry_after=7)
        self.free -= 1
        self.served.append(job.request_id)
        try:
            yield Chunk([65])
            await self.going_on.wait()
            yield Chunk([66], "stop")
        finally:
            self.free += 1


async def run(engine: QueueingEngine, name: str) -> int:
    """Generates to the end; the number of tokens."""
    async with aclosing(engine.generate(GenerationJob([1], Sampling(), name))) as chunks:
        return sum([len(chunk.token_ids) async for chunk in chunks])


async def test_first_come_first_served() -> None:
    full = Full()
    full.going_on.set()
    engine = QueueingEngine(full, 5)
    asking = []
    for name in "abcd":
        asking.append(asyncio.create_task(run(engine, name)))
        await until(lambda: engine.waiting == len(asking))
    await asyncio.sleep(10 * sharing.PAUSE_SECONDS)
    assert set(full.refused) == {"a"}, "only the first in line tries"
    full.free = 1
    late = asyncio.create_task(run(engine, "e"))
    assert await asyncio.gather(*asking, late) == [2] * 5
    assert full.served == list("abcde"), "who comes late does not overtake"
    assert engine.waiting == 0


async def test_who_leaves_the_line_lets_the_next_one_go() -> None:
    full = Full()
    full.going_on.set()
    engine = QueueingEngine(full, 5)
    first, second = (asyncio.create_task(run(engine, name)) for name in "ab")
    await until(lambda: engine.waiting == 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    full.free = 1
    assert await second == 2
    assert (full.served, engine.waiting) == (["b"], 0)


async def test_a_generation_that_ends_wakes_the_first_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "PAUSE_SECONDS", 60)
    full = Full(1)
    engine = QueueingEngine(full, 60)
    running, waiting = (asyncio.create_task(run(engine, name)) for name in "ab")
    await until(lambda: engine.waiting == 1)
    full.going_on.set()
    assert [await asyncio.wait_for(each, 5) for each in (running, waiting)] == [2, 2]


async def test_a_limit_in_time_and_in_number() -> None:
    full = Full()
    engine = QueueingEngine(full, 0.05, max_queue_length=1)
    waiting = asyncio.create_task(run(engine, "a"))
    await until(lambda: engine.waiting == 1)
    with pytest.raises(Overloaded, match="1 requests are waiting already"):
        await run(engine, "b")
    with pytest.raises(Overloaded, match=r"0\.05 seconds"):
        await waiting
    with pytest.raises(Overloaded):
        await run(QueueingEngine(full, 0), "c")


@each_protocol
async def test_a_stream_is_held_open(path: str) -> None:  # C11
    full = Full()
    full.going_on.set()
    alive = {"/v1/messages": b"event: ping", "/v1/responses": b"event: response.in_progress"}
    seen = b""
    async with (
        serving(engine=QueueingEngine(full, 5), config=Config(keep_alive_seconds=0.02)) as served,
        served.client.open("POST", path, body(path, "x", stream=True)) as (exchange, _),
    ):
        while seen.count(alive.get(path, b": keep-alive")) < 3:
            seen += await exchange.read() or b""
        full.free = 1
        seen += await exchange.rest()
    assert exchange.status == 200
    reply = Reply(exchange.status, exchange.headers, seen)
    assert outcome(path, final(path, reply))[2] == TOKENIZER.decode([65, 66])


REFUSED = {"/v1/messages": (529, "overloaded_error"), "/v1/responses": (503, "overloaded")}


@each_protocol
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_at_once_is_a_status(path: str, stream: bool) -> None:  # C39
    async with serving(engine=QueueingEngine(Full(), 0)) as served:
        reply = await served.client.post(path, body(path, "x", stream=stream))
    status, kind = REFUSED.get(path, (503, "overloaded"))
    assert (reply.status, reply.headers["retry-after"]) == (status, "7")
    assert kind in reply.body.decode()


@each_protocol
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_at_last(path: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # C39
    monkeypatch.setattr("singletree.server.answers.response.OPENING_SECONDS", 0.01)
    async with serving(engine=QueueingEngine(Full(), 0.1)) as served:
        reply = await served.client.post(path, body(path, "x", stream=stream))
    if not stream:
        assert (reply.status, reply.headers["retry-after"]) == (REFUSED.get(path, (503, ""))[0], "7")
        return
    last: Any = events(reply.body)[-2 if path == "/v1/chat/completions" else -1]
    assert reply.status == 200
    assert last[0] == {"/v1/messages": "error", "/v1/responses": "response.failed"}.get(path, "")
    # Not "server_is_overloaded": at that Codex gives up for good.
    code = {"/v1/messages": "'overloaded_error'", "/v1/responses": "'rate_limit_exceeded'"}
    assert code.get(path, "'overloaded'") in str(last[1])


async def test_what_is_not_of_the_line_goes_through() -> None:
    asked: list[tuple[str, ...]] = []

    class Listening(Full):
        async def start(self) -> None:
            asked.append(("start",))

        async def close(self) -> None:
            asked.append(("close",))

        async def abort(self, request_id: str) -> None:
            asked.append(("abort", request_id))

    engine = QueueingEngine(Listening(), 1)
    await engine.start()
    await engine.abort("r")
    await engine.close()
    assert asked == [("start",), ("abort", "r"), ("close",)]
    assert engine.info().name == "full"


async def test_a_model_is_loaded_with_a_line_in_front_of_it() -> None:
    loaded = await load_models(Config(engine="scripted", hold_seconds=3), lambda line: None)
    try:
        [model] = loaded.models
        assert isinstance(model.engine, QueueingEngine)
        assert model.engine.info().name == "scripted"
    finally:
        await loaded.close()


async def ranked(
    engine: QueueingEngine, name: str, priority: int, sensitivity: float | None = None
) -> list[Chunk]:
    job = GenerationJob([1], Sampling(), name, priority=priority, latency_sensitivity=sensitivity)
    async with aclosing(engine.generate(job)) as chunks:
        return [chunk async for chunk in chunks]


async def test_the_queue_goes_by_priority_then_by_latency_then_by_arrival() -> None:
    full = Full()
    full.going_on.set()
    engine = QueueingEngine(full, 60)
    asking = []
    for name, priority, sensitivity in (
        ("idle", 1, None),
        ("first", 0, None),
        ("second", 0, None),
        ("watched", 0, 2.5),
        ("urgent", -5, None),
        ("strict", -(1 << 32), None),
    ):
        asking.append(asyncio.create_task(ranked(engine, name, priority, sensitivity)))
        await until(lambda: engine.waiting == len(asking))
    full.free = 1
    answers = await asyncio.gather(*asking)
    assert full.served == ["strict", "urgent", "watched", "first", "second", "idle"]
    routes = [answer[0].route for answer in answers]
    assert all(route is not None and route.waited_seconds > 0 and not route.worker for route in routes)
    assert routes[-1] is not None
    assert "behind 0 others" in routes[-1].reason
    assert all(chunk.route is None for answer in answers for chunk in answer[1:])


async def test_who_does_not_wait_has_no_route() -> None:
    full = Full(1)
    full.going_on.set()
    assert all(chunk.route is None for chunk in await ranked(QueueingEngine(full, 60), "a", 0))


async def test_a_full_queue_refuses_the_last_by_rank() -> None:
    full = Full()
    full.going_on.set()
    engine = QueueingEngine(full, 60, max_queue_length=2)
    asking = {}
    for name, priority in (("late", 9), ("early", 1)):
        asking[name] = asyncio.create_task(ranked(engine, name, priority))
        await until(lambda: engine.waiting == len(asking))
    with pytest.raises(Overloaded, match="2 requests are waiting already"):
        await ranked(engine, "equal", 9)
    asking["urgent"] = asyncio.create_task(ranked(engine, "urgent", 0))
    with pytest.raises(Overloaded, match="higher priority"):
        await asking.pop("late")
    full.free = 1
    await asyncio.gather(*asking.values())
    assert (full.served, engine.waiting) == (["urgent", "early"], 0)
