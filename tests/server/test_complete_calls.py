"""A client sees a tool call when it is complete, or never: whatever cuts it, streamed or whole, on every API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from protocols import grammar_chat, grammar_messages, grammar_responses
from protocols.shapes import SHAPES, Shape, names
from protocols.test_messages_sdk import accumulated
from singletree.engines.engine import Chunk
from singletree.errors import EngineFailed
from singletree.events import Event, Markup, TextDelta, ToolCallBroken, ToolCallStart, fold
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.settings.config import Config
from singletree.server.turn.complete_calls import HEADER, CompleteCalls
from singletree.testing.scripts import Script

from .by_hand import EngineByHand
from .carrying import LAYOUT
from .memory import Reply, events
from .serving import MODEL, TOKENIZER, body, serving
from .test_generation import (
    CALL,
    ENDS,
    LIMIT,
    PATHS,
    STOP,
    TOOLS,
    each_protocol,
    final,
    outcome,
    stream_or_not,
)
from .test_messages_stream import sent_by_now
from .test_stored import storing

LS = ("ls", '{"path": "a"}')
BROKEN = '<tool_call>\n{"name": "ls", "arguments": {"path": "a", oops}}\n</tool_call>'
TURN = f"<think>\nhm\n</think>\n\nI look.\n{CALL}\nAnd \n{CALL}"
TOKENS = TOKENIZER.encode(TURN)
COMPLETE = [len(TOKENIZER.encode(TURN[: at + len('"a"}')])) for at in (TURN.find('"a"}'), TURN.rfind('"a"}'))]
LIVE = {HEADER: "1"}
_CHECKS: dict[str, Callable[[bytes], object]] = {
    "/v1/messages": grammar_messages.check,
    "/v1/chat/completions": grammar_chat.Grammar,
    "/v1/responses": partial(grammar_responses.Grammar, judged=False),
}
# What shows a call on each API.
SIGNS = (b'"tool_use","id"', b'"tool_calls":[', b"function_call")


def calls_of(path: str, value: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, arguments) of each call in an answer as ``final`` gives it."""
    if path == "/v1/messages":
        uses = [block for block in value["content"] if block["type"] == "tool_use"]
        return [(use["name"], use.get("json") or json.dumps(use["input"])) for use in uses]
    if path == "/v1/responses":
        items = [item for item in value["output"] if item["type"] == "function_call"]
        return [(item["name"], item["arguments"]) for item in items]
    shown = value["choices"][0]["message"].get("tool_calls") or []
    return [(call["function"]["name"], call["function"]["arguments"]) for call in shown]


def shown_calls(path: str, reply: Reply) -> list[tuple[str, str]]:
    """The calls of an answer, those of a Chat stream put together from their pieces."""
    if path != "/v1/chat/completions" or reply.headers["content-type"] == "application/json":
        return calls_of(path, final(path, reply))
    calls: dict[int, tuple[str, str]] = {}
    for _, data in events(reply.body):
        for choice in data["choices"] if data != "[DONE]" else ():
            for call in choice["delta"].get("tool_calls", ()):
                name, arguments = calls.get(call["index"], ("", ""))
                function = call["function"]
                calls[call["index"]] = name + function.get("name", ""), arguments + function["arguments"]
    return list(calls.values())


async def ask(
    path: str, *scripts: Script, stream: bool, headers: dict[str, str] | None = None, **more: Any
) -> list[Reply]:
    """The answers in which one server plays ``scripts``."""
    replies = []
    async with serving({str(n): script for n, script in enumerate(scripts)}) as served:
        for n in range(len(scripts)):
            asked = body(path, f"[[script:{n}]]", stream=stream, tools=[TOOLS[path]], **more)
            replies.append(await served.client.post(path, asked, headers or {}))
            assert replies[-1].status == 200
            if stream and "n" not in more:
                _CHECKS[path](replies[-1].body)
    return replies


