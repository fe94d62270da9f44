"""Truncation: remove part of the middle of a history that is too long for the context window.

https://platform.openai.com/docs/api-reference/responses/create#responses-create-truncation. The client sends the whole
history every time, and a prompt must go on from the one before it. So a history is not cut as little as possible,
which would move the cut with every turn, but at one of a few places that depend only on the turns before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from singletree.conversation import Conversation, Part, Reasoning, Text, ToolCall, ToolResult, Turn


class Cut(NamedTuple):
    """A cut that leaves out the turns from ``start`` up to, but without, ``end``."""

    start: int
    end: int

    def of(self, conversation: Conversation) -> Conversation:
        """Return ``conversation`` without the turns that are cut out."""
        turns = conversation.turns
        return Conversation((*turns[: self.start], *turns[self.end :]), conversation.tools)


def first_fitting(cuts: Sequence[Cut], fits: Callable[[Cut], bool]) -> Cut | None:
    """Return the smallest cut that fits, else the largest; None if there are no cuts.

    Calls ``fits``, which is slow, as often as a binary search does.
    """
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(cuts[middle]) else (middle + 1, high)
    return cuts[low] if cuts else None


def possible_cuts(turns: Sequence[Turn], step: int) -> list[Cut]:
    """Return the possible cuts of ``turns``, the smallest first, each about ``step`` characters larger than the last.

    The turns before the first answer (the instructions, the task) stay, and so does the end. Results are cut with their
    calls.
    """
    start = next((i for i, turn in enumerate(turns) if turn.role == "assistant"), None)
    if start is None:
        start = min(len(turns), 1 + next((i for i, t in enumerate(turns) if t.role == "user"), len(turns)))
    ends = [i for i in _whole(turns, start) if i > start]
    found, left_out, wanted = [], 0, step
    for before, end in pairwise([start, *ends]):
        left_out += sum(_size(part) for turn in turns[before:end] for part in turn.parts)
        if left_out >= wanted or end == ends[-1]:
            found.append(Cut(start, end))
            wanted = left_out + step
    return found


def _whole(turns: Sequence[Turn], start: int) -> list[int]:
    """Return the turns, from ``start`` on, before which a cut can end: no earlier call is answered there or later."""
    answers: dict[str, int] = {}
    answered = []  # by turn, the last one first: the last turn that answers one of its calls
    for i in range(len(turns) - 1, start - 1, -1):
        answered.append(max((answers.get(call.id, i) for call in turns[i].tool_calls), default=i))
        answers |= {part.call_id: i for part in turns[i].parts if isinstance(part, ToolResult)}
    before = accumulate(reversed(answered), max, initial=start - 1)
    within = range(start, len(turns))
    return [i for i, last in zip(within, before, strict=False) if last < i and turns[i].role != "tool"]


def _size(part: Part) -> int:
    """Return about how many characters the part has; pictures and the like take little room in the text."""
    if isinstance(part, Text | Reasoning):
        return len(part.text)
    if isinstance(part, ToolCall):
        return len(part.arguments)
    return sum(map(_size, part.parts)) if isinstance(part, ToolResult) else 0
