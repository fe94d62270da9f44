"""What a codec reads is what was meant: random schemas and values, through every way of writing arguments."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from parsing.reading import EXAMPLES, turn
from singletree import families
from singletree.conversation import Tool, ToolCall
from singletree.parsing.family import markers
from singletree.parsing.render_turn import render_turn

CALL = [f for f in families.table() if f.forms]
Generated = tuple[dict[str, Any], str]
"""A schema, and a value of it as JSON text."""

WORDS = st.text(
    alphabet=st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t\r é数😀<&\\'\"{}[],:="),
    max_size=30,
)
PADDED = st.tuples(
    st.sampled_from(["", " ", "\n", "  \n", "\r\n", "\t"]), WORDS, st.sampled_from(["", " ", "\n", "\r\n"])
).map("".join)
NUMBER_LIKE = st.sampled_from(
    ["42", "1.0", "null", "None", "true", "False", '{"a": 1}', "[1]", "-0", "1e5", ""]
)
INTEGERS = st.integers(-9, 9) | st.integers(2**53, 2**80) | st.integers(-(2**70), -(2**53))
NUMBERS = st.sampled_from(
    ["1.0", "0.10", "2.50", "-3.0", "1e10", "1.5E-7", "123456789012345678901234567890.5"]
)
KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


LEAVES: dict[str, st.SearchStrategy[str]] = {
    "string": (PADDED | NUMBER_LIKE).map(quoted),
    "integer": INTEGERS.map(str),
    "number": NUMBERS | INTEGERS.map(str),
    "boolean": st.sampled_from(["true", "false"]),
    "null": st.just("null"),
}
SCALARS = st.one_of(*LEAVES.values())


def listed(items: list[str]) -> str:
    return "[" + ", ".join(items) + "]"


def mapped(members: dict[str, str]) -> str:
    return "{" + ", ".join(f"{quoted(k)}: {v}" for k, v in members.items()) + "}"


@st.composite
def typed(pick: st.DrawFn, depth: int = 0) -> Generated:
    """A schema of one type, and a value of it."""
    kind = pick(st.sampled_from([*LEAVES, *(["array", "object"] if depth < 2 else [])]))
    if kind == "array":
        item, text = pick(typed(depth + 1))
        return {"type": "array", "items": item}, listed([text] * pick(st.integers(1, 3)))
    if kind == "object":
        members = pick(st.dictionaries(KEYS, typed(depth + 1), min_size=1, max_size=3))
        properties = {key: schema for key, (schema, _) in members.items()}
        return {"type": "object", "properties": properties}, mapped({k: v for k, (_, v) in members.items()})
    return {"type": kind}, pick(LEAVES[kind])


OTHERS: dict[str, list[str]] = {
    "string": [], "integer": ["string", "array"], "number": ["string", "object"], "boolean": ["string", "number"],
    "null": ["string", "integer"], "array": ["string", "integer"], "object": ["string", "null"],
}  # fmt: skip
"""Types that a value of the first may share a union with, and still be told from them where it is text."""


@st.composite
def wrapped(pick: st.DrawFn) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """A schema that says its type in one of the many ways there are, a value, and the definitions it needs."""
    schema, text = pick(typed())
    kind = schema["type"]
    other = [
        {"type": t}
        for t in pick(st.lists(st.sampled_from(OTHERS[kind] or ["null"]), max_size=2, unique=True))
    ]
    if kind == "string":
        other = []  # text that may be something else is told by nobody
    way = pick(
        st.sampled_from(
            ["plain", "anyOf", "oneOf", "allOf", "$ref", "nullable", "list", "enum", "const", "deep"]
        )
    )
    if way in ("anyOf", "oneOf"):
        return {way: [*other, schema]}, text, {}
    if way == "allOf":
        return {"allOf": [{"description": "it"}, schema]}, text, {}
    if way == "$ref":
        return {"$ref": "#/$defs/It"}, text, {"It": schema}
    if way == "deep":
        return (
            {"anyOf": [{"allOf": [{"$ref": "#/$defs/Again"}]}]},
            text,
            {"Again": {"$ref": "#/$defs/It"}, "It": schema},
        )
    if way == "nullable" and kind != "string":
        return {**schema, "nullable": True}, pick(st.sampled_from([text, "null"])), {}
    if way == "list" and kind != "string":
        return {**schema, "type": [kind, *(o["type"] for o in other)]}, text, {}
    if way in ("enum", "const") and kind in ("integer", "boolean", "string"):
        value = json.loads(text)
        return ({"enum": [value]} if way == "enum" else {"const": value}), text, {}
    return schema, text, {}


@st.composite
def tools(pick: st.DrawFn) -> tuple[Tool, str]:
    """A tool, and arguments for it as JSON text."""
    members = pick(st.dictionaries(KEYS, wrapped(), max_size=4))
    definitions = {f"{name}{i}": s for i, (_, _, d) in enumerate(members.values()) for name, s in d.items()}
    properties = {k: renamed(schema, i) for i, (k, (schema, _, _)) in enumerate(members.items())}
    definitions = {k: renamed(v, int("".join(filter(str.isdigit, k)))) for k, v in definitions.items()}
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    return Tool("f", parameters=parameters), mapped({k: text for k, (_, text, _) in members.items()})


def renamed(schema: Any, index: int) -> Any:
    """``schema`` with its references to the definitions of the parameter of that index."""
    if isinstance(schema, dict):
        return {k: f"{v}{index}" if k == "$ref" else renamed(v, index) for k, v in schema.items()}
    return [renamed(s, index) for s in schema] if isinstance(schema, list) else schema


def exact(text: str) -> Any:
    """JSON with its numbers as they were written."""
    return json.loads(text, parse_int=lambda s: ("number", s), parse_float=lambda s: ("number", s))


@settings(max_examples=max(5, EXAMPLES // 4))
@given(rendered=tools(), size=st.integers(1, 12))
def test_arguments_come_back(rendered: tuple[Tool, str], size: int) -> None:  # C3 C9 C22
    tool, arguments = rendered
    for family in CALL:
        if any(len(m) > 1 and m in arguments for m in (m.strip("[] \n") for m in markers(family))):
            continue
        text = render_turn(family, [ToolCall("f", arguments, "abcdefghi")])
        cut = [text[at : at + size] for at in range(0, len(text), size)]
        calls = turn(family, cut, [tool], family.message_header or " ").tool_calls
        assert [call.complete for call in calls] == [True], family.name
        assert exact(calls[0].arguments) == exact(arguments), family.name
