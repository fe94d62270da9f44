"""No schema that a client may send makes anything but a constraint or a refusal."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from singletree import families
from singletree.constraints.constrain import allow_calls, require_call
from singletree.constraints.enforceable import pattern_of_text, relaxed
from singletree.constraints.expression import NotExpressible, lark, structural_tag
from singletree.conversation import Tool
from singletree.errors import InvalidRequest

KEYWORDS = (
    "type",
    "properties",
    "required",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "items",
    "prefixItems",
    "pattern",
    "format",
    "minLength",
    "maxLength",
    "$ref",
    "$defs",
    "additionalProperties",
    "minimum",
    "multipleOf",
    "uniqueItems",
    "nullable",
    "description",
    "a",
    "b",
)
WORDS = ("string", "integer", "object", "null", "a", "#/$defs/a", "#", "date", "^a$", "(", "a|b$")
SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYWORDS), SCHEMAS, max_size=5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_schema_is_held_to_or_refused(parameters: dict[str, Any], strict: bool) -> None:  # C42
    tool = Tool("f", parameters=parameters, strict=strict)
    for name in ("hermes", "qwen3_coder", "pythonic", "gemma4", "kimi_k3"):
        for ask in (require_call, allow_calls):
            with suppress(InvalidRequest) if strict else nullcontext():
                wanted = ask(families.get(name), [tool], thinking="possible", parallel=True)
                if wanted is not None:
                    assert lark(wanted, {}, [1])
                    with suppress(NotExpressible):
                        assert structural_tag(wanted)


@given(SCHEMAS)
@settings(max_examples=60, deadline=None)
def test_what_is_relaxed_has_nothing_to_relax(schema: Any) -> None:
    once = relaxed(schema)
    assert relaxed(once) == once


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ({}, ""),
        (None, ""),
        ({"format": "date"}, ""),
        ({"pattern": "^a$"}, "(?:a)"),
        ({"pattern": r"^a\$"}, r"(?:a\$)(.|\n)*"),
        ({"pattern": "a|b"}, r"(.|\n)*(?:a|b)(.|\n)*"),
        ({"pattern": "^(a|b)$"}, "(?:(a|b))"),
        ({"pattern": "^[$^|]$"}, "(?:[$^|])"),
        ({"minLength": 2}, r"(.|\n){2,}"),
        ({"maxLength": 3}, r"(.|\n){0,3}"),
        ({"pattern": "^a|b$"}, ""),
    ],
)
def test_patterns_of_strings_without_quotes(schema: Any, pattern: str) -> None:
    assert pattern_of_text(schema, "at", strict=False) == pattern