def unshown(at: int) -> str:
    """What of the turn's visible text and calls stands in its first ``at`` tokens and is no complete call."""
    text = TOKENIZER.decode(TOKENS[:at])
    visible = text.partition("</think>")[2].lstrip("\n")
    for _ in range(sum(at >= end for end in COMPLETE)):
        visible = visible.replace(CALL[: CALL.index('"a"}') + len('"a"}')], "", 1)
    return visible


def words(text: str) -> str:
    """``text`` without white space and without the end of a complete call, which belongs to the format."""
    return "".join(text.replace("}\n</tool_call>", "").split())


@each_protocol
@stream_or_not
async def test_a_call_cut_at_any_token_is_text(path: str, stream: bool) -> None:  # C15
    """By length or by the model's own end, in turn. Each API takes a third of the tokens: all of them are taken."""
    ats = range(1 + PATHS.index(path), len(TOKENS), len(PATHS))
    by_length = {at: turn % 2 == 0 for turn, at in enumerate(ats)}
    cuts = [
        Script(TURN, cut_after=at) if cut else Script(TURN, stop_after=at) for at, cut in by_length.items()
    ]
    plain, called, length, *_ = ENDS[path]
    for at, reply in zip(ats, await ask(path, *cuts, stream=stream), strict=True):
        complete = sum(at >= token for token in COMPLETE)
        assert [(n, json.loads(a)) for n, a in shown_calls(path, reply)] == [("ls", {"path": "a"})] * complete
        reason, _, text = outcome(path, final(path, reply))
        assert reason == (length if by_length[at] else called if complete else plain)
        # No text is lost: what is left of the format's own markers aside, all that is no call is visible.
        shown, generated = words(text), words(unshown(at))
        assert generated.startswith(shown)
        assert len(generated) - len(shown) < len("<tool_call>}</tool_call>")


@each_protocol
@stream_or_not
async def test_a_broken_call_is_never_shown_as_one(path: str, stream: bool) -> None:  # C17
    [reply] = await ask(path, Script(f"I look.\n{BROKEN}\n{CALL}"), stream=stream)
    reason, calls, text = outcome(path, final(path, reply))
    assert (reason, calls) == (ENDS[path][1], 1)
    assert '{"name": "ls", "arguments": {"path": "a", oops}}' in text


@each_protocol
@stream_or_not
async def test_a_stop_string_in_arguments_leaves_text(path: str, stream: bool) -> None:  # C15 C16
    stops: dict[str, Any] = {STOP[path]: ['"a"']}
    [reply] = await ask(path, Script(TURN), stream=stream, **stops)
    assert shown_calls(path, reply) == []
    assert outcome(path, final(path, reply))[2].endswith('{"name": "ls", "arguments": {"path": ')


@each_protocol
async def test_an_engine_that_dies_in_a_call_leaves_none(path: str) -> None:  # C39
    failing = range(len(TOKENIZER.encode(TURN[: TURN.find("<tool_call>")])), COMPLETE[0])
    for reply in await ask(path, *(Script(TURN, fail_after=after) for after in failing), stream=True):
        assert not any(sign in reply.body for sign in SIGNS)


@each_protocol
async def test_a_call_leaves_with_the_token_that_completes_it(path: str) -> None:  # C10 C12
    engine = EngineByHand()
    asked = body(path, "x", stream=True, tools=[TOOLS[path]])
    async with serving(engine=engine) as served, served.client.open("POST", path, asked) as (exchange, _):
        left = []
        for token in TOKENS:
            engine.emit(Chunk([token]))
            left.append(await sent_by_now(exchange, engine))
        engine.emit(Chunk((), "stop"))
        await exchange.rest()
    ends = [at for at, reported in enumerate(left, 1) if any(sign in reported for sign in SIGNS)]
    assert ends == COMPLETE


def test_a_thought_ends_where_a_held_call_begins() -> None:
    """The parser reads a call inside a thought as one (C20): its client learns at once that the thought is over."""
    held = CompleteCalls()
    assert held.feed([ToolCallStart(0, "call_1", "ls", "<tool_call>")]) == [Markup("")]


