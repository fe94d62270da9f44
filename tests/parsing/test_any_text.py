"""Whatever a model writes, in whatever pieces: nothing raises, nothing is lost, the pieces do not matter."""

from __future__ import annotations

import pytest
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


def texts(family: Family) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from([*fragments(family), *ODDS]), max_size=14)


@pytest.mark.parametrize("family", families.table(), ids=lambda f: f.name)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_pieces_do_not_matter(family: Family, data: st.DataObject) -> None:  # C9 C17 C18
    pieces = data.draw(texts(family))
    text = "".join(pieces)
    tail = data.draw(st.sampled_from(["", *([family.reasoning[0]] if family.reasoning else [])]))
    whole = turn(family, [text], TOOLS, tail)
    assert turn(family, pieces, TOOLS, tail) == whole
    assert turn(family, list(text), TOOLS, tail) == whole
    at = data.draw(st.integers(0, len(text)))
    assert turn(family, [text[:at], text[at:]], TOOLS, tail) == whole


@pytest.mark.parametrize("family", families.table(), ids=lambda f: f.name)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_calls_start_once_end_once_and_only_complete(family: Family, data: st.DataObject) -> None:  # C13 C15
    events = read(family, data.draw(texts(family)), TOOLS)
    started = [e.index for e in events if isinstance(e, ToolCallStart)]
    ended = [e.index for e in events if isinstance(e, ToolCallEnd)]
    broken = [e.index for e in events if isinstance(e, ToolCallBroken)]
    assert started == list(range(len(started)))
    assert len({*ended, *broken}) == len(ended) + len(broken)
    assert {*ended, *broken} <= set(started)
    for call in fold(events).tool_calls:
        if call.complete:
            assert call.name
            assert call.arguments.lstrip().startswith("{")
            assert is_json(call.arguments)


@pytest.mark.parametrize("family", families.table(), ids=lambda f: f.name)
@settings(max_examples=EXAMPLES, deadline=None)
@given(prose=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=80))
def test_prose_without_markers_is_text(family: Family, prose: str) -> None:
    marks = {m.strip().removeprefix("]").strip() for m in fragments(family)}
    if any(m in prose for m in marks - {""}):
        return
    events = read(family, list(prose))
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == (
        prose if not family.starts_open else ""
    )
