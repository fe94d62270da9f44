"""What conversations that grow have behind them: the work on their earlier prompts, to go on from.

A harness sends the whole conversation with every turn. Each stage of writing a prompt keeps what it made of the last
one, and goes on from there as far as what it is given now begins with what it was given then.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Generic, TypeVar

from singletree.conversation import Part, ToolResult, Turn

Item = TypeVar("Item")
Made = TypeVar("Made")

_STEP = 256
_WIDER = 16


def same_items(
    one: Sequence[Item], other: Sequence[Item], same: Callable[[Item, Item], bool] = operator.eq
) -> int:
    """How many items both begin with; ``same`` is asked of two that are not the same object."""
    pairs = zip(one, other, strict=False)
    differs = (at for at, (a, b) in enumerate(pairs) if a is not b and not same(a, b))
    return next(differs, min(len(one), len(other)))


def is_same_turn(one: Turn, other: Turn) -> bool:
    """Whether two turns are the same in all that they carry: ``==`` does not look at what is ``extra``."""
    return one == other and one.extra == other.extra and all(map(_same_extras, one.parts, other.parts))


def _same_extras(one: Part, other: Part) -> bool:
    if one is other:
        return True
    inner = one.parts if isinstance(one, ToolResult) else ()
    others = other.parts if isinstance(other, ToolResult) else ()
    return one.extra == other.extra and all(map(_same_extras, inner, others))


def same_objects(one: Sequence[object], other: Sequence[object]) -> int:
    """How many objects both begin with: the very same, not others that are equal to them."""
    differs = (at for at, same in enumerate(map(operator.is_, one, other)) if not same)
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


@dataclass(frozen=True, slots=True)
class _Kept(Generic[Item, Made]):
    items: Sequence[Item]
    made: Made
    size: int
    needed: int


class Beginnings(Generic[Item, Made]):
    """The last prompts of conversations, least recently used out first, bounded in bytes. Safe to use from several
    threads; what is kept has to be left as it is.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[int, _Kept[Item, Made]] = OrderedDict()
        self._numbers = count()
        self._lock = Lock()
        self.bytes = 0

    def longest(self, items: Sequence[Item]) -> tuple[Made, int | None] | None:
        """What was made of the sequence that has most of the first ``items``; and its number, where ``items`` go on
        from it and what is made of them may take its place.
        """
        with self._lock:
            kept = list(self._kept.items())
        best: tuple[Made, int | None] | None = None
        most = 0
        for number, one in reversed(kept):
            if (same := same_items(items, one.items)) > most:
                most, best = same, (one.made, number if same >= one.needed else None)
        return best

    def keep(
        self, items: Sequence[Item], made: Made, size: int, *, needed: int, instead_of: int | None = None
    ) -> None:
        """Keep what was ``made`` of ``items``, of about ``size`` bytes; drop ``instead_of``, which it went on from.

        Args:
            needed: how many of ``items`` another sequence must begin with to go on from them.
        """
        with self._lock:
            self._drop(instead_of)
            if size > self._limit:
                return
            self._kept[next(self._numbers)] = _Kept(items, made, size, needed)
            self.bytes += size
            while self.bytes > self._limit:
                self._drop(next(iter(self._kept)))

    def _drop(self, number: int | None) -> None:
        dropped = None if number is None else self._kept.pop(number, None)
        if dropped is not None:
            self.bytes -= dropped.size
