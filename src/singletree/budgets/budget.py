"""A budget: how many tokens and seconds may be spent, and how often a call may be repeated in vain."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from singletree.conversation import ToolCall, ToolResult, Turn
from singletree.server.sessions.step import Cost

UNITS = {"prefill": "tokens", "generated": "tokens", "seconds": "s"}
"""What can be spent, and its unit for messages."""

LOOPS = "loops"
_FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kMG]?)")
_LONGEST_PERIOD = 8
"""Calls that a loop may have before it begins again."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that may be spent, and the flag or header that sets it."""

    most: float
    source: str


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits by what they limit: ``prefill``, ``generated``, ``seconds``, ``loops``."""

    limits: dict[str, Limit] = field(default_factory=dict)

    def lowered(self, other: Budget) -> Budget:
        """Return this budget with those limits of ``other`` that are lower, or for which this one has none."""
        lower = {
            name: limit
            for name, limit in other.limits.items()
            if name not in self.limits or limit.most < self.limits[name].most
        }
        return Budget({**self.limits, **lower})

    def used(self, spent: Cost) -> Iterator[tuple[str, float, Limit]]:
        """Yield for each limit but that of loops what it limits, how much of it was spent, and the limit."""
        values = {"prefill": spent.prefilled, "generated": spent.generated, "seconds": spent.seconds}
        for name, limit in self.limits.items():
            if name in values:
                yield name, values[name], limit


def read_budget(text: str, source: str, *, loops: bool = True) -> Budget:
    """Return the budget that ``text`` describes, such as ``prefill=2M,generated=200k,seconds=3600,loops=5``.

    Args:
        source: the flag or header, for messages.
        loops: whether it may limit loops.

    Raises ValueError with a message for the user.
    """
    limits: dict[str, Limit] = {}
    known = [*UNITS, *([LOOPS] if loops else [])]
    for entry in filter(None, map(str.strip, text.split(","))):
        name, _, number = entry.partition("=")
        found = _NUMBER.fullmatch(number.strip())
        if name.strip() not in known or found is None:
            raise ValueError(
                f"{source}: {entry[:64]!a} is not a limit; give some of {'=N, '.join(known)}=N, separated by commas; "
                "a number may end in k, M or G"
            )
        limits[name.strip()] = Limit(float(found[1]) * _FACTORS[found[2]], source)
    return Budget(limits)


Round = tuple[str, str, tuple[Any, ...]]
"""A call and its result: the name of the tool, the arguments, and the parts of the result."""


def rounds_of(turns: Sequence[Turn]) -> list[Round]:
    """Return the calls of a conversation that have results, in order, with their results."""
    calls = {
        part.id: part
        for turn in turns
        if turn.role == "assistant"
        for part in turn.parts
        if isinstance(part, ToolCall)
    }
    return [
        (call.name, call.arguments, part.parts)
        for turn in turns
        for part in turn.parts
        if isinstance(part, ToolResult) and (call := calls.get(part.call_id)) is not None
    ]


def repetitions(rounds: Sequence[Round]) -> int:
    """Return how many times the last rounds are the same: one call, or some calls in the same order."""
    most = min(len(rounds), 1)
    for period in range(1, min(_LONGEST_PERIOD, len(rounds) // 2) + 1):
        last, count, end = rounds[-period:], 1, len(rounds) - period
        while end >= period and rounds[end - period : end] == last:
            count, end = count + 1, end - period
        most = max(most, count)
    return most
