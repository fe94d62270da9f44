"""Every sample of every family: whole, cut and truncated everywhere, and rendered again."""

from __future__ import annotations

from typing import Any

from families.sample_rows import NAMES, Row, Tools, each_sample, places
from parsing.reading import cuts, read, turn
from singletree import families
from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.events import ReasoningDelta, TextDelta, ToolCallEnd, fold
from singletree.parsing.arguments.coercion import is_json
from singletree.parsing.render_turn import render_turn

NEAR = 12
"""How many characters on each side of a cut tell it from the other cuts of a family's samples."""


def part(row: dict[str, Any]) -> Part:
    if "call" in row:
        return ToolCall(row["call"], row["arguments"], row.get("id", ""), row.get("complete", True))
    return Text(row["text"]) if "text" in row else Reasoning(row["reasoning"])


def same(read_parts: tuple[Part, ...], expected: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return ``read_parts`` without the ids that the sample does not name."""
    named = {p.id for p in expected if isinstance(p, ToolCall)}
    return tuple(
        ToolCall(p.name, p.arguments, p.id if p.id in named else "", p.complete)
        if isinstance(p, ToolCall)
        else p
        for p in read_parts
    )


@each_sample
def test_whole(name: str, row: Row, tools: Tools) -> None:  # C17 C19 C20 C21 C22 C23
    expected = tuple(map(part, row["parts"]))
    read_parts = turn(families.get(name), [row["text"]], tools, row.get("tail", "")).parts
    assert same(read_parts, expected) == expected


@each_sample
def test_cut_anywhere(name: str, row: Row, tools: Tools) -> None:  # C9 C18
    family, tail = families.get(name), row.get("tail", "")
    whole = turn(family, [row["text"]], tools, tail)
    for pieces in cuts(row["text"], places=places(name, NEAR, NEAR)[row["text"]]):
        assert turn(family, pieces, tools, tail) == whole


@each_sample
def test_truncated_anywhere(name: str, row: Row, tools: Tools) -> None:  # C15
    family, text, tail = families.get(name), row["text"], row.get("tail", "")
    for end in places(name, 2 * NEAR, 0)[text]:
        events = read(family, [text[:end]], tools, tail)
        ended = sum(isinstance(e, ToolCallEnd) for e in events)
        calls = fold(events).tool_calls
        assert sum(c.complete for c in calls) == ended
        assert all(is_json(c.arguments) for c in calls if c.complete)
        shown = "".join(e.text for e in events if isinstance(e, TextDelta | ReasoningDelta))
        assert "\ud800" not in shown


@each_sample
def test_rendered_again(name: str, row: Row, tools: Tools) -> None:
    if row.get("rendered") is False:
        return  # The sample writes its turn differently from the declaration.
    family = families.get(name)
    assert render_turn(family, turn(family, [row["text"]], tools, row.get("tail", "")).parts) == row["text"]


def test_every_family_has_samples() -> None:
    assert set(NAMES) == {f.name for f in families.table()}
