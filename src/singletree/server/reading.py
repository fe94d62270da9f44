"""The tokens of one generation to events: pieces of text, stop strings, the parser."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from singletree.events import (
    ArgumentsDelta,
    Event,
    FinishReason,
    Markup,
    ReasoningDelta,
    TextDelta,
    ToolCallEnd,
    ToolCallStart,
)
from singletree.server.identity import CallIds
from singletree.server.stop import Piece, StopStrings


class Pieces(Protocol):
    """What ``prompts.pieces.PieceStream`` is to a reader: token ids in, (text, is it a special token) out."""

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        """The text that is complete with these tokens."""
        ...

    def flush(self) -> list[Piece]:
        """What was held back, at the end."""
        ...


class Reads(Protocol):
    """What ``parsing.parser.Parser`` is to a reader."""

    in_reasoning: bool

    def feed(self, text: str, special: bool = False) -> list[Event]:
        """The events that are certain with this text."""
        ...

    def close(self) -> list[Event]:
        """The last events."""
        ...


Tap = Callable[[Sequence[int], list[Event]], None]
"""Gets each token as it is read, up to the end of the turn, with the events that it made certain."""


class Reader:
    """Reads one turn, token by token.

    Attributes:
        tokens: how many the model wrote.
        reasoning_tokens: how many of them while reasoning was open; its closer counts, its opener does not.
        ended: set once the turn is over though the model may go on: a stop string, or the last call allowed.
        stop_sequence: the stop string that ended it.
    """

    def __init__(
        self,
        parser: Reads,
        pieces: Pieces,
        ids: CallIds,
        *,
        stop_token_ids: Collection[int] = (),
        stops: Sequence[str] = (),
        most_calls: int | None = None,
        tap: Tap | None = None,
    ) -> None:
        self._parser = parser
        self._tap = tap
        self._pieces = pieces
        self._ids = ids
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stops = StopStrings(stops) if any(stops) else None
        self._calls_left = most_calls
        self.tokens = 0
        self.reasoning_tokens = 0
        self.ended: FinishReason | None = None
        self.stop_sequence: str | None = None

    def feed(self, token_ids: Sequence[int]) -> list[Event]:
        """The events that are certain with these tokens. Tokens that end a turn say nothing."""
        self.tokens += len(token_ids)
        if len(token_ids) == 1:
            return self._token(token_ids)
        events: list[Event] = []
        for at in range(len(token_ids)):
            events += self._token(token_ids[at : at + 1])
            if self.ended is not None:
                break
        return merged(events)

    def close(self) -> list[Event]:
        """The generation is over: what was held back comes out."""
        if self.ended == "stop":
            return []
        events = [] if self.ended else self._read(self._pieces.flush())
        if self._stops is not None:
            events += self._parse(self._stops.close())
        last = merged(self._checked([*events, *self._parser.close()]))
        if self._tap is not None:
            self._tap((), last)
        return last

    def _token(self, token: Sequence[int]) -> list[Event]:
        if self._parser.in_reasoning:
            self.reasoning_tokens += 1
        ends = token[0] in self._stop_token_ids
        events = [] if ends else self._read(self._pieces.feed(token))
        if self._tap is not None:
            self._tap(token, events)
        return events

    def _read(self, pieces: list[Piece]) -> list[Event]:
        if self._stops is not None:
            pieces = self._stops.feed(pieces)
            if self._stops.matched is not None:
                self.ended, self.stop_sequence = "stop_sequence", self._stops.matched
        return self._checked(self._parse(pieces))

    def _parse(self, pieces: list[Piece]) -> list[Event]:
        if len(pieces) == 1:
            return self._parser.feed(*pieces[0])
        return [event for piece in pieces for event in self._parser.feed(*piece)]

    def _checked(self, events: list[Event]) -> list[Event]:
        """Ids settled, and nothing after the last call that is allowed."""
        for at, event in enumerate(events):
            kind = type(event)
            if kind is TextDelta or kind is ReasoningDelta or kind is ArgumentsDelta or kind is Markup:
                continue
            if isinstance(event, ToolCallStart):
                self._ids.settle(event)
            elif kind is ToolCallEnd and self._calls_left is not None:
                self._calls_left -= 1
                if self._calls_left == 0:
                    self.ended, self.stop_sequence = "stop", None
                    return events[: at + 1]
        return events


def merged(events: list[Event]) -> list[Event]:
    """``events`` with neighbours of one kind as one: several tokens that came together leave together."""
    if len(events) < 2:
        return events
    out = [events[0]]
    for event in events[1:]:
        last = out[-1]
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            out[-1] = TextDelta(last.text + event.text, last.raw + event.raw)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + event.text, last.raw + event.raw)
        elif isinstance(event, ArgumentsDelta) and isinstance(last, ArgumentsDelta):
            out[-1] = ArgumentsDelta(last.index, last.json + event.json, last.raw + event.raw)
        else:
            out.append(event)
    return out
