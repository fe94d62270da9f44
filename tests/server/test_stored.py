"""Stored responses and conversations, over in-memory ASGI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from singletree.stored_responses.store import Store
from singletree.testing.scripts import Script

from .memory import Reply, events
from .serving import MODEL, Served, serving

PATH = "/v1/responses"
TOOLS = [
    {
        "type": "function",
        "name": "ls",
        "parameters": {"type": "object", "properties": {"n": {"type": "number"}}},
    }
]
CARRIED = ["reasoning.content"]
"""What a client asks for that sends its whole input, since these servers remember no turns."""
CALL = '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "ls", "arguments": {"n":   1.0}}\n</tool_call>'


@asynccontextmanager
async def storing(*turns: str | Script) -> AsyncIterator[Served]:
    scripts = {f"s{i}": turn for i, turn in enumerate(turns)}
    async with serving(scripts) as served:
        served.service.store = Store(None, 2**30)
        try:
            yield served
        finally:
            served.service.store.close()


def request_body(input: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": input, "tools": TOOLS, **more}


async def ask(served: Served, input: Any, **more: Any) -> dict[str, Any]:
    """The response object, however it is sent."""
    reply = await served.client.post(PATH, request_body(input, **more))
    assert reply.status == 200, reply.body
    if not more.get("stream"):
        return dict(reply.json)
    return dict(events(reply.body)[-1][1]["response"])


def refused(reply: Reply, status: int, code: str | None, param: str | None) -> str:
    assert reply.status == status, reply.body
    error = reply.json["error"]
    assert (error["code"], error["param"]) == (code, param)
    return str(error["message"])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_prompt_is_that_of_the_whole_input(stream: bool) -> None:  # C30
    async with storing(CALL, "Done.", "Done.") as served:
        first = await ask(served, "List. [[script:s0]]", stream=stream, include=CARRIED)
        call = first["output"][-1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "notes.txt"}
        await ask(served, [result], previous_response_id=first["id"], stream=stream)
        whole = [{"role": "user", "content": "List. [[script:s0]]"}, *first["output"], result]
        await ask(served, whole, stream=stream, store=False)
        prompts = [play.prompt_token_ids for play in served.engine.log]
        assert prompts[1] == prompts[2]
        begun = list(served.engine.log[0].prompt_token_ids) + list(served.engine.log[0].token_ids)
        assert list(prompts[1])[: len(begun)] == begun


async def test_a_response_can_be_had_again_and_forgotten() -> None:
    async with storing("Hello.") as served:
        made = await ask(served, "Hi [[script:s0]]", metadata={"a": "b"})
        assert made["store"] is True
        again = await served.client.get(f"{PATH}/{made['id']}")
        assert again.json == made
        gone = await served.client.request("DELETE", f"{PATH}/{made['id']}")
        assert gone.json == {"id": made["id"], "object": "response", "deleted": True}
        message = refused(await served.client.get(f"{PATH}/{made['id']}"), 404, None, None)
        assert message == f"Response with id '{made['id']}' not found."
        reply = await served.client.post(PATH, request_body("More", previous_response_id=made["id"]))
        refused(reply, 400, "previous_response_not_found", "previous_response_id")


async def test_store_false_stores_nothing() -> None:
    async with storing("Hello.") as served:
        made = await ask(served, "Hi [[script:s0]]", store=False)
        assert made["store"] is False
        assert (await served.client.get(f"{PATH}/{made['id']}")).status == 404


async def test_without_a_store_a_request_is_refused() -> None:
    async with serving({"s0": "Hello."}) as served:
        made = await served.client.post(PATH, request_body("Hi [[script:s0]]"))
        assert made.json["store"] is False
        reply = await served.client.post(PATH, request_body("Hi", previous_response_id="resp_1"))
        assert "does not store responses" in refused(reply, 400, None, "previous_response_id")
        assert (await served.client.get(f"{PATH}/resp_1")).status == 400


async def test_input_items_page_by_page() -> None:
    async with storing("Hello.") as served:
        made = await ask(served, [{"role": "user", "content": f"part {i}"} for i in range(3)])
        path = f"{PATH}/{made['id']}/input_items"
        page = (await served.client.get(path + "?order=asc&limit=2")).json
        assert [item["content"][0]["text"] for item in page["data"]] == ["part 0", "part 1"]
        assert page["has_more"]
        assert page["last_id"] == page["data"][-1]["id"]
        rest = (await served.client.get(f"{path}?order=asc&after={page['last_id']}")).json
        assert [item["content"][0]["text"] for item in rest["data"]] == ["part 2"]
        assert not rest["has_more"]
        newest = (await served.client.get(path)).json
        assert [item["content"][0]["text"] for item in newest["data"]] == ["part 2", "part 1", "part 0"]
        for query, param in (
            ("limit=0", "limit"),
            ("limit=x", "limit"),
            ("order=up", "order"),
            ("after=x", "after"),
        ):
            refused(await served.client.get(f"{path}?{query}"), 400, None, param)


async def test_a_reference_stands_for_the_item() -> None:
    async with storing(CALL, "Done.") as served:
        first = await ask(served, "List. [[script:s0]]", include=CARRIED)
        call = first["output"][-1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "notes.txt"}
        asked = {"role": "user", "content": "List. [[script:s0]]"}
        referring = [
            asked,
            *({"type": "item_reference", "id": item["id"]} for item in first["output"]),
            result,
        ]
        await ask(served, referring)
        await ask(served, [asked, *first["output"], result])
        assert served.engine.log[1].prompt_token_ids == served.engine.log[2].prompt_token_ids


async def test_tokens_of_what_goes_on_are_counted_whole() -> None:  # C27
    async with storing("Hello.", "More.") as served:
        first = await ask(served, "Hi [[script:s0]]")
        body = request_body("And?", previous_response_id=first["id"])
        counted = await served.client.post(f"{PATH}/input_tokens", body)
        made = (await served.client.post(PATH, body)).json
        assert counted.json["input_tokens"] == made["usage"]["input_tokens"]


async def test_a_conversation_grows_with_its_responses() -> None:
    async with storing("Hello.", "Again.") as served:
        new = {"metadata": {"topic": "x"}, "items": [{"role": "user", "content": "We speak [[script:s0]]"}]}
        conversation = (await served.client.post("/v1/conversations", new)).json
        assert conversation["object"] == "conversation"
        assert conversation["metadata"] == {"topic": "x"}
        path = f"/v1/conversations/{conversation['id']}"
        made = await ask(served, "Hi", conversation=conversation["id"], store=False)
        assert made["conversation"] == {"id": conversation["id"]}
        items = (await served.client.get(f"{path}/items?order=asc")).json["data"]
        texts = [item["content"][0]["text"] for item in items]
        assert texts == ["We speak [[script:s0]]", "Hi", "Hello."]
        prompt = served.model.tokenizer.decode(served.engine.log[-1].prompt_token_ids)
        assert prompt.index("We speak") < prompt.index("Hi")
        one = (await served.client.get(f"{path}/items/{items[1]['id']}")).json
        assert one == items[1]
        await served.client.request("DELETE", f"{path}/items/{items[1]['id']}")
        assert (await served.client.get(f"{path}/items/{items[1]['id']}")).status == 404
        more = await served.client.post(f"{path}/items", {"items": [{"role": "user", "content": "Last"}]})
        assert more.json["data"][0]["content"][0]["text"] == "Last"
        reported = await served.client.post(path, {"metadata": {"topic": "y"}})
        assert reported.json["metadata"] == {"topic": "y"}
        assert (await served.client.get(path)).json == reported.json
        gone = await served.client.request("DELETE", path)
        assert gone.json == {"id": conversation["id"], "object": "conversation.deleted", "deleted": True}
        assert "not found" in refused(await served.client.get(path), 404, None, None)
        reply = await served.client.post(PATH, request_body("Hi", conversation=conversation["id"]))
        assert "not found" in refused(reply, 404, None, None)


async def test_a_failed_response_is_stored_as_failed() -> None:  # C39
    async with storing(Script("Hello, and then", fail_after=5)) as served:
        reply = await served.client.post(PATH, request_body("Hi [[script:s0]]", stream=True))
        last = events(reply.body)[-1][1]["response"]
        assert last["status"] == "failed"
        assert (await served.client.get(f"{PATH}/{last['id']}")).json == last
