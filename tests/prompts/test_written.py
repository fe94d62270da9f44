"""JSON that remembers how it was written, and the ``tojson`` filter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from singletree.prompts.template.source_json import SourceList, SourceObject, read_object, tojson

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])


def _same(text: str) -> str:
    return text


@settings(max_examples=200, deadline=None)
@given(value=OBJECTS, separators=SPACES, ascii=st.booleans())
def test_what_is_read_is_the_value_and_prints_as_written(
    value: dict[str, Any], separators: tuple[str, str], ascii: bool
) -> None:  # C3
    text = json.dumps(value, separators=separators, ensure_ascii=ascii)
    read = read_object(f" {text}\n", _same)
    assert read == value
    assert tojson(read) == text
    assert tojson(read, indent=2) == text
    assert tojson({"a": [read, 1]}) == f'{{"a": [{text}, 1]}}'


@settings(max_examples=200, deadline=None)
@given(value=OBJECTS, cut=st.integers(0, 40), put=st.sampled_from(["", ",", "}", "{", '"', "\\", "x", " "]))
def test_what_is_no_object_is_refused(value: dict[str, Any], cut: int, put: str) -> None:
    text = json.dumps(value, ensure_ascii=False)
    text = text[:cut] + put + text[cut + 1 :]
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    if isinstance(expected, dict) and "NaN" not in text and "Infinity" not in text:
        assert read_object(text, _same) == expected
    elif not isinstance(expected, dict):
        with pytest.raises(
            ValueError, match=r"Expecting |Extra data|not a JSON object|Unterminated|Invalid|Illegal"
        ):
            read_object(text, _same)


@settings(max_examples=100, deadline=None)
@given(value=VALUES, ascii=st.booleans(), indent=st.sampled_from([None, 2]), sort=st.booleans())
def test_the_filter_prints_as_python_does(value: Any, ascii: bool, indent: int | None, sort: bool) -> None:
    expected = json.dumps(value, ensure_ascii=ascii, indent=indent, sort_keys=sort)
    assert tojson(value, ensure_ascii=ascii, indent=indent, sort_keys=sort) == expected
    if isinstance(value, dict | list):
        kept = SourceObject.printed(value) if isinstance(value, dict) else SourceList.printed(value)
        assert kept == value
        assert tojson(kept, ensure_ascii=ascii, indent=indent, sort_keys=sort) == expected


def test_marks_survive_escaping() -> None:
    assert tojson("\udfff<é>", ensure_ascii=True) == '"\udfff<\\u00e9>"'


def test_a_change_reaches_every_string() -> None:
    read = read_object('{"a": ["a", {"b": "\\u0061"}], "c": 1}', lambda text: text.replace("a", "#"))
    assert read == {"#": ["#", {"b": "#"}], "c": 1}
    assert read.source == '{"#": ["#", {"b": "\\u0061"}], "c": 1}'
