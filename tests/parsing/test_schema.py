"""Parameters as text become what the schema says (H11)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from singletree.parsing.arguments.coercion import is_string, parameter_types, to_json


def schema_of(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "$defs": {"Id": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}},
    }


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"type": "boolean"}, {"type": "string"}]}, {"boolean", "string"}),
        ({"allOf": [{"type": "number"}, {"minimum": 1}]}, {"number"}),
        ({"$ref": "#/$defs/Id"}, {"integer"}),
        ({"$ref": "#/$defs/Loop"}, set()),
        ({"$ref": "#/nowhere"}, set()),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"enum": [1, "a", None, True, 2.5]}, {"integer", "string", "null", "boolean", "number"}),
        ({"const": 3}, {"integer"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({}, set()),
        (True, set()),
        ({"type": "float"}, {"number"}),
        ({"type": "int"}, {"integer"}),
        ({"type": "bool"}, {"boolean"}),
        ({"type": "dict"}, {"object"}),
        ({"type": "list"}, {"array"}),
        ({"type": "tuple"}, {"array"}),
        ({"type": "str"}, {"string"}),
        ({"type": "None"}, {"null"}),
        ({"type": "any"}, set()),
        ({"type": ["str", "None"]}, {"string", "null"}),
        ({"type": "int | None"}, {"integer", "null"}),
        ({"type": "Optional[typing.List[int]]"}, {"array", "null"}),
        ({"type": "Union[int, dict[str, list[int]], None]"}, {"integer", "object", "null"}),
        ({"type": "dict[str, int | None]"}, {"object"}),
        ({"type": "Literal['a', 1, None]"}, {"string", "integer", "null"}),
        ({"type": "Annotated[float, 'x']"}, {"number"}),
        ({"type": "Path"}, {"Path"}),
        ({"type": "Optional[" * 400}, {"null"}),
        ({"type": "]]|[["}, {"]]|[["}),
    ],
)
def test_types(declared: Any, expected: set[str]) -> None:  # C22
    assert parameter_types(schema_of(x=declared), "x") == expected


def test_properties_are_found_in_combinations() -> None:
    assert parameter_types(
        {"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": schema_of(x={"type": "integer"})}}, "x"
    ) == {"integer"}
    assert parameter_types(None, "x") == set()


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("42", {"string"}, '"42"'),
        ("null", {"string"}, '"null"'),
        ('{"a": 1}', {"string"}, '"{\\"a\\": 1}"'),
        ("42", {"integer"}, "42"),
        (" 42\n", {"integer"}, "42"),
        ("3.0", {"integer"}, "3.0"),
        ("three", {"integer"}, '"three"'),
        ("9007199254740993", {"integer"}, "9007199254740993"),
        ("1.0", {"number"}, "1.0"),
        ("1e3", {"number"}, "1e3"),
        ("NaN", {"number"}, '"NaN"'),
        ("007", {"integer"}, "7"),
        ("+5", {"integer"}, "5"),
        ("-007", {"integer"}, "-7"),
        ("1_000", {"integer"}, "1000"),
        ("+5", {"integer", "null"}, "5"),
        ("007", {"integer", "string"}, '"007"'),
        ("007", {"string"}, '"007"'),
        (".5", {"integer"}, '".5"'),
        (".5", {"number"}, "0.5"),
        ("5.", {"number"}, "5.0"),
        ("0x10", {"integer"}, '"0x10"'),
        ("++5", {"integer"}, '"++5"'),
        ("_", {"integer"}, '"_"'),
        ("True", {"boolean"}, "true"),
        ("0", {"boolean"}, "false"),
        ("0", {"boolean", "integer"}, "0"),
        ("maybe", {"boolean"}, '"maybe"'),
        ("null", {"integer", "null"}, "null"),
        ("None", {"string", "null"}, "null"),
        ('{"b":1, "a" : 2.50}', {"object"}, '{"b":1, "a" : 2.50}'),
        ("[1, NaN]", {"array"}, '"[1, NaN]"'),
        ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
        ("[1]", {"object"}, '"[1]"'),
        ("text", set(), '"text"'),
    ],
)
def test_typed(text: str, types: set[str], expected: str) -> None:  # C22
    assert to_json(text, types) == expected


def test_only_a_plain_string_may_leave_early() -> None:
    assert is_string(frozenset())
    assert is_string(frozenset({"string"}))
    assert not is_string(frozenset({"string", "null"}))


@given(
    st.text(), st.sets(st.sampled_from(["string", "null", "integer", "number", "boolean", "object", "array"]))
)
def test_always_json(text: str, types: set[str]) -> None:
    json.loads(to_json(text, types))
