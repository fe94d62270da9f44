"""Responses over a WebSocket, in memory: deltas of a conversation, warming up, order, errors, hanging up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Message

from protocols.grammar_responses import Grammar
from singletree.engines.engine import Chunk
from singletree.protocols.answer import encode_sse
from singletree.server.settings.config import Config

from .by_hand import EngineByHand
from .memory import scope
from .serving import TOKENIZER, Served, serving
from .test_stored import CALL, CARRIED, request_body, storing


class Connection:
    """A client in memory."""

    def __init__(self, served: Served, headers: dict[str, str] | None = None) -> None:
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self._came: asyncio.Queue[Message] = asyncio.Queue()
        wanted = scope(
            "GET", "/v1/responses", {"openai-beta": "responses_websockets=2026-02-06", **(headers or {})}, b""
        )
        wanted = {key: value for key, value in wanted.items() if key != "method"}
        wanted |= {"type": "websocket", "subprotocols": []}
        self._sent.put_nowait({"type": "websocket.connect"})
        self.task = asyncio.ensure_future(served.client.app(wanted, self._sent.get, self._came.put))

    async def came(self) -> Message:
        """The next ASGI message."""
        return await asyncio.wait_for(self._came.get(), 5)

    def send_message(self, message: Any) -> None:
        """Send one; what is no text goes as JSON."""
        text = message if isinstance(message, str) else json.dumps(message)
        self._sent.put_nowait({"type": "websocket.receive", "text": text})

    def create(self, input: Any, **more: Any) -> None:
        """Ask for a response."""
        self.send_message({"type": "response.create", **request_body(input, store=False, **more)})

    async def event(self) -> dict[str, Any]:
        """The next event."""
        return dict(json.loads((await self.came())["text"]))

    async def response(self) -> dict[str, Any]:
        """The response object at the end of the next events, which follow the grammar of the stream."""
        frames = []
        while True:
            event = await self.event()
            assert event["type"] != "error", event
            frames.append((event["type"], json.dumps(event).encode()))
            if "response" in event and event["response"]["status"] != "in_progress":
                assert Grammar(encode_sse(frames)).response == event["response"]
                return dict(event["response"])

    def leave(self) -> None:
        """Hang up."""
        self._sent.put_nowait({"type": "websocket.disconnect", "code": 1000})


@asynccontextmanager
async def connected(served: Served, **headers: str) -> AsyncIterator[Connection]:
    connection = Connection(served, headers)
    assert (await connection.came())["type"] == "websocket.accept"
    try:
        yield connection
        connection.leave()
        await asyncio.wait_for(connection.task, 5)
    finally:
        connection.task.cancel()
        await asyncio.gather(connection.task, return_exceptions=True)


async def test_new_items_make_the_prompt_of_the_whole_input_though_nothing_is_stored() -> None:  # C30
    async with serving({"s0": CALL, "s1": "Done."}) as served, connected(served) as connection:
        connection.create("List. [[script:s0,s1]]", include=CARRIED)
        first = await connection.response()
        result = {
            "type": "function_call_output",
            "call_id": first["output"][-1]["call_id"],
            "output": "notes.txt",
        }
        connection.create([result], previous_response_id=first["id"])
        second = await connection.response()
        assert second["previous_response_id"] == first["id"]
        whole = [{"role": "user", "content": "List. [[script:s0,s1]]"}, *first["output"], result]
        connection.create(whole)
        await connection.response()
        assert served.engine.log[1].prompt_token_ids == served.engine.log[2].prompt_token_ids
        begun = list(served.engine.log[0].prompt_token_ids) + list(served.engine.log[0].token_ids)
        assert list(served.engine.log[1].prompt_token_ids)[: len(begun)] == begun


async def test_a_warm_up_says_nothing_and_can_be_gone_on_from() -> None:  # C30
    async with serving({"s0": "Hello."}) as served, connected(served) as connection:
        connection.create([{"role": "developer", "content": "Be brief."}], generate=False)
        warm = await connection.response()
        assert (warm["status"], warm["output"]) == ("completed", [])
        assert warm["usage"]["output_tokens"] == 0
        assert served.engine.log[0].sampling.max_tokens == 1
        connection.create("Hi [[script:s0]]", previous_response_id=warm["id"])
        made = await connection.response()
        assert made["output"][0]["content"][0]["text"] == "Hello."
        prompt = served.model.tokenizer.decode(served.engine.log[1].prompt_token_ids)
        assert prompt.index("Be brief.") < prompt.index("Hi ")


async def test_messages_are_answered_one_after_another() -> None:
    async with serving({"a": "One.", "b": "Two."}) as served, connected(served) as connection:
        connection.create("[[script:a]]")
        connection.create("[[script:b]]")
        texts = [(await connection.response())["output"][0]["content"][0]["text"] for _ in range(2)]
        assert texts == ["One.", "Two."]


async def test_what_is_stored_can_be_had_over_http_and_gone_on_from_here() -> None:
    async with storing("Hello.", "More.") as served, connected(served) as connection:
        connection.send_message({"type": "response.create", **request_body("Hi [[script:s0]]")})
        made = await connection.response()
        assert (await served.client.get(f"/v1/responses/{made['id']}")).json == made
        over_http = (
            await served.client.post("/v1/responses", request_body("Go on", previous_response_id=made["id"]))
        ).json
        connection.create("And?", previous_response_id=over_http["id"])
        assert (await connection.response())["status"] == "completed"


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ("no JSON", None, None),
        ({"type": "response.append"}, None, "type"),
        ({"type": "response.create", "input": "Hi", "model": 3}, None, "model"),
        (
            {"type": "response.create", **request_body("Hi", previous_response_id="resp_1")},
            "previous_response_not_found",
            "previous_response_id",
        ),
    ],
)
async def test_a_refusal_leaves_the_connection_open(
    message: Any, code: str | None, param: str | None
) -> None:
    async with serving({"s0": "Hello."}) as served, connected(served) as connection:
        connection.send_message(message)
        refused = await connection.event()
        assert (refused["type"], refused["status"]) == ("error", 400)
        assert (refused["error"]["code"], refused["error"]["param"]) == (code, param)
        connection.create("Hi [[script:s0]]")
        assert (await connection.response())["status"] == "completed"


async def test_hanging_up_frees_the_engine() -> None:  # C40
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        async with connected(served) as connection:
            connection.create("Hi")
            engine.emit(Chunk(tuple(TOKENIZER.encode("Hello"))))
            await engine.waiting.wait()
        assert engine.freed == 1
        assert served.service.tracing.running == 0


async def test_a_response_in_the_background_comes_as_messages_too() -> None:
    async with storing("Hello.") as served, connected(served) as connection:
        connection.send_message(
            {"type": "response.create", **request_body("Hi [[script:s0]]", background=True)}
        )
        made = await connection.response()
        assert made["output"][0]["content"][0]["text"] == "Hello."
        assert (await served.client.get(f"/v1/responses/{made['id']}")).json == made


async def test_a_key_is_asked_for() -> None:
    async with serving(config=Config(api_key=("secret",))) as served:
        connection = Connection(served)
        assert (await connection.came())["type"] == "websocket.accept"
        assert (await connection.event())["error"]["code"] == "invalid_api_key"
        assert (await connection.came())["type"] == "websocket.close"
        await connection.task
        async with connected(served, authorization="Bearer secret"):
            pass


async def test_a_message_may_be_as_large_as_a_body() -> None:
    async with (
        serving({"s0": "Hello."}, config=Config(body_limit=1000)) as served,
        connected(served) as connection,
    ):
        connection.create("x" * 1000)
        refused = await connection.event()
        assert (refused["status"], "raise --body-limit" in refused["error"]["message"]) == (413, True)
        connection.create("Hi [[script:s0]]")
        assert (await connection.response())["status"] == "completed"
