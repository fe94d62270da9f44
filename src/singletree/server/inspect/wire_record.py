"""What a client was sent: the name, the size and the time of each event, and with ``--inspect-content`` its data."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import zstandard

from singletree.errors import SingletreeError
from singletree.events import Event, Finished, TokenLogprobs, Usage
from singletree.protocols.answer import EventEncoder, Frame
from singletree.server.inspect.turn_timeline import TurnTimeline

_BLOCK_BYTES = 64 * 1024
_MOST_EVENTS = 100_000
_EVENT_BYTES = 14
_COMPRESSOR = zstandard.ZstdCompressor(level=1)


@dataclass(slots=True)
class WireBudget:
    """What the events of all turns that run may take together, in bytes, and what they take."""

    limit: int
    used: int = 0


class WireRecord:
    """The events of one answer.

    Args:
        keeps_data: whether the data is kept, compressed.
        limit: most bytes of compressed data.
        budget: shared with the other answers that run; None for no such bound.

    Attributes:
        dropped: how many events, or the data of how many, was not kept.
    """

    __slots__ = (
        "_blocks",
        "_budget",
        "_choices",
        "_limit",
        "_ms",
        "_names",
        "_numbers",
        "_pending",
        "_pending_bytes",
        "_sizes",
        "_tokens",
        "_with_data",
        "bytes",
        "dropped",
        "keeps_data",
    )

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
        """Compress the data that is not yet."""
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
        """Yield the events as JSON values."""
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

    Args:
        encoder: encodes the protocol's events.
        wire: takes the frames.
        timeline: the turn's clock and tokens.
        choice: the index of the choice.
        logprobs: gets the log-probability of each token of the first choice, if the client asked for them.
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
        """Encode the start, as the inner encoder does."""
        return self._record(self._encoder.start())

    def keep_alive(self) -> list[Frame]:
        """Encode a keep-alive, as the inner encoder does."""
        return self._record(self._encoder.keep_alive())

    def feed(self, event: Event) -> list[Frame]:
        """Encode an event, as the inner encoder does."""
        if self._logprobs is not None and isinstance(event, TokenLogprobs):
            add_logprobs(self._logprobs, event.tokens)
        return self._record(self._encoder.feed(event))

    def end(self, finished: Finished) -> list[Frame]:
        """Encode the end, as the inner encoder does."""
        return self._record(self._encoder.end(finished))

    def tail(self, usage: Usage) -> list[Frame]:
        """Encode the end of the stream, as the inner encoder does."""
        return self._record(self._encoder.tail(usage))

    def fail(self, error: SingletreeError) -> list[Frame]:
        """Encode an error as the end, as the inner encoder does."""
        return self._record(self._encoder.fail(error))

    def side_event(self, name: str, fields: Mapping[str, Any]) -> list[Frame]:
        """Encode a side event, as the inner encoder does."""
        return self._record(self._encoder.side_event(name, fields))


def add_logprobs(logprobs: array[float], tokens: Iterable[Any]) -> None:
    """Append the log-probability of each token; NaN where the engine did not report it."""
    logprobs.extend(float("nan") if token.logprob is None else token.logprob for token in tokens)
