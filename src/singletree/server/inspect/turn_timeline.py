"""When a turn was written: the times of its tokens, and its segments (reasoning, text, calls, markers between them).

Times are milliseconds from the arrival of the request. No text is kept, only lengths.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from singletree.events import (
    ArgumentsDelta,
    Event,
    Markup,
    ReasoningDelta,
    TextDelta,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
)

_KINDS: dict[type, str] = {
    TextDelta: "text",
    ReasoningDelta: "reasoning",
    Markup: "markup",
    ToolCallStart: "call",
    ArgumentsDelta: "call",
    ToolCallEnd: "call",
    ToolCallBroken: "call",
}
_MOST_SEGMENTS = 2000
SEGMENT_BYTES = 150


@dataclass(slots=True)
class TurnSegment:
    """A run of tokens of one kind.

    Attributes:
        kind: ``reasoning``, ``text``, ``call``, ``markup``; ``more`` for the rest of a turn with too many.
        start, end: in milliseconds.
        tokens: the number of its tokens.
        chars: the length of what the model wrote, in characters.
        call: the index of the call; None for other kinds.
    """

    kind: str
    start: float
    end: float
    tokens: int = 0
    chars: int = 0
    call: int | None = None


@dataclass(slots=True)
class CallTimes:
    """One call of the turn.

    Attributes:
        index, id, name: as the client gets them.
        start: when its first token came, in milliseconds.
        dispatched: when it was complete; None before that.
        is_complete: whether it ended as a call.
        result: when the request that brings its result arrived, in milliseconds; None before that.
        is_error: whether the result is an error; None before it is known.
    """

    index: int
    id: str
    name: str
    start: float
    dispatched: float | None = None
    is_complete: bool = False
    result: float | None = None
    is_error: bool | None = None


@dataclass(slots=True)
class TurnTimeline:
    """Follows a turn token by token.

    Attributes:
        began: when the request arrived, on the clock of ``time.perf_counter``.
        token_ms: the time of each token, in milliseconds.
        segments: what the tokens are, in their order.
        calls: the calls, by their indices.
    """

    began: float
    token_ms: array[float] = field(default_factory=lambda: array("f"))
    segments: list[TurnSegment] = field(default_factory=list)
    calls: dict[int, CallTimes] = field(default_factory=dict)
    _waiting: int = 0
    _since: float | None = None

    def now(self) -> float:
        """Return the time in milliseconds."""
        return (time.perf_counter() - self.began) * 1000

    def take(self, token_ids: Sequence[int], events: Iterable[Event]) -> None:
        """Record tokens (none at the end) and the events that they made certain."""
        now = self.now()
        if token_ids:
            self.token_ms.extend([now] * len(token_ids))
            self._waiting += len(token_ids)
            if self._since is None:
                self._since = now
        for event in events:
            self._add(event, now)

    @property
    def bytes(self) -> int:
        """Return the approximate memory in bytes."""
        return 4 * len(self.token_ms) + SEGMENT_BYTES * (len(self.segments) + len(self.calls))

    def _add(self, event: Any, now: float) -> None:
        kind = _KINDS.get(type(event))
        if kind is None:
            return
        call = event.index if kind == "call" else None
        start = now if self._since is None else self._since
        last = self.segments[-1] if self.segments else None
        if type(event) is ToolCallStart:
            if last is not None and last.kind == "markup":
                # The marker before a call belongs to it: its first token is the call's first token.
                last.kind, last.call, start = "call", call, last.start
            self.calls[event.index] = CallTimes(event.index, event.id, event.name, start)
        elif type(event) is ToolCallEnd and event.index in self.calls:
            self.calls[event.index].dispatched, self.calls[event.index].is_complete = now, True
        if last is None or (last.kind, last.call) != (kind, call):
            if len(self.segments) >= _MOST_SEGMENTS:
                last = self.segments[-1]
                last.kind, last.call = "more", None
            else:
                last = TurnSegment(kind, start, now, call=call)
                self.segments.append(last)
        last.end = now
        last.tokens += self._waiting
        last.chars += len(event.raw)
        self._waiting, self._since = 0, None

    def parts(self) -> list[tuple[TurnSegment, int, int]]:
        """Return (segment, first token, end) for each segment, so that they cover all tokens."""
        found, at = [], 0
        for segment in self.segments:
            found.append((segment, at, at + segment.tokens))
            at += segment.tokens
        if at < len(self.token_ms):
            # Tokens that made no event: the one that ended the turn, or a marker that is not yet certain.
            end = self.token_ms[-1]
            found.append((TurnSegment("markup", self.token_ms[at], end), at, len(self.token_ms)))
        return found
