"""Every sample of every model family as a response: whole, in pieces, and cut anywhere, the stream is the body."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from families.sample_rows import Row, Tools, all_rows, each_sample, is_new
from singletree.conversation import Tool
from singletree.events import Event, Finished, ToolCallBroken, fold
from singletree.protocols import responses

from . import event_stream, shapes
from .grammar_responses import Grammar
from .test_messages_families import read
from .test_responses_encode import COMPLETED, CREATED, ID, Json, accumulated, parsed, request, stream


def part_kinds(sample: tuple[str, Row, Tools]) -> int:
    """Count the kinds of parts in a sample: reasoning, call, text."""
    return sum(any(kind in part for part in sample[1]["parts"]) for kind in ("reasoning", "call", "text"))


# Of each family, a sample that has most.
FULLEST = {sample[0]: pytest.param(*sample, id=sample[0]) for sample in sorted(all_rows(), key=part_kinds)}


def declared(tools: Sequence[Tool]) -> list[Json]:
    return [{"type": "function", "name": t.name, "parameters": t.parameters} for t in tools]


def whole(events: Sequence[Event], finished: Finished, of: Any) -> bytes:
    more: Any = {"id": ID, "created": CREATED, "clock": lambda: COMPLETED}
    return event_stream.body(responses, of, fold(events), finished, **more)


def is_reported_alike(events: Sequence[Event], finished: Finished, of: Any, *, judged: bool) -> None:
    """The stream is grammatical, dispatches the whole calls only, and ends in what the body says."""
    seen = Grammar(stream(events, finished, of), judged=judged)
    calls = [call.id for call in fold(events).tool_calls if call.complete]
    assert [item["call_id"] for item in seen.dispatched if "call_id" in item] == calls
    if not any(isinstance(event, ToolCallBroken) for event in events):  # what was shown of it stays shown
        assert seen.response == json.loads(whole(events, finished, of))


@each_sample
def test_in_any_pieces(name: str, row: Row, tools: Tools) -> None:  # C9 C14 C32
    of = request(tools=declared(tools), reasoning={"summary": "auto"})
    for step in (2, 10_000):
        events = read(name, row, tools, step)
        if is_new(f"responses {step}", name, events):
            is_reported_alike(events, shapes.finished(), of, judged=False)


@pytest.mark.parametrize(("name", "row", "tools"), FULLEST.values())
def test_cut_anywhere(name: str, row: Row, tools: Tools) -> None:  # C15
    of, text = request(tools=declared(tools)), row["text"]
    for end in range(len(text)):
        events = read(name, {**row, "text": text[:end]}, tools, 3)
        is_reported_alike(events, shapes.finished("length"), of, judged=False)


@pytest.mark.parametrize(("name", "row", "tools"), FULLEST.values())
def test_the_sdk_makes_of_the_stream_what_it_makes_of_the_body(
    name: str, row: Row, tools: Tools
) -> None:  # C32
    events, of = read(name, row, tools, 4), request(tools=declared(tools))
    is_reported_alike(events, shapes.finished(), of, judged=True)
    streamed = accumulated(stream(events, shapes.finished(), of))
    assert unparsed(streamed) == unparsed(parsed(whole(events, shapes.finished(), of)))


def unparsed(value: Any) -> Any:
    """Without what the SDK adds to what it has streamed to the end."""
    if isinstance(value, dict):
        return {k: unparsed(v) for k, v in value.items() if k not in ("parsed", "parsed_arguments")}
    return [unparsed(v) for v in value] if isinstance(value, list) else value
