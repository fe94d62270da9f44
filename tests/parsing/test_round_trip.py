"""What is drawn is read back as it was, for random turns in every family."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parsing.reading import EXAMPLES, turn
from singletree import families
from singletree.conversation import Part, Reasoning, Text, Tool, ToolCall
from singletree.parsing.family import Family, markers
from singletree.parsing.render_turn import render_turn

WORDS = st.text(
    alphabet=st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"),
    min_size=1,
    max_size=40,
)
MARKS = "\"'“‘«>"  # a marker between two quotes is a quoted one; ">" would lengthen a ">>>"
PROSE = WORDS.filter(
    lambda s: bool(s.strip()) and "`" not in s and not s.endswith("\n") and s[-1] not in MARKS
)
KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
# Elements say nothing of types: what the schema does not declare is a string.
ELEMENTS = (
    st.none() | st.booleans() | st.integers() | WORDS
    | st.lists(st.integers(), max_size=3) | st.dictionaries(KEYS, WORDS, max_size=3)
)  # fmt: skip
TYPES = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}


def schema_of(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"type": "array", "items": {"type": "integer"}}
    return {"type": TYPES[type(value)]}


@st.composite
def calls(choose_from: st.DrawFn, nested: bool) -> tuple[ToolCall, Tool]:
    arguments = choose_from(st.dictionaries(KEYS, ELEMENTS if nested else VALUES, max_size=4))
    name = choose_from(KEYS)
    tool = Tool(name, parameters={"properties": {k: schema_of(v) for k, v in arguments.items()}})
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False), "abcdefghi"), tool


@st.composite
def turns(choose_from: st.DrawFn, family: Family) -> tuple[list[Part], list[Tool]]:
    parts: list[Part] = []
    tools: list[Tool] = []
    for kind in choose_from(
        st.lists(st.sampled_from(["reasoning", "text", "calls"]), min_size=1, max_size=5)
    ):
        if kind == "text" and not (parts and isinstance(parts[-1], Text)):
            parts.append(Text(choose_from(PROSE)))
        elif kind == "reasoning" and family.reasoning:
            parts.append(Reasoning(choose_from(PROSE)))
        elif kind == "calls" and family.forms and not (parts and isinstance(parts[-1], ToolCall)):
            for call, tool in choose_from(st.lists(calls(family.forms[0].nested), min_size=1, max_size=3)):
                name = f"{call.name}{len(tools)}"
                parts.append(replace(call, name=name))
                tools.append(replace(tool, name=name))
    return parts, tools


@pytest.mark.parametrize("family", families.table(), ids=lambda f: f.name)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_parse_of_draw_is_the_identity(family: Family, data: st.DataObject) -> None:
    parts, tools = data.draw(turns(family))
    said = "".join(p.text for p in parts if isinstance(p, Text | Reasoning)) + "".join(
        p.arguments for p in parts if isinstance(p, ToolCall)
    )
    assume(not any(len(m) > 1 and m in said for m in (m.strip("[] \n") for m in markers(family))))
    back = turn(family, [render_turn(family, parts)], tools, family.message_header or " ").parts
    assert [spoken(p) for p in back] == [spoken(p) for p in parts]


def spoken(part: Part) -> object:
    if isinstance(part, ToolCall):
        assert part.complete
        return part.name, json.loads(part.arguments)
    return part
