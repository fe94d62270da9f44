"""One turn from the request to the last byte: what the model says, how it ends, and who leaves when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from singletree.conversation import Conversation, ToolCall, Turn
from singletree.engines.engine import Chunk
from singletree.errors import EngineFailed
from singletree.events import ToolCallStart
from singletree.server.answers import stream as streams
from singletree.server.answers.stream import SendBuffer
from singletree.server.ids import TurnCallIds
from singletree.server.settings.config import Config
from singletree.testing.scripts import Script

from .by_hand import EngineByHand
from .memory import Reply, events
from .serving import TOKENIZER, body, serving

PATHS = ("/v1/messages", "/v1/chat/completions", "/v1/responses")
each_protocol = pytest.mark.parametrize("path", PATHS)
stream_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "a"}}\n</tool_call>'
TURN = f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}"

CHAT_TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
TOOLS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"name": "ls", "input_schema": {"type": "object"}},
    "/v1/chat/completions": CHAT_TOOL,
    "/v1/responses": {"type": "function", "name": "ls", "parameters": {"type": "object"}},
}
LIMIT = {
    "/v1/messages": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


def final(path: str, reply: Reply) -> dict[str, Any]:
    """The whole answer; of a stream what it adds up to, in the same shape as far as it is looked at."""
    assert reply.status == 200
    if reply.headers["content-type"] == "application/json":
        return dict(reply.json)
    streamed = events(reply.body)
    if path == "/v1/responses":
        return dict(streamed[-1][1]["response"])
    if path == "/v1/messages":
        return _message(streamed)
    return _completion(streamed)


def _message(output: list[tuple[str, Any]]) -> dict[str, Any]:
    message = output[0][1]["message"]
    for name, data in output:
        if name == "content_block_start":
            message["content"].append(data["content_block"])
        elif name == "message_delta":
            message |= data["delta"] | {"usage": data["usage"]}
        elif name == "content_block_delta":
            delta, block = data["delta"], message["content"][data["index"]]
            field = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"], "json")
            block[field] = block.get(field, "") + str(next(v for k, v in delta.items() if k != "type"))
    return dict(message)


def _completion(output: list[tuple[str, Any]]) -> dict[str, Any]:
    assert output[-1][1] == "[DONE]"
    choice: dict[str, Any] = {"message": {"content": "", "tool_calls": []}}
    for _, data in output[:-1]:
        for part in data["choices"]:
            choice["message"]["content"] += part["delta"].get("content") or ""
            for call in part["delta"].get("tool_calls", ()):
                choice["message"]["tool_calls"] += [call] if "id" in call else []
            choice["finish_reason"] = part["finish_reason"]
    return {"choices": [choice]}


def outcome(path: str, value: Mapping[str, Any]) -> tuple[str, int, str]:
    """(how it ended, number of calls, visible text)."""
    if path == "/v1/messages":
        blocks = value["content"]
        text = "".join(b["text"] for b in blocks if b["type"] == "text")
        return value["stop_reason"], sum(b["type"] == "tool_use" for b in blocks), text
    if path == "/v1/chat/completions":
        choice = value["choices"][0]
        calls = choice["message"].get("tool_calls") or []
        return choice["finish_reason"], len(calls), choice["message"]["content"] or ""
    items = value["output"]
    text = "".join(p["text"] for i in items if i["type"] == "message" for p in i["content"])
    details = (value["incomplete_details"] or {}).get("reason", value["status"])
    return details, sum(i["type"] == "function_call" for i in items), text


async def answer(
    path: str, script: str | Script, *, stream: bool = False, model: Any = None, **more: Any
) -> Any:
    """How a scripted turn comes out."""
    async with serving({"s": script}, **(model or {})) as served:
        reply = await served.client.post(path, body(path, "[[script:s]]", stream=stream, **more))
    return outcome(path, final(path, reply))


ENDS = {  # C16
    "/v1/messages": ("end_turn", "tool_use", "max_tokens", "model_context_window_exceeded", "stop_sequence"),
    "/v1/chat/completions": ("stop", "tool_calls", "length", "length", "stop"),
    "/v1/responses": ("completed", "completed", "max_output_tokens", "max_output_tokens", "completed"),
}
STOP = {"/v1/messages": "stop_sequences", "/v1/chat/completions": "stop", "/v1/responses": "stop"}


@each_protocol
@stream_or_not
async def test_how_it_ended(path: str, stream: bool) -> None:  # C16
    plain, called, length, window, stopped = ENDS[path]
    tools = {"tools": [TOOLS[path]]}
    assert await answer(path, "done", stream=stream) == (plain, 0, "done")
    assert await answer(path, TURN, stream=stream, **tools) == (called, 2, "I look.")
    assert await answer(path, "0123456789", stream=stream, **{LIMIT[path]: 4}) == (length, 0, "0123")
    narrow = {"context_window": 80}
    ended, _, text = await answer(path, "0123456789" * 10, stream=stream, model=narrow, **{LIMIT[path]: 1000})
    assert ended == window
    assert text
    assert await answer(path, "one END two", stream=stream, **{STOP[path]: ["END"]}) == (stopped, 0, "one ")


@each_protocol
@stream_or_not
@pytest.mark.parametrize("limit", range(1, len(TOKENIZER.encode(TURN)) + 2, 7))
async def test_a_cut_call_is_never_a_call(path: str, stream: bool, limit: int) -> None:  # C15
    ended, _, _ = await answer(path, TURN, stream=stream, **{LIMIT[path]: limit}, tools=[TOOLS[path]])
    whole = limit > len(TOKENIZER.encode(TURN))
    assert ended == ENDS[path][1 if whole else 2]


@each_protocol
@stream_or_not
async def test_one_call_only(path: str, stream: bool) -> None:  # C38
    one: dict[str, Any] = {"parallel_tool_calls": False}
    if path == "/v1/messages":
        one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    async with serving({"s": TURN}) as served:
        asked = body(path, "[[script:s]]", stream=stream, tools=[TOOLS[path]], **one)
        reply = await served.client.post(path, asked)
        played = served.engine.log[-1]
    assert outcome(path, final(path, reply))[:2] == (ENDS[path][1], 1)
    assert played.finish is None, "the engine was left soon after the call was complete"


@each_protocol
@stream_or_not
async def test_no_call_when_none_may_be_made(path: str, stream: bool) -> None:  # C38
    none: Any = {"type": "none"} if path == "/v1/messages" else "none"
    ended, calls, text = await answer(path, TURN, stream=stream, tools=[TOOLS[path]], tool_choice=none)
    assert (ended, calls) == (ENDS[path][0], 0)
    assert text.count('{"name": "ls", "arguments": {"path": "a"}}') == 2


@each_protocol
async def test_the_tool_choice_never_changes_the_prompt(path: str) -> None:  # C6
    named: dict[str, Any] = {
        "/v1/messages": {"type": "tool", "name": "ls"},
        "/v1/chat/completions": {"type": "function", "function": {"name": "ls"}},
        "/v1/responses": {"type": "function", "name": "ls"},
    }
    words: list[Any] = ["auto", "none", "required"]
    if path == "/v1/messages":
        words = [{"type": "auto"}, {"type": "none"}, {"type": "any"}]
    async with serving() as served:
        for choice in (*words, named[path]):
            asked = body(path, "[[echo:x]]", tools=[TOOLS[path]], tool_choice=choice)
            assert (await served.client.post(path, asked)).status == 200
        prompts = {played.prompt_token_ids for played in served.engine.log}
        forced = [played.constraint is not None for played in served.engine.log]
    assert len(prompts) == 1
    assert forced == [False, False, True, True]


async def test_counts_are_exact() -> None:  # C8 C28
    async with serving({"s": TURN}) as served:
        asked = body("/v1/messages", "[[script:s]]", stream=True, tools=[TOOLS["/v1/messages"]])
        first = events((await served.client.post("/v1/messages", asked)).body)
        again = events((await served.client.post("/v1/messages", asked)).body)
        prompt, written = (
            len(t) for t in (served.engine.log[0].prompt_token_ids, served.engine.log[0].token_ids)
        )
    start, end = first[0][1]["message"]["usage"], first[-2][1]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"]) == (prompt, 0)
    assert (end["output_tokens"], end["output_tokens_details"]["thinking_tokens"]) == (
        written,
        len("\nhm\n") + 1,
    )
    repeated = again[0][1]["message"]["usage"]
    assert repeated["cache_read_input_tokens"] == prompt - 1
    assert repeated["input_tokens"] == 1


async def test_ids_of_calls_are_new_in_the_conversation() -> None:  # C13 C23
    async with serving({"s": TURN}) as served:
        asked = body("/v1/messages", "[[script:s]]", tools=[TOOLS["/v1/messages"]])
        content = (await served.client.post("/v1/messages", asked)).json["content"]
    ids = [block["id"] for block in content if block["type"] == "tool_use"]
    assert len(set(ids)) == 2
    assert all(id.startswith("call_") and len(id) == 29 for id in ids)


def test_an_id_is_new_by_what_every_harness_leaves_of_it() -> None:  # C23
    """A harness made ``functions.f:0`` to ``functionsf0``; the model counts from 0 again."""
    before = Turn("assistant", (ToolCall("f", "{}", "functionsf0"),))
    ids = TurnCallIds(Conversation((before,)), lambda prefix: f"{prefix}new")
    again, other = (ToolCallStart(n, f"functions.f:{n}", "f", "") for n in (0, 1))
    ids.ensure_unique(again)
    ids.ensure_unique(other)
    assert (again.id, other.id) == ("call_new", "functions.f:1")


async def leave_at(path: str, tokens: int, *, stream: bool) -> EngineByHand:
    """A client that hangs up after ``tokens`` tokens."""
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        async with served.client.open("POST", path, body(path, "x", stream=stream)) as (exchange, task):
            for at in range(tokens):
                await engine.waiting.wait()
                engine.emit(Chunk([at + 65]))
            await engine.waiting.wait()
            exchange.leave()
            await asyncio.wait_for(task, 2)
        served.service.tracing.exposition()
        assert served.service.tracing.running == 0
    return engine


@each_protocol
@stream_or_not
@pytest.mark.parametrize("tokens", [0, 1, 3])
async def test_a_client_that_leaves_frees_the_engine(path: str, stream: bool, tokens: int) -> None:  # C40
    engine = await leave_at(path, tokens, stream=stream)
    assert (engine.emitted, engine.freed) == (tokens, 1)


@each_protocol
@stream_or_not
async def test_failure_before_the_first_token_is_a_status(path: str, stream: bool) -> None:  # C39
    async with serving({"s": Script(fail_after=0)}) as served:
        reply = await served.client.post(path, body(path, "[[script:s]]", stream=stream))
    assert reply.status == 500
    assert "before the first token" in reply.body.decode()


@each_protocol
@pytest.mark.parametrize("fault", [EngineFailed("the engine died"), ZeroDivisionError("secret"), None])
async def test_failure_in_the_stream_is_its_end(path: str, fault: Exception | None) -> None:  # C39
    engine = EngineByHand()
    engine.emit(Chunk([65]), fault)
    async with serving(engine=engine) as served:
        reply = await served.client.post(path, body(path, "x", stream=True))
    assert reply.status == 200
    streamed = events(reply.body)
    assert "secret" not in reply.body.decode()
    words = {
        EngineFailed: "the engine died",
        ZeroDivisionError: "internal server error",
        type(None): "without a finish reason",
    }
    assert words[type(fault)] in json.dumps(streamed)
    assert streamed[-1][0] == {"/v1/messages": "error", "/v1/responses": "response.failed"}.get(path, "")


@each_protocol
async def test_failure_of_a_whole_answer_is_a_status(path: str) -> None:  # C39
    async with serving({"s": Script("abc", fail_after=2)}) as served:
        reply = await served.client.post(path, body(path, "[[script:s]]"))
        after = await served.client.post(path, body(path, "[[echo:fine]]"))
    assert reply.status == 500
    assert after.status == 200, "the server goes on"


@each_protocol
async def test_the_stream_starts_and_lives_while_the_prompt_is_read(path: str) -> None:  # C11
    engine = EngineByHand()
    alive = {"/v1/messages": b"event: ping", "/v1/responses": b"event: response.in_progress"}
    seen = b""
    async with (
        serving(engine=engine, config=Config(keep_alive_seconds=0.02)) as served,
        served.client.open("POST", path, body(path, "x", stream=True)) as (exchange, _),
    ):
        while seen.count(alive.get(path, b": keep-alive")) < 4:
            chunk = await exchange.read()
            assert chunk is not None
            seen += chunk
        engine.emit(Chunk([65], "stop"))
        seen += await exchange.rest()
    names = [name for name, _ in events(seen)]
    if path == "/v1/messages":
        assert names[0] == "message_start"
    assert engine.emitted == 1


async def test_cached_tokens_that_come_early_are_in_the_start() -> None:  # C28
    engine = EngineByHand()
    engine.emit(Chunk((), cached_tokens=5), Chunk([65], "stop"))
    async with serving(engine=engine) as served:
        reply = await served.client.post("/v1/messages", body("/v1/messages", "hi", stream=True))
    usage = events(reply.body)[0][1]["message"]["usage"]
    assert usage["cache_read_input_tokens"] == 5
    assert usage["input_tokens"] == len(engine.prompt) - 5


async def test_a_client_that_does_not_read_slows_the_engine_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "SendBuffer", partial(SendBuffer, full_bytes=2000))
    engine, count = EngineByHand(), 100
    async with serving(engine=engine) as served:
        asked = body("/v1/chat/completions", "x", stream=True)
        async with served.client.open("POST", "/v1/chat/completions", asked) as (exchange, _):
            streamed = await exchange.read() or b""
            exchange.stop_reading()
            engine.emit(*[Chunk([65])] * count, Chunk((), "stop"))
            for _ in range(20 * count):
                await asyncio.sleep(0)
            assert engine.emitted < count / 2, "it waits for the client"
            exchange.read_on()
            streamed += await exchange.rest()
    chunks = [data for _, data in events(streamed)[:-1]]
    text = "".join(part["delta"].get("content") or "" for chunk in chunks for part in chunk["choices"])
    assert text == TOKENIZER.decode([65]) * count
    assert (engine.emitted, engine.freed) == (count + 1, 0)


async def test_a_client_that_never_reads_again_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STALLED_SECONDS", 0.05)
    engine = EngineByHand()
    async with serving(engine=engine, config=Config(keep_alive_seconds=0.02)) as served:
        asked = body("/v1/messages", "x", stream=True)
        async with served.client.open("POST", "/v1/messages", asked) as (exchange, task):
            assert await exchange.read()
            exchange.stop_reading()
            await asyncio.wait_for(task, 5)
    assert engine.freed == 1


async def test_what_is_ready_together_leaves_together() -> None:
    async with serving() as served:
        asked = body("/v1/messages", "[[gen:400:1:0]]", stream=True)
        async with served.client.open("POST", "/v1/messages", asked) as (exchange, _):
            chunks = 0
            while await exchange.read() is not None:
                chunks += 1
    assert 1 < chunks < 200
