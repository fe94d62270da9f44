"""How far two sequences are the same."""

from __future__ import annotations

import operator
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from singletree.prefixes import common_prefix, common_text_prefix, identical_prefix

LONG = 50_000


def naive(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=1500),
    st.integers(0, 1500),
    st.lists(st.integers(0, 2**16 - 1), max_size=40),
    st.lists(st.integers(0, 2**16 - 1), max_size=40),
)
def test_the_longest_common_prefix(shared: list[int], repeats: int, one: list[int], other: list[int]) -> None:
    left, right = shared * (1 + repeats % 4) + one, shared * (1 + repeats % 4) + other
    expected = naive(left, right)
    assert common_prefix(left, right) == common_prefix(right, left) == expected
    texts = "".join(map(chr, left)), "".join(map(chr, right))
    assert common_text_prefix(*texts) == common_text_prefix(*texts[::-1]) == expected
    packed = array("I", left).tobytes(), array("I", right).tobytes()
    width = array("I").itemsize
    assert common_text_prefix(*packed) // width == common_text_prefix(*packed[::-1]) // width == expected


@pytest.mark.parametrize(
    "at", [0, 1, 255, 256, 257, 2303, 2304, 2305, 18687, 18688, 35072, LONG - 257, LONG - 1]
)
def test_one_difference_is_found(at: int) -> None:
    text = "7" * LONG
    assert common_text_prefix(text, text[:at] + "8" + text[at + 1 :]) == at
    assert common_text_prefix(text, text[:at] + "8" + text[at:] * 9) == at
    assert common_text_prefix(text, text[:at]) == common_text_prefix(text[:at], text) == at


def test_items_are_compared_only_where_they_are_not_the_same_object() -> None:
    never_equal = float("nan")
    assert common_prefix([never_equal, 1], [never_equal, 2]) == 1
    assert common_prefix(["a", "B", "c"], ["A", "b", "d"], lambda a, b: a.lower() == b.lower()) == 2
    assert common_prefix([1, 2], [2, 3, 4], operator.lt) == 2


def test_identical_items() -> None:
    one, same, equal = [1], [2], [2]
    assert identical_prefix([one, same], [one, same, one]) == 2
    assert identical_prefix([one, same], [one, equal]) == 1
    assert identical_prefix([], [one]) == 0
