"""What conversations that grow have behind them: the work on their earlier prompts, to go on from.

A harness sends the whole conversation with every turn. Each stage of writing a prompt keeps what it made of the last
one, and goes on from there as far as what it is given now begins with what it was given then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from threading import Lock
from typing import Generic, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")

_STEP = 256
_WIDER = 16


def same_items(one: Sequence[object], other: Sequence[object]) -> int:
    """How many items both begin with."""
    pairs = zip(one, other, strict=False)
    differs = (at for at, (a, b) in enumerate(pairs) if a is not b and a != b)
    return next(differs, min(len(one), len(other)))


def same_characters(one: str, other: str) -> int:
    """How many characters both begin with. What has grown differs near its end, so that is looked at first."""
    low, high, step = 0, min(len(one), len(other)), _STEP
    while low < high:
        guess = max(0, high - step)
        if one.startswith(other[:guess]):
            low = guess
            break
        high, step = guess, step * _WIDER
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


class Beginnings(Generic[Item, Made]):
    """The last prompts of conversations, least recently used out first, bounded in bytes. Safe to use from several
    threads; what is kept has to be left as it is.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[int, tuple[Sequence[Item], Made, int]] = OrderedDict()
        self._numbers = count()
        self._lock = Lock()
        self.bytes = 0

    def longest(self, items: Sequence[Item]) -> tuple[int, Made] | None:
        """The number of what was made of the sequence that has most of the first ``items``, and that itself."""
        with self._lock:
            kept = list(self._kept.items())
        best, found = 0, None
        for number, (known, made, _) in reversed(kept):
            if (same := same_items(items, known)) > best:
                best, found = same, (number, made)
        return found

    def keep(self, items: Sequence[Item], made: Made, size: int, instead_of: int | None = None) -> None:
        """Keep what was ``made`` of ``items``, of about ``size`` bytes; drop ``instead_of``, which it went on from."""
        with self._lock:
            self._drop(instead_of)
            if size > self._limit:
                return
            self._kept[next(self._numbers)] = items, made, size
            self.bytes += size
            while self.bytes > self._limit:
                self._drop(next(iter(self._kept)))

    def _drop(self, number: int | None) -> None:
        dropped = None if number is None else self._kept.pop(number, None)
        if dropped is not None:
            self.bytes -= dropped[2]
