"""When a turn was written, and what its client was sent.

A turn has the times of its tokens and its segments (reasoning, text, calls, markers between them), without texts. The
client was sent events, each with its name, size and time, and with ``--inspect-content`` its data. Times are
milliseconds from the arrival of the request.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import zstandard

from singletree.errors import SingletreeError
from singletree.events import (
    ArgumentsDelta,
    Event,
    Finished,
    Markup,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from singletree.protocols.answer import EventEncoder, Frame

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
_BLOCK_BYTES = 64 * 1024
_MOST_EVENTS = 100_000
_EVENT_BYTES = 14
_COMPRESSOR = zstandard.ZstdCompressor(level=1)


@dataclass(slots=True)
class TurnSegment:
    """A run of tokens of one kind: ``reasoning``, ``text``, ``markup``, the ``call`` with an index, or ``more`` for the
    rest of a turn with too many. Times are in milliseconds; ``chars`` is the length of what the model wrote.
    """

    kind: str
    start: float
    end: float
    tokens: int = 0
    chars: int = 0
    call: int | None = None


@dataclass(slots=True)
class CallTimes:
    """One call of the turn, as the client gets it. Times are in milliseconds.

    Attributes:
        start: when its first token came; ``dispatched``: when it was complete.
        result: when the request that brings its result arrived; ``is_error``: whether that is an error.
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
    """Follows a turn token by token, from ``began`` on the clock of ``perf_counter``."""

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


@dataclass(slots=True)
class WireBudget:
    """What the events of all turns that run may take together, in bytes, and what they take."""

    limit: int
    used: int = 0


class WireRecord:
    """The events of one answer.

    Args:
        keeps_data: whether the data is kept, compressed, up to ``limit`` bytes.
        budget: shared with the other answers that run.

    Attributes:
        dropped: how many events, or the data of how many, was not kept.
    """

    def __init__(self, *, keeps_data: bool, limit: int, budget: WireBudget | None = None) -> None:
        self._budget = WireBudget(limit) if budget is None else budget
        self.keeps_data = keeps_data
        self._limit = limit
        self._ms = array("f")
        self._sizes, self._tokens = array("I"), array("I")
        self._choices, self._numbers = array("H"), array("H")
        self._names: dict[str, int] = {}
        self._blocks: list[bytes] = []
        self._pending: list[bytes] = []
        self._pending_bytes = self._with_data = 0
        self.bytes = self.dropped = 0

    def add(self, frames: Iterable[Frame], ms: float, token: int, choice: int = 0) -> None:
        """Record ``frames``, sent at ``ms`` when ``token`` tokens were generated."""
        for name, data in frames:
            if len(self._ms) >= _MOST_EVENTS or self._budget.used >= self._budget.limit:
                self.dropped += 1
                continue
            self._ms.append(ms)
            self._sizes.append(len(data))
            self._tokens.append(token)
            self._choices.append(min(choice, 65535))
            self._numbers.append(self._names.setdefault(name, len(self._names)) & 0xFFFF)
            self._grow(_EVENT_BYTES)
            if self.keeps_data and self._with_data == len(self._ms) - 1:
                self._keep(data)

    def _keep(self, data: bytes) -> None:
        if self.bytes + self._pending_bytes + len(data) > self._limit:
            self.dropped += 1
            return
        self._with_data += 1
        self._pending.append(data if b"\n" not in data else data.replace(b"\n", b" "))
        self._pending_bytes += len(data)
        if self._pending_bytes >= _BLOCK_BYTES:
            self.compress()

    def compress(self) -> None:
        if self._pending:
            # The data of an event is one line; line breaks between the values of a body become spaces.
            self._blocks.append(_COMPRESSOR.compress(b"\n".join(self._pending)))
            self._grow(len(self._blocks[-1]))
            self._pending, self._pending_bytes = [], 0

    def _grow(self, size: int) -> None:
        self.bytes += size
        self._budget.used += size

    def close(self) -> None:
        """End the record: the answer is over, and others may take what it took of the budget."""
        self.compress()
        self._budget.used -= self.bytes
        self._budget = WireBudget(0)

    def events(self) -> Iterator[dict[str, Any]]:
        names = list(self._names)
        data = self._data()
        for at, ms in enumerate(self._ms):
            sent = next(data, None) if self.keeps_data else None
            yield {
                "ms": round(ms, 3),
                "event": names[self._numbers[at]] if self._numbers[at] < len(names) else "",
                "bytes": self._sizes[at],
                "token": self._tokens[at],
                "choice": self._choices[at],
                "data": None if sent is None else sent.decode("utf-8", "replace"),
            }

    def _data(self) -> Iterator[bytes]:
        for block in self._blocks:
            yield from zstandard.decompress(block).split(b"\n")
        yield from self._pending


class InspectedEncoder:
    """An encoder that records what another one makes, and when.

    ``logprobs`` gets the log-probability of each token of the first choice, if the client asked for them.
    """

    def __init__(
        self,
        encoder: EventEncoder,
        wire: WireRecord,
        timeline: TurnTimeline,
        choice: int,
        logprobs: array[float] | None,
    ) -> None:
        self._encoder = encoder
        self._wire = wire
        self._timeline = timeline
        self._choice = choice
        self._logprobs = logprobs

    def _record(self, frames: list[Frame]) -> list[Frame]:
        if frames:
            timeline = self._timeline
            self._wire.add(frames, timeline.now(), len(timeline.token_ms), self._choice)
        return frames

    def start(self) -> list[Frame]:
        return self._record(self._encoder.start())

    def keep_alive(self) -> list[Frame]:
        return self._record(self._encoder.keep_alive())

    def feed(self, event: Event) -> list[Frame]:
        if self._logprobs is not None and isinstance(event, TokenLogprobs):
            add_logprobs(self._logprobs, event.tokens)
        return self._record(self._encoder.feed(event))

    def end(self, finished: Finished) -> list[Frame]:
        return self._record(self._encoder.end(finished))

    def tail(self, usage: Usage) -> list[Frame]:
        return self._record(self._encoder.tail(usage))

    def fail(self, error: SingletreeError) -> list[Frame]:
        return self._record(self._encoder.fail(error))

    def side_event(self, name: str, fields: Mapping[str, Any]) -> list[Frame]:
        return self._record(self._encoder.side_event(name, fields))


def add_logprobs(logprobs: array[float], tokens: Iterable[Any]) -> None:
    """Append the log-probability of each token; NaN where the engine did not report it."""
    logprobs.extend(float("nan") if token.logprob is None else token.logprob for token in tokens)
