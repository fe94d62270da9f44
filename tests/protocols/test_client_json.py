"""JSON of a client in the spelling of chat templates."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from singletree.protocols.client_json import template_json

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


def test_deep_nesting_is_respelled_too() -> None:
    deep = b"[" * 100_000 + b"1,2" + b"]" * 100_000
    assert template_json(deep) == deep.decode().replace(",", ", ")
