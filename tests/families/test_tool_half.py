"""A tool parser chosen alone: reasoning and its markers are text for it, and hide no call."""

from __future__ import annotations

import pytest

from parsing.reading import cuts, turn
from singletree import families
from singletree.conversation import Text, Tool, ToolCall

TOOLS = (Tool("f"),)
CALL = '[{"name": "f", "arguments": {"s": "x"}}]'


@pytest.mark.parametrize("between", ["", " ", "\n\n"])
def test_a_bare_call_right_behind_a_thought(between: str) -> None:
    family = families.pair(tools="xlam")
    for pieces in cuts(f"<think>plan</think>{between}{CALL}"):
        parts = turn(family, pieces, TOOLS).parts
        assert [p for p in parts if isinstance(p, ToolCall)] == [ToolCall("f", '{"s": "x"}', "call_0")]
        assert "".join(p.text for p in parts if isinstance(p, Text)).rstrip() == "<think>plan</think>"


def test_nothing_else_in_mid_line() -> None:
    family = families.pair(tools="xlam")
    for text in (f"see {CALL}", f"</thinking>{CALL}", f"`</think>{CALL}`"):
        assert turn(family, [text], TOOLS).parts == (Text(text),)
