"""Every sample of every family: whole, cut everywhere, truncated everywhere, and drawn again."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from parsing.reading import cuts, read, turn
from singletree import families
from singletree.conversation import Part, Reasoning, Text, Tool, ToolCall
from singletree.events import ReasoningDelta, TextDelta, ToolCallEnd, fold
from singletree.parsing.draw import draw
from singletree.parsing.schema import is_json

SAMPLES = Path(__file__).parent / "samples"


def rows() -> list[Any]:
    found = []
    for path in sorted(SAMPLES.glob("*.toml")):
        file = tomllib.loads(path.read_text(encoding="utf-8"))
        tools = tuple(Tool(t["name"], parameters=t["parameters"]) for t in file.get("tools", ()))
        for row in file["sample"]:
            found.append(
                pytest.param(path.stem, row, tools, id=f"{path.stem}-{row['case'].replace(' ', '_')}")
            )
    return found


def part(row: dict[str, Any]) -> Part:
    if "call" in row:
        return ToolCall(row["call"], row["arguments"], row.get("id", ""), row.get("complete", True))
    return Text(row["text"]) if "text" in row else Reasoning(row["reasoning"])


def same(read_parts: tuple[Part, ...], expected: tuple[Part, ...]) -> tuple[Part, ...]:
    """``read_parts`` with the ids taken out that the sample does not name."""
    named = {p.id for p in expected if isinstance(p, ToolCall)}
    return tuple(
        ToolCall(p.name, p.arguments, p.id if p.id in named else "", p.complete)
        if isinstance(p, ToolCall)
        else p
        for p in read_parts
    )


@pytest.mark.parametrize(("name", "row", "tools"), rows())
def test_whole(name: str, row: dict[str, Any], tools: tuple[Tool, ...]) -> None:  # C17 C19 C20 C21 C22 C23
    expected = tuple(map(part, row["parts"]))
    read_parts = turn(families.get(name), [row["text"]], tools, row.get("tail", "")).parts
    assert same(read_parts, expected) == expected


@pytest.mark.parametrize(("name", "row", "tools"), rows())
def test_cut_anywhere(name: str, row: dict[str, Any], tools: tuple[Tool, ...]) -> None:  # C9 C18
    family, tail = families.get(name), row.get("tail", "")
    whole = turn(family, [row["text"]], tools, tail)
    for pieces in cuts(row["text"]):
        assert turn(family, pieces, tools, tail) == whole


@pytest.mark.parametrize(("name", "row", "tools"), rows())
def test_truncated_anywhere(name: str, row: dict[str, Any], tools: tuple[Tool, ...]) -> None:  # C15
    family, text, tail = families.get(name), row["text"], row.get("tail", "")
    for end in range(len(text)):
        events = read(family, [text[:end]], tools, tail)
        ended = sum(isinstance(e, ToolCallEnd) for e in events)
        calls = fold(events).tool_calls
        assert sum(c.complete for c in calls) == ended
        assert all(is_json(c.arguments) for c in calls if c.complete)
        said = "".join(e.text for e in events if isinstance(e, TextDelta | ReasoningDelta))
        assert "\ud800" not in said


@pytest.mark.parametrize(("name", "row", "tools"), rows())
def test_drawn_again(name: str, row: dict[str, Any], tools: tuple[Tool, ...]) -> None:
    if row.get("drawn") is False:
        pytest.skip("another spelling than the one that is drawn")
    family = families.get(name)
    assert draw(family, turn(family, [row["text"]], tools, row.get("tail", "")).parts) == row["text"]


def test_every_family_has_samples() -> None:
    assert {p.stem for p in SAMPLES.glob("*.toml")} == {f.name for f in families.table()}
