"""A history that is too long for the window, without a piece of its middle.

https://platform.openai.com/docs/api-reference/responses/create#responses-create-truncation. The client sends the whole
history every time, and a prompt must go on from the one before it. So a history is not cut as closely as possible,
which would move the cut with every turn, but at one of a few places that depend only on what stands before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from singletree.conversation import Conversation, Part, Reasoning, Text, ToolCall, ToolResult, Turn


class Cut(NamedTuple):
    """The turns from ``start`` up to ``end`` are left out."""

    start: int
    end: int

    def of(self, conversation: Conversation) -> Conversation:
        """What is left of ``conversation``."""
        turns = conversation.turns
        return Conversation((*turns[: self.start], *turns[self.end :]), conversation.tools)


def first_fitting(cuts: Sequence[Cut], fits: Callable[[Cut], bool]) -> Cut | None:
    """The smallest of ``cuts`` that is enough, else the largest; None where there is none. Asks few times."""
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(cuts[middle]) else (middle + 1, high)
    return cuts[low] if cuts else None


def cuts(turns: Sequence[Turn], step: int) -> list[Cut]:
    """Where ``turns`` may be cut, the smallest cut first, each about ``step`` characters larger than the one before.

    What stands before the first answer (the instructions, the task) stays, and so does the end. The results of calls
    go or stay with their calls.
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
    """The turns from ``start`` on that no call from before them is answered in or behind."""
    answers: dict[str, int] = {}
    answered = []  # by turn, the last one first: where its calls have their answers
    for i in range(len(turns) - 1, start - 1, -1):
        answered.append(max((answers.get(call.id, i) for call in turns[i].tool_calls), default=i))
        answers |= {part.call_id: i for part in turns[i].parts if isinstance(part, ToolResult)}
    before = accumulate(reversed(answered), max, initial=start - 1)
    within = range(start, len(turns))
    return [i for i, last in zip(within, before, strict=False) if last < i and turns[i].role != "tool"]


def _size(part: Part) -> int:
    """Its characters, more or less: what tells pictures and the like takes little room in the text."""
    if isinstance(part, Text | Reasoning):
        return len(part.text)
    if isinstance(part, ToolCall):
        return len(part.arguments)
    return sum(map(_size, part.parts)) if isinstance(part, ToolResult) else 0