@each_protocol
async def test_a_stream_that_holds_a_call_is_alive(path: str) -> None:  # C11
    engine = EngineByHand()
    alive = {"/v1/messages": b"event: ping", "/v1/responses": b"event: response.in_progress"}
    asked = body(path, "x", stream=True, tools=[TOOLS[path]])
    seen = b""
    async with (
        serving(engine=engine, config=Config(keep_alive_seconds=0.02)) as served,
        served.client.open("POST", path, asked) as (exchange, _),
    ):
        engine.emit(Chunk(TOKENS[: COMPLETE[0] - 1]))
        while seen.count(alive.get(path, b": keep-alive")) < 4:
            chunk = await exchange.read()
            assert chunk is not None
            seen += chunk
        assert not any(sign in seen for sign in SIGNS)
        engine.emit(Chunk(TOKENS[COMPLETE[0] - 1 : COMPLETE[0]]), Chunk((), "stop"))
        seen += await exchange.rest()
    assert any(sign in seen for sign in SIGNS)


@each_protocol
@pytest.mark.parametrize("live", ["header", "flag"])
async def test_arguments_leave_live_where_they_are_asked_for(path: str, live: str) -> None:  # C10 C15
    at = COMPLETE[0] - 1
    config = Config(live_arguments=live == "flag")
    headers = LIVE if live == "header" else {}
    async with serving({"s": Script(TURN, cut_after=at)}, config=config) as served:
        asked = body(path, "[[script:s]]", stream=True, tools=[TOOLS[path]])
        seen = await served.client.post(path, asked, headers)
        unseen = await served.client.post(path, asked, {HEADER: "0"})
    assert shown_calls(path, seen) == [("ls", '{"path": "a"')]
    assert shown_calls(path, unseen) == []


async def test_each_of_several_choices_is_held_by_itself() -> None:
    path = "/v1/chat/completions"
    for stream in (False, True):
        asked: dict[str, Any] = {LIMIT[path]: COMPLETE[0] + 5, "n": 2}
        [reply] = await ask(path, Script(TURN), stream=stream, **asked)
        if not stream:
            counts = [len(choice["message"]["tool_calls"]) for choice in reply.json["choices"]]
            assert counts == [1, 1]
        else:
            assert reply.body.count(b'"name":"ls"') == 2
        [cut] = await ask(path, Script(TURN), stream=stream, **(asked | {LIMIT[path]: COMPLETE[0] - 1}))
        assert b'"tool_calls"' not in cut.body


async def test_a_broken_call_is_no_gap_in_the_dispatched_ones() -> None:
    path, headers = "/v1/chat/completions", {"x-singletree-tool-dispatch": "1"}
    [reply] = await ask(path, Script(f"{BROKEN}\n{CALL}\n{CALL}"), stream=True, headers=headers)
    dispatched = [data["tool_call"] for name, data in events(reply.body) if name == "tool_call_dispatch"]
    assert [call["index"] for call in dispatched] == [0, 1]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in dispatched] == [LS] * 2


async def test_a_response_in_the_background_holds_them_too() -> None:
    asked = {"model": MODEL, "input": "[[script:s0]]", "tools": [TOOLS["/v1/responses"]], "background": True}
    async with storing(Script(TURN, cut_after=COMPLETE[0] - 1)) as served:
        reply = await served.client.post("/v1/responses", asked | {"stream": True})
    assert not any(sign in reply.body for sign in SIGNS)
    text = outcome("/v1/responses", events(reply.body)[-1][1]["response"])[2]
    assert text.startswith("I look.\n<tool_call>")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
