"""Whatever a model writes, in whatever pieces: nothing raises, nothing is lost, the pieces do not matter."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from parsing.reading import EXAMPLES, read, turn
from singletree import families
from singletree.conversation import Tool
from singletree.events import TextDelta, ToolCallBroken, ToolCallEnd, ToolCallStart, fold
from singletree.parsing.arguments.coercion import is_json
from singletree.parsing.family import SLOT, Family, markers

TOOLS = (Tool("f", parameters={"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}),)
ODDS = [
    "\n",
    "\n\n",
    " ",
    "`",
    "```\n",
    '"',
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "<",
    "</",
    "f",
    "g1",
    "plan",
    "é😀",
    "\\",
    "\\u00e9",
    "1.0",
    "null",
    '{"a": 1}',
    '{"name": "f", "arguments": {"s": "x"}}',
    '"arguments": ',
    '{"name": "f", "arguments": ',
    "functions.f:0",
    "<parameter=n>\n3\n</parameter>",
    "\x00",
    "\r\n",
    "'",
    "f(",
    "n=3",
    "s='x",
    "call:f{",
    "n:3",
    ")",
    "[f(s=",
]


@cache
def fragments(family: Family) -> list[str]:
    whole = [
        *(family.reasoning or ()),
        *(f.call for f in family.forms),
        *(c for f in family.forms for c in f.calls),
    ]
    filled = [
        SLOT.sub(lambda m: {"args": '{"s": "x"}', "params": "", "literals": ""}.get(m[1], "f"), w)
        for w in whole
    ]
    return [*markers(family), *filled]


PIECES = st.lists(st.integers(0, 2**16), max_size=14)
"""Numbers of pieces; ``chosen`` finds those of a family."""


def chosen(family: Family, numbers: list[int]) -> list[str]:
    pieces = [*fragments(family), *ODDS]
    return [pieces[number % len(pieces)] for number in numbers]


@settings(max_examples=EXAMPLES)
@given(numbers=PIECES, is_open=st.booleans(), cut=st.integers(0, 2**16))
def test_pieces_do_not_matter(numbers: list[int], is_open: bool, cut: int) -> None:  # C9 C17 C18
    for family in families.table():
        pieces = chosen(family, numbers)
        text = "".join(pieces)
        tail = family.reasoning[0] if family.reasoning and is_open else ""
        at = cut % (len(text) + 1)
        whole = turn(family, [text], TOOLS, tail)
        assert turn(family, pieces, TOOLS, tail) == whole, family.name
        assert turn(family, list(text), TOOLS, tail) == whole, family.name
        assert turn(family, [text[:at], text[at:]], TOOLS, tail) == whole, family.name


@settings(max_examples=EXAMPLES)
@given(numbers=PIECES)
def test_calls_start_once_end_once_and_only_complete(numbers: list[int]) -> None:  # C13 C15
    for family in families.table():
        events = read(family, chosen(family, numbers), TOOLS)
        started = [e.index for e in events if isinstance(e, ToolCallStart)]
        ended = [e.index for e in events if isinstance(e, ToolCallEnd)]
        broken = [e.index for e in events if isinstance(e, ToolCallBroken)]
        assert started == list(range(len(started))), family.name
        assert len({*ended, *broken}) == len(ended) + len(broken), family.name
        assert {*ended, *broken} <= set(started), family.name
        for call in fold(events).tool_calls:
            if call.complete:
                assert call.name, family.name
                assert call.arguments.lstrip().startswith("{"), family.name
                assert is_json(call.arguments), family.name


@settings(max_examples=EXAMPLES)
@given(prose=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=80))
def test_prose_without_markers_is_text(prose: str) -> None:
    for family in families.table():
        if not any(mark in prose for mark in _marks(family)):
            events = read(family, list(prose))
            text = "".join(e.text for e in events if isinstance(e, TextDelta))
            assert text == ("" if family.starts_open else prose), family.name


@cache
def _marks(family: Family) -> set[str]:
    return {m.strip().removeprefix("]").strip() for m in fragments(family)} - {""}
