"""The scanner agrees with Python's reader, at any cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from singletree.parsing.arguments.coercion import is_json
from singletree.parsing.arguments.json_arguments import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)


def scan(text: str, size: int) -> tuple[JsonScanner, int]:
    scanner, read = JsonScanner(), 0
    for i in range(0, len(text), size):
        piece = text[i : i + size]
        end = scanner.scan(piece)
        read += end
        if scanner.done or scanner.broken:
            break
    return scanner, read


@given(OBJECTS, st.booleans(), st.sampled_from([None, 0, 2]), st.integers(1, 9))
def test_valid_json_ends_where_it_ends(
    value: dict[str, object], ascii_only: bool, indent: int | None, size: int
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    scanner, read = scan(text + " }tail", size)
    assert scanner.done
    assert not scanner.broken
    assert read == len(text)


@settings(max_examples=500)
@given(OBJECTS, st.data())
def test_agrees_on_damaged_json(value: dict[str, object], data: st.DataObject) -> None:
    text = list(json.dumps(value, ensure_ascii=False))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 1))] = data.draw(
            st.sampled_from(["", ",", '"', "\\", "{", "]", "1", "x", "\n", " "])
        )
    damaged = "".join(text)
    scanner, read = scan(damaged, 3)
    whole = scanner.done and not damaged[read:].strip()
    assert whole == (damaged.lstrip(" \t\r\n")[:1] in ("{", "[") and is_json(damaged))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 01}',
        '{"a": 1.}',
        '{"a": .5}',
        '{"a": +1}',
        '{"a": tru}',
        "{'a': 1}",
        '{"a" 1}',
        '{"a": 1,}',
        "[1,]",
        '{"a": "\n"}',
        '{"a": "\\x"}',
        '{"a": "\\u12g4"}',
        "{,}",
        "{1: 2}",
        '{"a": 1]',
        "[1}",
        '{"a": ٣}',
    ],
)
def test_refuses(text: str) -> None:
    assert scan(text, 1)[0].broken