async def test_a_turn_with_a_cut_call_comes_back_by_its_tokens(path: str) -> None:
    at = COMPLETE[0] - 1
    scripts: dict[str, str | Script] = {"a": Script(TURN, cut_after=at), "b": "Fine."}
    async with serving(scripts, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        asked = body(path, "[[script:a,b]] Look.", tools=[TOOLS[path]])
        reply = await served.client.post(path, asked)
        asked |= _answered(path, asked, reply.json)
        assert (await served.client.post(path, asked)).status == 200
        first, second = list(served.engine.log)[-2:]
    generated = (*first.prompt_token_ids, *first.token_ids)
    assert tuple(second.prompt_token_ids[: len(generated)]) == generated


LONG = '<tool_call>\n{"name": "ls", "arguments": {"path": "a", "more": {"b": [1, 2.0, "text"]}, "c": 5}}\n</tool_call>'


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("/v1/messages", False),
        ("/v1/messages", True),
        ("/v1/responses", False),
        ("/v1/chat/completions", False),
    ],
)
async def test_a_cut_call_that_was_shown_live_comes_back_by_its_tokens(path: str, stream: bool) -> None:
    whole = TOKENIZER.encode(f"I look.\n{LONG}")
    for at in range(len(TOKENIZER.encode("I look.\n")) + 2, len(whole), 3):
        script = Script(TOKENIZER.decode(whole), cut_after=at)
        async with serving({"a": script, "b": "Fine."}, memory=TurnMemory(2**20), layout=LAYOUT) as served:
            asked = body(path, "[[script:a,b]] Look.", tools=[TOOLS[path]])
            reply = await served.client.post(path, asked | {"stream": stream}, LIVE)
            # The SDK makes the message of a stream, with the values of its call that are complete.
            asked |= _answered(path, asked, accumulated(reply.body) if stream else reply.json)
            assert (await served.client.post(path, asked)).status == 200
            first, second = list(served.engine.log)[-2:]
        generated = (*first.prompt_token_ids, *first.token_ids)
        assert tuple(second.prompt_token_ids[: len(generated)]) == generated, at


def _answered(path: str, asked: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The conversation behind ``asked``: what was answered, and that it shall go on."""
    more = {"role": "user", "content": "Go on."}
    if path == "/v1/responses":
        first = {"role": "user", "content": asked["input"]}
        return {"input": [first, *answer["output"], more]}
    if path == "/v1/messages":
        turn = {"role": "assistant", "content": answer["content"]}
    else:
        turn = answer["choices"][0]["message"]
    return {"messages": [*asked["messages"], turn, more]}


def through(pieces: Iterable[Event], size: int) -> list[Event]:
    """``said`` as it leaves when it comes in batches of ``size``."""
    held, pieces = CompleteCalls(), list(pieces)
    return [event for at in range(0, len(pieces), size) for event in held.feed(pieces[at : at + size])]


def complete(shape: Shape) -> list[Event]:
    """The events of ``shape``, a call that is open at its end broken there, as the reader gives them."""
    written = list(shape.events)
    if any(not call.complete for call in shape.turn.tool_calls):
        written.append(ToolCallBroken(len(shape.turn.tool_calls) - 1, ""))
    return written


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_what_leaves_folds_into_the_same_turn_and_the_same_text(shape: Shape, size: int) -> None:
    written = complete(shape)
    left = through(written, size)
    assert fold(left) == fold(written)
    assert not any(isinstance(event, ToolCallBroken) for event in left)
    assert "".join(event.raw for event in left) == "".join(event.raw for event in written)


def test_text_alone_passes_as_it_is() -> None:
    batch: list[Event] = [TextDelta("a", "a")]
    assert CompleteCalls().feed(batch) is batch


@each_protocol
async def test_a_failure_is_reported_behind_a_held_call(path: str) -> None:
    engine = EngineByHand()
    asked = body(path, "x", stream=True, tools=[TOOLS[path]])
    async with serving(engine=engine) as served, served.client.open("POST", path, asked) as (exchange, _):
        engine.emit(Chunk(TOKENS[: COMPLETE[0] - 1]), EngineFailed("gone"))
        streamed = await exchange.rest()
    assert b"gone" in streamed
    assert not any(sign in streamed for sign in SIGNS)
