"""JSON of a client in the spelling of chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from singletree.protocols.content import argument_text, template_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
SPELLINGS: list[dict[str, Any]] = [
    {"separators": (",", ":"), "ensure_ascii": False},
    {"separators": (",", ":")},
    {"indent": 2},
    {"separators": (" ,\n", " :\t")},
]


@settings(max_examples=200, deadline=None)
@given(value=VALUES, spelling=st.sampled_from(SPELLINGS))
def test_any_spelling_gives_what_tojson_prints(value: Any, spelling: dict[str, Any]) -> None:
    written = json.dumps(value, **spelling).encode()
    assert template_json(written) == json.dumps(value, ensure_ascii=False)


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    """``JSON.stringify`` writes it so, and it has no UTF-8."""
    sent = rb'{"a":"\ud83d","b":"\ud83d\ude00","c":"\\u00ed","d":1}'
    shown = template_json(sent)
    assert shown == r'{"a": "\ud83d", "b": "SMILE", "c": "\\u00ed", "d": 1}'.replace("SMILE", "\U0001f600")


@settings(max_examples=200, deadline=None)
@given(value=st.dictionaries(st.text(max_size=5), VALUES, max_size=3))
def test_text_without_spaces_is_what_javascript_wrote(value: Any) -> None:
    for spelling in ({"separators": (",", ":"), "ensure_ascii": False}, {}, {"indent": 2}):
        text = json.dumps(value, **spelling)
        is_compact = spelling.get("separators") is not None or not value
        read = (json.dumps(value, ensure_ascii=False), False) if is_compact else (text, True)
        assert argument_text(text) == read


DEEP = '{"a":' * 5000 + "1" + "}" * 5000


@pytest.mark.parametrize("text", ["[1,2]", '"a"', '{"a":', "no json", '{"a":\n1}', DEEP])
def test_other_text_is_taken_as_it_is(text: str) -> None:
    assert argument_text(text) == (text, True)


def test_deep_nesting_is_respelled_too() -> None:
    deep = b"[" * 100_000 + b"1,2" + b"]" * 100_000
    assert template_json(deep) == deep.decode().replace(",", ", ")
