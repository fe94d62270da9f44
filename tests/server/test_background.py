"""Responses in the background: polled, streamed again from anywhere, cancelled, and told when they failed."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from protocols.grammar_responses import Grammar
from singletree.engines.engine import Chunk
from singletree.server.answers.response import Lifecycle
from singletree.server.answers.stream import Stream
from singletree.server.turn.generation import Generation
from singletree.stored_responses.store import Store
from singletree.testing.scripts import Script

from .by_hand import EngineByHand
from .memory import events
from .serving import TOKENIZER, Served, serving
from .test_stored import PATH, refused, request_body, storing


def text(value: str) -> Chunk:
    return Chunk(tuple(TOKENIZER.encode(value)))


async def begun(served: Served, **more: Any) -> dict[str, Any]:
    """The first answer to a request in the background."""
    reply = await served.client.post(PATH, request_body("Hi [[script:s0]]", background=True, **more))
    assert reply.status == 200, reply.body
    return dict(reply.json)


async def state(served: Served, id: str) -> dict[str, Any]:
    return dict((await served.client.get(f"{PATH}/{id}")).json)


async def over(served: Served, id: str) -> dict[str, Any]:
    """The response once it has an end."""
    job = served.service.jobs.get(id)
    assert job is not None
    async with asyncio.timeout(5):
        async for _ in job.events(0):
            pass
    return await state(served, id)


async def test_it_is_made_while_nobody_waits() -> None:
    async with storing(Script("Hello.", delay=0.001)) as served:
        made = await begun(served)
        assert made["status"] == "in_progress"
        assert made["background"] is True
        done = await over(served, made["id"])
        assert done["status"] == "completed"
        assert done["output"][-1]["content"][0]["text"] == "Hello."
        served.service.jobs.drop(made["id"])
        assert await state(served, made["id"]) == done, "the store has it as well"


async def test_once_it_is_over_only_its_events_are_kept() -> None:
    def answers() -> int:
        gc.collect()
        return sum(isinstance(each, Generation | Stream | Lifecycle) for each in gc.get_objects())

    async with storing(Script("Hello.", delay=0.001)) as served:
        before = answers()
        made = await begun(served)
        await over(served, made["id"])
        job = served.service.jobs.get(made["id"])
        assert job is not None
        assert answers() == before, "the prompt and the request of a job that is over stay in memory"
        assert [frames async for frames in job.events(0)] == [], "nobody can read them: it is not streamed"


async def test_its_events_can_be_read_from_any_of_them() -> None:
    async with storing(Script("Hello, you there.", delay=0.001)) as served:
        whole = (
            await served.client.post(PATH, request_body("Hi [[script:s0]]", background=True, stream=True))
        ).body
        id = events(whole)[0][1]["response"]["id"]
        assert Grammar(whole).response["status"] == "completed"
        again = await served.client.get(f"{PATH}/{id}?stream=true&starting_after=3")
        assert events(again.body) == events(whole)[4:]
        from_the_start = await served.client.get(f"{PATH}/{id}?stream=true")
        assert from_the_start.body == whole
        reply = await served.client.get(f"{PATH}/{id}?stream=true&starting_after=x")
        refused(reply, 400, None, "starting_after")


async def test_a_client_that_leaves_does_not_end_it() -> None:
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        served.service.store = Store(None, 2**30)
        engine.emit(text("Hello"))
        request = request_body("Hi", background=True, stream=True)
        async with served.client.open("POST", PATH, request) as (exchange, _):
            first = await exchange.read()
            exchange.leave()
        assert first is not None
        id = events(first)[0][1]["response"]["id"]
        engine.emit(text(" there"), Chunk((), finish="stop"))
        assert (await over(served, id))["output"][-1]["content"][0]["text"] == "Hello there"
        served.service.store.close()


async def test_it_can_be_cancelled_and_frees_the_engine() -> None:  # C40
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        served.service.store = Store(None, 2**30)
        made = await begun(served)
        engine.emit(text("Hello"))
        await engine.waiting.wait()
        cancelled = (await served.client.post(f"{PATH}/{made['id']}/cancel", b"")).json
        assert cancelled["status"] == "cancelled"
        assert engine.freed == 1
        assert (await served.client.post(f"{PATH}/{made['id']}/cancel", b"")).json == cancelled
        assert await state(served, made["id"]) == cancelled
        served.service.store.close()


async def test_one_that_was_not_in_the_background_cannot_be_cancelled() -> None:
    async with storing("Hello.") as served:
        made = (await served.client.post(PATH, request_body("Hi [[script:s0]]"))).json
        reply = await served.client.post(f"{PATH}/{made['id']}/cancel", b"")
        assert refused(reply, 400, None, None) == "Cannot cancel a synchronous response."
        reply = await served.client.get(f"{PATH}/{made['id']}?stream=true")
        refused(reply, 400, None, "stream")
        reply = await served.client.get(f"{PATH}/resp_none?stream=true")
        assert refused(reply, 404, None, None) == "Response with id 'resp_none' not found."


@pytest.mark.parametrize("fail_after", [0, 3])
async def test_a_failure_is_the_end_of_the_response(fail_after: int) -> None:  # C39
    async with storing(Script("Hello, and then", fail_after=fail_after)) as served:
        done = await over(served, (await begun(served))["id"])
        assert done["status"] == "failed"
        assert done["error"]["code"] == "server_error"


async def test_it_needs_the_store() -> None:
    async with storing("Hello.") as served:
        reply = await served.client.post(PATH, request_body("Hi", background=True, store=False))
        refused(reply, 400, None, "background")
    async with serving() as served:
        reply = await served.client.post(PATH, request_body("Hi", background=True))
        refused(reply, 400, None, "background")


async def test_deleting_it_ends_it() -> None:
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        served.service.store = Store(None, 2**30)
        made = await begun(served)
        await engine.waiting.wait()
        assert (await served.client.request("DELETE", f"{PATH}/{made['id']}")).status == 200
        assert engine.freed == 1
        assert (await served.client.get(f"{PATH}/{made['id']}")).status == 404
        served.service.store.close()


async def test_the_next_response_goes_on_from_it() -> None:
    async with storing("Hello.", "More.") as served:
        made = await begun(served)
        await over(served, made["id"])
        reply = await served.client.post(PATH, request_body("And?", previous_response_id=made["id"]))
        assert reply.status == 200
        assert reply.json["previous_response_id"] == made["id"]
