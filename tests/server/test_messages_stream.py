"""A stream as it comes: what has left by each token, however the tokens come and wherever they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from protocols import grammar_messages
from protocols.grammar_messages import Grammar
from singletree.engines.engine import Chunk
from singletree.server.settings.config import Config
from singletree.testing.scripts import Script

from .by_hand import EngineByHand
from .memory import Exchange, events
from .serving import MODEL, TOKENIZER, Served, body, serving
from .test_generation import CALL, PATHS, TOOLS, TURN

PATH = "/v1/messages"
TOKENS = TOKENIZER.encode(TURN)
LIVE = {"x-singletree-live-arguments": "1"}
DISPATCH = {"x-singletree-tool-dispatch": "1"}
each_protocol = pytest.mark.parametrize("path", PATHS)


async def sent_by_now(exchange: Exchange, engine: EngineByHand) -> bytes:
    """What has left for the client once the engine waits again."""
    await engine.waiting.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    chunks = [exchange._chunks.get_nowait() for _ in range(exchange._chunks.qsize())]
    return b"".join(chunk for chunk in chunks if chunk)


async def played(served: Served, engine: EngineByHand, chunks: Iterable[Chunk], **more: Any) -> Grammar:
    """The stream of a turn that comes in ``chunks``."""
    engine.emit(*chunks)
    asked = body(PATH, "x", stream=True, tools=[TOOLS[PATH]], **more)
    return grammar_messages.check((await served.client.post(PATH, asked)).body)


def content_of(stream: Grammar) -> tuple[Any, ...]:
    """What a stream says, without the ids of its calls."""
    blocks = [(b.type, b.start.get("name"), b.text) for b in stream.blocks]
    return blocks, stream.last["delta"], stream.last["usage"]


ARGUMENTS = {
    PATH: b"input_json_delta",
    "/v1/responses": b"function_call_arguments.delta",
    "/v1/chat/completions": b'"tool_calls"',
}
COMPLETE = {PATH: b"content_block_stop", "/v1/responses": b"response.output_item.done"}


@each_protocol
async def test_a_call_is_over_with_the_token_that_completes_its_arguments(path: str) -> None:  # C10 C12
    engine, turn = EngineByHand(), TOKENIZER.encode(CALL + " and so on")
    begun, completing = (len(TOKENIZER.encode(CALL.partition(at)[0] + at)) for at in ('nts": {', '"a"}'))
    asked = body(path, "x", stream=True, tools=[TOOLS[path]])
    async with (
        serving(engine=engine) as served,
        served.client.open("POST", path, asked, DISPATCH | LIVE) as (exchange, _),
    ):
        left = []
        for token in turn:
            engine.emit(Chunk([token]))
            left.append(await sent_by_now(exchange, engine))
        engine.emit(Chunk((), "stop"))
        last = await exchange.rest()
    for mark in (b"event: tool_call_dispatch", COMPLETE.get(path, b"event: tool_call_dispatch")):
        assert next(at for at, reported in enumerate(left, 1) if mark in reported) == completing
    assert sum(reported.count(b"event: tool_call_dispatch") for reported in (*left, last)) == 1
    live = [at for at, reported in enumerate(left, 1) if ARGUMENTS[path] in reported]
    assert live[0] <= begun + 3, "arguments leave while they are written"


async def test_a_stream_begins_without_the_count_of_its_end() -> None:  # C8
    """Also where the engine has written the whole turn by then."""
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        engine.emit(Chunk(TOKENS, "stop"))
        reply = await served.client.post(PATH, body(PATH, "x", stream=True))
    (_, start), *_, (_, last), _ = events(reply.body)
    assert start["message"]["usage"]["output_tokens"] == 0
    assert start["message"]["usage"]["output_tokens_details"] == {"thinking_tokens": 0}
    assert last["usage"]["output_tokens"] == len(TOKENS)


async def test_any_tokens_together_give_the_same() -> None:  # C9
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        one_by_one = await played(served, engine, [*(Chunk([t]) for t in TOKENS), Chunk((), "stop")])
        for size in (2, 3, 5, 7, 16, len(TOKENS)):
            pieces = [TOKENS[at : at + size] for at in range(0, len(TOKENS), size)]
            stream = await played(served, engine, [*map(Chunk, pieces), Chunk((), "stop")])
            assert content_of(stream) == content_of(one_by_one)
        for cut in range(len(TOKENS)):
            stream = await played(served, engine, [Chunk(TOKENS[:cut]), Chunk(TOKENS[cut:], "stop")])
            assert content_of(stream) == content_of(one_by_one)
    assert [b.type for b in one_by_one.blocks] == ["thinking", "text", "tool_use", "tool_use"]


async def test_a_failure_at_any_token_ends_the_open_block_with_what_was_written() -> None:  # C39
    whole = None
    async with serving({"s": TURN}) as served:
        reply = await served.client.post(
            PATH, body(PATH, "[[script:s]]", stream=True, tools=[TOOLS[PATH]]), DISPATCH
        )
        whole = grammar_messages.check(reply.body)
    for after in range(1, len(TOKENS)):
        async with serving({"s": Script(TURN, fail_after=after)}) as served:
            asked = body(PATH, "[[script:s]]", stream=True, tools=[TOOLS[PATH]])
            reply = await served.client.post(PATH, asked, DISPATCH)
        stream = grammar_messages.check(reply.body)
        assert (stream.seen[-1], stream.last["error"]["type"]) == ("error", "api_error")
        for block, complete in zip(stream.blocks, whole.blocks, strict=False):
            assert (block.type, complete.text.startswith(block.text)) == (complete.type, True)
        dispatched = [d["tool_call"] for name, d in events(reply.body) if name == "tool_call_dispatch"]
        assert all(json.loads(call["function"]["arguments"]) == {"path": "a"} for call in dispatched)


async def test_a_stop_string_in_arguments_is_no_call() -> None:  # C15 C16
    async with serving({"s": TURN}) as served:
        asked = body(PATH, "[[script:s]]", stream=True, tools=[TOOLS[PATH]], stop_sequences=['"a"'])
        reply = await served.client.post(PATH, asked, DISPATCH | LIVE)
    stream = grammar_messages.check(reply.body)
    delta = stream.last["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == ("stop_sequence", '"a"')
    assert [b.text for b in stream.blocks if b.type == "tool_use"] == ['{"path": ']
    assert b"tool_call_dispatch" not in reply.body


@pytest.mark.parametrize("path", [PATH, f"{PATH}?beta=true"])
async def test_a_request_for_no_tokens_reads_the_prompt_and_says_nothing(path: str) -> None:  # C8
    async with serving({"s": TURN}) as served:
        asked = body(PATH, "[[script:s]]", tools=[TOOLS[PATH]], max_tokens=0)
        whole = (await served.client.post(path, asked)).json
        stream = grammar_messages.check((await served.client.post(path, asked | {"stream": True})).body)
        prompt = served.engine.log[0].prompt_token_ids
    assert (whole["content"], stream.blocks) == ([], [])
    assert whole["stop_reason"] == stream.last["delta"]["stop_reason"] == "max_tokens"
    for usage in (whole["usage"], stream.last["usage"]):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)
        assert (usage["output_tokens"], usage["output_tokens_details"]["thinking_tokens"]) == (0, 0)


async def test_thoughts_that_are_not_shown_are_no_silence() -> None:  # C11
    engine, alive = EngineByHand(), 0
    thinking = {"type": "adaptive", "display": "omitted"}
    seen = b""
    asked = body(PATH, "x", stream=True, thinking=thinking)
    async with (
        asyncio.timeout(5),
        serving(engine=engine, config=Config(keep_alive_seconds=0.02)) as served,
        served.client.open("POST", PATH, asked) as (exchange, _),
    ):
        engine.emit(*[Chunk([t]) for t in TOKENIZER.encode("<think>\n")])
        while alive < 4:
            engine.emit(Chunk([TOKENIZER.encode("h")[0]]))
            await asyncio.sleep(0.005)
            seen += await sent_by_now(exchange, engine)
            alive = seen.count(b"event: ping")
        engine.emit(Chunk(TOKENIZER.encode("\n</think>\n\nyes"), "stop"))
        seen += await exchange.rest()
    stream = grammar_messages.check(seen)
    assert [(b.type, b.text) for b in stream.blocks] == [("thinking", ""), ("text", "yes")]


async def test_many_counts_at_once_and_beyond_the_window() -> None:  # C27
    tools = [{"name": f"t{at}", "input_schema": {"type": "object"}} for at in range(25)]
    messages = [{"role": "user", "content": "x" * 300}]
    async with serving(context_window=100) as served:

        async def count(**more: Any) -> int:
            asked = {"model": MODEL, "messages": messages, **more}
            reply = await served.client.post(f"{PATH}/count_tokens?beta=true", asked)
            assert reply.status == 200
            return int(reply.json["input_tokens"])

        together = await asyncio.gather(*(count(tools=[tool]) for tool in tools))
        assert together == [await count(tools=[tool]) for tool in tools]
        assert await count() > 300
        assert not served.engine.log, "to count asks no engine"
