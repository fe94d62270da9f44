"""The grammar refuses what the API could not have sent, and no events make the encoder send that."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from singletree.checking.streams import Decoder
from singletree.errors import EngineFailed
from singletree.events import (
    ArgumentsDelta,
    Event,
    FinishReason,
    Markup,
    ReasoningDelta,
    TextDelta,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    fold,
)
from singletree.protocols import messages
from singletree.protocols.answer import encode_sse

from . import event_stream
from . import grammar_messages as grammar
from .shapes import by_name, finished
from .test_messages_encode import REQUEST, encoder, stream

GOOD = [(e.event, json.loads(e.data)) for e in Decoder().feed(stream(by_name["interleaved"]))]


def sent(events: list[tuple[str, Any]]) -> bytes:
    return encode_sse([(name, json.dumps(data).encode()) for name, data in events])


def at(kind: str, nth: int = 0) -> int:
    return [i for i, (name, _) in enumerate(GOOD) if name == kind][nth]


SPOILED: dict[str, Any] = {
    "no ping after the start": lambda e: e.pop(1),
    "no start": lambda e: e.pop(0),
    "two starts": lambda e: e.insert(2, e[0]),
    "a block is not started": lambda e: e.pop(at("content_block_start")),
    "a block is not stopped": lambda e: e.pop(at("content_block_stop")),
    "a block is stopped twice": lambda e: e.insert(at("content_block_stop"), e[at("content_block_stop")]),
    "a delta on a closed index": lambda e: e[at("content_block_delta", 3)][1].update(index=0),
    "an index is left out": lambda e: e[at("content_block_start", 1)][1].update(index=7),
    "a delta of another type": lambda e: e[at("content_block_delta")][1].update(
        delta={"type": "text_delta", "text": "x"}
    ),
    "no signature": lambda e: e.pop(at("content_block_delta", 1)),
    "a field that the API does not have": lambda e: e[at("content_block_delta")][1].update(usage={}),
    "input at the start": lambda e: e[at("content_block_start", 3)][1]["content_block"].update(
        input={"a": 1}
    ),
    "no message_delta": lambda e: e.pop(at("message_delta")),
    "no message_stop": lambda e: e.pop(at("message_stop")),
    "more after the end": lambda e: e.append(("ping", {"type": "ping"})),
    "done": lambda e: e.append(("", "[DONE]")),
    "a name that is not the type": lambda e: e.__setitem__(2, ("ping", e[2][1])),
    "an unknown stop_reason": lambda e: e[at("message_delta")][1]["delta"].update(stop_reason="stop"),
    "a stop_sequence without its reason": lambda e: e[at("message_delta")][1]["delta"].update(
        stop_sequence="x"
    ),
    "usage below zero": lambda e: e[at("message_delta")][1]["usage"].update(input_tokens=-1),
    "usage left out": lambda e: e[at("message_delta")][1]["usage"].pop("cache_read_input_tokens"),
}


def test_the_good_stream_is_good() -> None:
    assert [b.type for b in grammar.check(sent(GOOD)).blocks] == [
        "thinking",
        "text",
        "thinking",
        "tool_use",
        "thinking",
        "text",
    ]


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_stream_is_refused(name: str) -> None:
    events = copy.deepcopy(GOOD)
    SPOILED[name](events)
    with pytest.raises((AssertionError, AttributeError)):
        grammar.check(sent(events))


def test_a_stream_that_is_cut_is_refused() -> None:
    whole = stream(by_name["reasoning_call"])
    for length in range(len(whole)):
        with pytest.raises((AssertionError, IndexError)):
            grammar.check(whole[:length])


words = st.text(max_size=6)
index = st.integers(0, 3)
events_: st.SearchStrategy[Event] = st.one_of(
    st.builds(TextDelta, words, words),
    st.builds(ReasoningDelta, words, words),
    st.builds(Markup, words),
    st.builds(ToolCallStart, index, words, words, words),
    st.builds(ArgumentsDelta, index, words, words),
    st.builds(ToolCallEnd, index),
    st.builds(ToolCallBroken, index, words),
)
reasons = st.sampled_from(
    ["stop", "stop_sequence", "length", "context_overflow", "refusal", "cancelled", "error"]
)


@given(st.lists(events_, max_size=25), reasons)
def test_any_events_make_a_grammatical_stream(events: list[Event], reason: FinishReason) -> None:  # C14
    end = finished(reason, "x" if reason == "stop_sequence" else None)
    encode = encoder()
    seen = grammar.check(encode.start() + b"".join(map(encode.feed, events)) + encode.close(end))
    assert seen.last["delta"]["stop_reason"] in grammar.STOP_REASONS


@given(st.lists(events_, max_size=25), st.integers(0, 25))
def test_any_events_may_end_in_a_failure(events: list[Event], at: int) -> None:  # C39
    encode = encoder()
    sent = encode.start() + b"".join(map(encode.feed, events[:at])) + encode.fail(EngineFailed("x"))
    assert grammar.check(sent).last["error"]["type"] == "api_error"


@st.composite
def spoken(draw: st.DrawFn) -> list[Event]:
    """Events as a parser makes them: a call's own events stand together."""
    pieces: list[Event] = []
    calls = 0
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from("trmce"))
        if kind == "t":
            pieces += [TextDelta(w, w) for w in draw(st.lists(words, max_size=3))]
        elif kind == "r":
            pieces += [ReasoningDelta(w, w) for w in draw(st.lists(words, max_size=3))]
        elif kind == "m":
            pieces.append(Markup("<m>"))
        else:
            arguments = json.dumps(draw(st.dictionaries(words, words | st.integers(), max_size=3)))
            cut = draw(st.integers(0, len(arguments))) if kind == "c" else len(arguments)
            pieces.append(ToolCallStart(calls, f"id{calls}", "f", "<c>"))
            pieces += [ArgumentsDelta(calls, c, c) for c in arguments[:cut]]
            pieces += [ToolCallEnd(calls)] if kind == "e" else []
            calls += 1
    return pieces


@given(spoken())
def test_blocks_are_the_parts_of_the_fold(events: list[Event]) -> None:  # C5 C13
    encode = encoder()
    seen = grammar.check(encode.start() + b"".join(map(encode.feed, events)) + encode.close(finished()))
    turn = fold(events)
    assert "".join(b.text for b in seen.blocks if b.type == "text") == turn.text
    assert "".join(b.text for b in seen.blocks if b.type == "thinking") == turn.reasoning
    shown = [(b.start["id"], b.start["name"], b.text) for b in seen.blocks if b.type == "tool_use"]
    dispatched = [c for c in turn.tool_calls if c.complete or c.arguments]
    assert shown == [(c.id, c.name, c.arguments) for c in dispatched]
    whole = event_stream.body(messages, REQUEST, turn, finished())
    assert [b["type"] for b in json.loads(whole)["content"]] == [b.type for b in seen.blocks]
