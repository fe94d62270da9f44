"""Measures how far two sequences, texts or packed tokens are the same."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import compress, count
from typing import Any, AnyStr, TypeVar

OneT = TypeVar("OneT")
OtherT = TypeVar("OtherT")

_STEP = 256
_WIDER = 8
_LONGEST = 1 << 14


def common_prefix(
    one: Sequence[OneT], other: Sequence[OtherT], same: Callable[[OneT, OtherT], bool] = operator.eq
) -> int:
    """Return the length of the common prefix of two sequences, in items.

    Args:
        one, other: the sequences; use ``common_text_prefix`` for texts and bytes.
        same: compares two items; it is called only where they are not the same object.
    """
    # A conversation that has grown begins with the same objects, and no Python loop runs over those.
    at, end = identical_prefix(one, other), min(len(one), len(other))
    while at < end and (one[at] is other[at] or same(one[at], other[at])):
        at += 1
    return at


def identical_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences, compared by identity, not by equality."""
    if one is other:
        return len(one)
    differs = compress(count(), map(operator.is_not, one, other))
    return next(differs, min(len(one), len(other)))


def common_text_prefix(one: AnyStr, other: AnyStr) -> int:
    """Return the length of the common prefix of two texts in characters, or of two byte strings in bytes.

    Most texts only grow. Others are compared in stretches, which it slices from ``other``: small slices stay in the
    processor's cache, and a text that differs at its beginning costs little.
    """
    shorter, longer = (one, other) if len(one) <= len(other) else (other, one)
    if longer.startswith(shorter):
        return len(shorter)
    sliced: Any = other
    if isinstance(sliced, bytes):
        sliced = memoryview(sliced)  # its slices copy nothing; a str has no such view
    low, end, step = 0, len(shorter), _STEP
    while low < end and one.startswith(sliced[low : low + step], low):
        low, step = low + step, min(step * _WIDER, _LONGEST)
    low, high = min(low, end), min(low + step, end)
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(sliced[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
