"""Measures how far two sequences, texts or packed tokens are the same."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import compress, count, islice
from typing import Any, AnyStr, TypeVar

OneT = TypeVar("OneT")
OtherT = TypeVar("OtherT")

_STEP = 256
_WIDER = 16


def common_prefix(
    one: Sequence[OneT], other: Sequence[OtherT], same: Callable[[OneT, OtherT], bool] = operator.eq
) -> int:
    """Return the length of the common prefix of two sequences, in items.

    Args:
        one, other: the sequences; use ``common_text_prefix`` for texts and bytes.
        same: compares two items; it is called only where they are not the same object.
    """
    # Most conversations differ in their first message, and only that is compared.
    if not one or not other or not (one[0] is other[0] or same(one[0], other[0])):
        return 0
    # A conversation that has grown begins with the same objects, and no Python loop runs over those.
    start = identical_prefix(one, other)
    pairs = zip(islice(one, start, None), islice(other, start, None), strict=False)
    differs = (at for at, (a, b) in enumerate(pairs, start) if a is not b and not same(a, b))
    return next(differs, min(len(one), len(other)))


def identical_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences, compared by identity, not by equality."""
    differs = compress(count(), map(operator.is_not, one, other))
    return next(differs, min(len(one), len(other)))


def common_text_prefix(one: AnyStr, other: AnyStr) -> int:
    """Return the length of the common prefix of two texts in characters, or of two byte strings in bytes.

    No Python loop runs over the characters. Two texts without a relation differ in their first characters, and a text
    that has grown differs near its end, so these two places are searched first.
    """
    if one.startswith(other) or other.startswith(one):
        return min(len(one), len(other))
    sliced: Any = other
    if isinstance(sliced, bytes):
        sliced = memoryview(sliced)  # its slices copy nothing; a str has no such view
    low, high, step = 0, min(len(one), len(other)), _STEP
    if not one.startswith(sliced[:step]):
        high = min(high, step)
    while low < high:
        guess = max(0, high - step)
        if one.startswith(sliced[:guess]):
            low = guess
            break
        high, step = guess, step * _WIDER
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(sliced[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
