"""Every sample of every model family on the wire: the stream is grammatical and says what the body says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from families.sample_rows import Row, Tools, each_sample, is_new
from singletree import families
from singletree.events import Event, ToolCallBroken, ToolCallEnd, fold
from singletree.parsing.parser import Parser
from singletree.protocols import messages
from singletree.protocols.messages.tools import tool_input

from . import event_stream
from . import grammar_messages as grammar
from .shapes import finished
from .test_messages_encode import REQUEST, encoder
from .test_messages_sdk import accumulated, parsed, plain

SHOWN = {"text": "text", "thinking": "thinking", "tool_use": "input"}


def read(name: str, row: Row, tools: Tools, step: int) -> list[Event]:
    """The events of a sample that comes in pieces of ``step`` characters."""
    parser, text = Parser(families.get(name), tools, row.get("tail", "")), row["text"]
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    return [event for piece in pieces for event in parser.feed(piece)] + parser.close()


def streamed(events: Iterable[Event]) -> bytes:
    encode = encoder()
    return encode.start() + b"".join(map(encode.feed, events)) + encode.close(finished())


def whole(events: Iterable[Event]) -> bytes:
    return event_stream.body(messages, REQUEST, fold(events), finished(), id="msg_1")


def as_in_body(block: grammar.Block) -> Any:
    """A streamed block in the terms of a body's: of a call the value that its deltas spell."""
    if block.type != "tool_use":
        return block.type, block.text
    return block.type, block.start["name"], json.loads(bytes(tool_input(block.text, complete=False)))


@pytest.mark.parametrize("value", ["1e400", r'"\ud800"', r'"\ud83d\ud83d"', "7" * 5000])
def test_a_body_has_every_value_that_json_can_write(value: str) -> None:
    arguments = f'{{"a":{value},  "b": 1}}'
    assert bytes(tool_input(arguments, complete=True)).decode() == arguments


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e", "\x01"])
def test_what_is_no_json_is_in_no_body(value: str) -> None:
    assert json.loads(bytes(tool_input(f'{{"a": 1, "b": {value}}}', complete=True))) == {"a": 1}


@each_sample
def test_stream_and_body_agree(name: str, row: Row, tools: Tools) -> None:
    for step in (1, 10_000):
        events = read(name, row, tools, step)
        seen, body = grammar.check(streamed(events)), json.loads(whole(events))
        ended = sum(isinstance(event, ToolCallEnd) for event in events)
        assert (seen.last["delta"]["stop_reason"] == "tool_use") == (ended > 0)
        if any(isinstance(event, ToolCallBroken) for event in events):
            continue  # a call that was shown before it broke stays shown
        reported = [
            (b["type"], b["name"], b["input"])
            if b["type"] == "tool_use"
            else (b["type"], b[SHOWN[b["type"]]])
            for b in body["content"]
        ]
        assert [as_in_body(block) for block in seen.blocks] == reported
        assert seen.last["delta"]["stop_reason"] == body["stop_reason"]


@each_sample
def test_the_sdk_makes_of_the_stream_what_it_makes_of_the_body(name: str, row: Row, tools: Tools) -> None:
    events = read(name, row, tools, 24)  # `test_stream_and_body_agree` reads each character alone.
    if not is_new("messages", name, events):
        return
    if any(isinstance(event, ToolCallBroken) for event in events):
        accumulated(streamed(events))  # a call that was shown before it broke stays shown
        return
    assert plain(accumulated(streamed(events))) == plain(parsed(whole(events)))
