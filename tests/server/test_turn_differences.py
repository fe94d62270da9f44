"""Turns are read from the tokens of a prompt, and compared with what a client made of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from singletree import families
from singletree.conversation import Reasoning, Text, Tool, ToolCall, Turn
from singletree.parsing.family import markers
from singletree.parsing.render_turn import render_turn
from singletree.prefix_breaks.context import (
    ids_between,
    rest_of_turn,
    turn_at,
    turn_start,
    turn_starts,
)
from singletree.prefix_breaks.turn_differences import Difference, difference

from .forging import speech, vocabulary

TEMPLATES = Path(__file__).parents[1] / "families" / "templates"
CALL = ToolCall("ls", '{"path": "a"}', "functions.ls:0")
MODEL_OUTPUT = Turn("assistant", (Reasoning("I look."), Text("Let me see."), CALL))
TOOLS = (Tool("ls", parameters={"type": "object", "properties": {"path": {"type": "string"}}}),)


@pytest.mark.parametrize("name", [family.name for family in families.table() if family.message_header])
def test_a_turn_of_several_messages_is_read_as_one(name: str) -> None:
    """The token that ends each of them is no end of the turn where the next one follows."""
    family, source = families.get(name), (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    tags = {marker.strip() for marker in markers(family)} | set(re.findall(r"<\|\w+\|>", source))
    spoken = speech(
        vocabulary(dict.fromkeys(sorted(tag for tag in tags if tag[:1] == "<"), True)), source, family
    )
    assert spoken.layout is not None
    header, end = spoken.layout.headers[0], spoken.layout.ends[-1]
    generated = render_turn(family, MODEL_OUTPUT.parts).removeprefix(header)
    assert family.message_header in generated
    behind = f"{end.removesuffix(generated[-len(end) :])}<|start|>user<|message|>And now?{end}"
    tokens = spoken.tokenizer.encode(header + generated + behind)
    packed = b"".join(id.to_bytes(4, "little") for id in tokens)
    start = len(spoken.tokenizer.encode(header))
    read = turn_at(packed, start, TOOLS, spoken)
    expected = MODEL_OUTPUT if family.reasoning else Turn("assistant", MODEL_OUTPUT.parts[1:])
    assert difference(read, (expected,), family, TOOLS) == "none"
    twice = packed * 2
    places = [start, start + len(tokens)]
    assert turn_starts(twice, 2 * len(tokens), spoken) == places
    assert [turn_start(twice, place, spoken) for place in (start, len(tokens), 2 * len(tokens))] == [
        places[0],
        places[0],
        places[1],
    ]
    rest = rest_of_turn(spoken.tokenizer.decode(ids_between(packed, start, len(tokens))), spoken)
    assert "And now?" not in rest


ONE, TWO = Reasoning("First this."), Reasoning("Then that.")
BOTH = Turn("assistant", (ONE, Text("I look."), CALL, TWO, Text("And more."), CALL))


@pytest.mark.parametrize("name", ["qwen3", "muse_glimmer"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("First this.\nI look.\nThen that.\nAnd more.", "reasoning_as_text"),
        ("First this.I look.Then that.And more.", "reasoning_as_text"),
        ("<think>\nFirst this.\n</think>\nI look.And more.", "reasoning_as_text"),
        ("<think>First this.\n\nThen that.</think>I look.And more.", "reasoning_as_text"),
        ("Then that.", "reasoning_as_text"),
        ("I look.\nAnd more.", "reasoning_left_out"),
        ("And more.", "in_part"),
        ("First this. I looked.", "edited"),
        ("And more. First this.", "edited"),
        ("Something else.", "edited"),
    ],
)
def test_text_is_compared_with_all_that_was_written(name: str, text: str, expected: Difference) -> None:
    returned = Turn("assistant", (Text(text), CALL, CALL))
    assert difference(BOTH, (returned,), families.get(name), TOOLS) == expected
