"""A random turn that is rendered by a family is parsed back as it was."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
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
def calls(pick: st.DrawFn, nested: bool) -> tuple[ToolCall, Tool]:
    arguments = pick(st.dictionaries(KEYS, ELEMENTS if nested else VALUES, max_size=4))
    name = pick(KEYS)
    tool = Tool(name, parameters={"properties": {k: schema_of(v) for k, v in arguments.items()}})
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False), "abcdefghi"), tool


Generated = Text | Reasoning | list[tuple[ToolCall, Tool]]
"""A part of a turn, before a family is known: its calls in a row are one part."""


def generated_turns(nested: bool) -> st.SearchStrategy[list[Generated]]:
    """Turns for families whose arguments are elements inside elements, or for all others."""
    part = PROSE.map(Text) | PROSE.map(Reasoning) | st.lists(calls(nested), min_size=1, max_size=3)
    return st.lists(part, min_size=1, max_size=5)


def as_written_by(family: Family, generated: list[Generated]) -> tuple[list[Part], list[Tool]]:
    """Return the parts that the family can write, and the tools of its calls. No two texts, or rows of calls, touch."""
    parts: list[Part] = []
    tools: list[Tool] = []
    for each in generated:
        if isinstance(each, list):
            if family.forms and not (parts and isinstance(parts[-1], ToolCall)):
                for call, tool in each:
                    name = f"{call.name}{len(tools)}"
                    parts.append(replace(call, name=name))
                    tools.append(replace(tool, name=name))
        elif family.reasoning if isinstance(each, Reasoning) else not (parts and isinstance(parts[-1], Text)):
            parts.append(each)
    return parts, tools


def is_nested(family: Family) -> bool:
    return bool(family.forms and family.forms[0].nested)


@pytest.mark.parametrize("nested", [False, True])
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_a_rendered_turn_is_parsed_back(nested: bool, data: st.DataObject) -> None:
    generated = data.draw(generated_turns(nested))
    for family in families.table():
        parts, tools = as_written_by(family, generated)
        text = "".join(p.text for p in parts if isinstance(p, Text | Reasoning))
        text += "".join(p.arguments for p in parts if isinstance(p, ToolCall))
        has_marker = any(len(m) > 1 and m in text for m in (m.strip("[] \n") for m in markers(family)))
        if parts and is_nested(family) is nested and not has_marker:
            rendered = render_turn(family, parts)
            back = turn(family, [rendered], tools, family.message_header or " ").parts
            assert [meaning(p) for p in back] == [meaning(p) for p in parts], family.name


def meaning(part: Part) -> object:
    if isinstance(part, ToolCall):
        assert part.complete
        return part.name, json.loads(part.arguments)
    return part


@pytest.mark.parametrize("arguments", ['{"k": "cut', "no json", "[1]", '"s"', "7", '{"a":' * 3000])
@pytest.mark.parametrize("name", [name for name in families.names() if families.get(name).forms])
def test_arguments_that_are_no_object_are_rendered(name: str, arguments: str) -> None:
    written = render_turn(families.get(name), [ToolCall("f", arguments, "abcdefghi", complete=False)])
    assert arguments in written or json.dumps(arguments)[1:-1] in written
