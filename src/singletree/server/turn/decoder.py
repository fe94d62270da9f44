"""Decodes the tokens of one generation into events: detokenizer, stop strings, parser."""

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
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
)
from singletree.server.turn.ids import TurnCallIds
from singletree.server.turn.stop_strings import StopStrings, TextPiece


class PieceDecoder(Protocol):
    """The detokenizer's interface: token ids in, pairs of text and whether it is a special token out."""

    def feed(self, token_ids: Sequence[int]) -> list[TextPiece]:
        """Return the text that these tokens complete."""
        ...

    def flush(self) -> list[TextPiece]:
        """Return the text that was held back, at the end."""
        ...


class EventParser(Protocol):
    """The parser's interface, implemented by ``parsing.parser.Parser``."""

    in_reasoning: bool

    def feed(self, text: str, special: bool = False) -> list[Event]:
        """Return the events that are certain after this text."""
        ...

    def close(self) -> list[Event]:
        """Return the last events."""
        ...


Tap = Callable[[Sequence[int], list[Event]], None]
"""Called with each token that is decoded, up to the end of the turn, and the events that it made certain."""


class TurnDecoder:
    """Decodes one turn, token by token.

    Args:
        parser: turns text into events.
        detokenizer: turns token ids into text.
        ids: gives each call an id that is unique in the conversation.
        stop_token_ids: tokens that end the turn and are not part of it.
        stops: strings that end the turn.
        includes_stop: whether the stop string is part of the turn.
        min_tokens: number of tokens at the beginning whose text is not searched for ``stops``.
        max_calls: largest number of calls in the turn; None for any number.
        breaks_cut_call: whether a call that the end of the turn cuts becomes a broken one, which is sent as text.
        tap: called with each token and its events.

    Attributes:
        tokens: number of tokens that the model generated.
        reasoning_tokens: number of tokens while reasoning was open; its closer counts, its opener does not.
        ended: set when the turn is over although the model may continue: a stop string, or the last call allowed.
        stop_sequence: the stop string that ended the turn.
    """

    def __init__(
        self,
        parser: EventParser,
        detokenizer: PieceDecoder,
        ids: TurnCallIds,
        *,
        stop_token_ids: Collection[int] = (),
        stops: Sequence[str] = (),
        includes_stop: bool = False,
        min_tokens: int = 0,
        max_calls: int | None = None,
        breaks_cut_call: bool = False,
        tap: Tap | None = None,
    ) -> None:
        self._parser = parser
        self._breaks_cut_call = breaks_cut_call
        self._open_call: int | None = None
        self._tap = tap
        self._detokenizer = detokenizer
        self._ids = ids
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stops = StopStrings(stops, includes=includes_stop) if any(stops) else None
        self._unwatched = min_tokens
        self._calls_left = max_calls
        self.tokens = 0
        self.reasoning_tokens = 0
        self.ended: FinishReason | None = None
        self.stop_sequence: str | None = None

    def add_tap(self, tap: Tap) -> None:
        """Call ``tap`` as well, after the tap that is there, from the next token on."""
        first = self._tap
        if first is None:
            self._tap = tap
            return

        def both(token_ids: Sequence[int], events: list[Event]) -> None:
            first(token_ids, events)
            tap(token_ids, events)

        self._tap = both

    def feed(self, token_ids: Sequence[int]) -> list[Event]:
        """Return the events that are certain after these tokens. Tokens that end the turn have no text."""
        self.tokens += len(token_ids)
        if len(token_ids) == 1:
            return self._token(token_ids)
        events: list[Event] = []
        for at in range(len(token_ids)):
            events += self._token(token_ids[at : at + 1])
            if self.ended is not None:
                break
        return merge_deltas(events)

    def only_closes(self, token_ids: Sequence[int]) -> bool:
        """Return whether tokens behind the last call that is allowed contain nothing but its closing markers."""
        for token in token_ids:
            if token in self._stop_token_ids:
                return True
            for text, special in self._detokenizer.feed((token,)):
                for event in self._parser.feed(text, special):
                    is_blank = isinstance(event, TextDelta) and not event.text.strip()
                    if not (isinstance(event, Markup) or is_blank):
                        return False
        return True

    def close(self) -> list[Event]:
        """End the generation and return the events that were held back."""
        if self.ended == "stop":
            return []
        events = [] if self.ended else self._decode(self._detokenizer.flush())
        if self._stops is not None:
            events += self._parse(self._stops.close())
        last = merge_deltas(self._checked([*events, *self._parser.close()]))
        if self._breaks_cut_call and self._open_call is not None:
            last.append(ToolCallBroken(self._open_call, ""))
        if self._tap is not None:
            self._tap((), last)
        return last

    def _token(self, token: Sequence[int]) -> list[Event]:
        if self._parser.in_reasoning:
            self.reasoning_tokens += 1
        ends = token[0] in self._stop_token_ids
        events = [] if ends else self._decode(self._detokenizer.feed(token))
        if self._tap is not None:
            self._tap(token, events)
        return events

    def _decode(self, pieces: list[TextPiece]) -> list[Event]:
        if self._unwatched > 0:
            self._unwatched -= 1
        elif self._stops is not None:
            pieces = self._stops.feed(pieces)
            if self._stops.matched is not None:
                self.ended, self.stop_sequence = "stop_sequence", self._stops.matched
        return self._checked(self._parse(pieces))

    def _parse(self, pieces: list[TextPiece]) -> list[Event]:
        if len(pieces) == 1:
            return self._parser.feed(*pieces[0])
        return [event for piece in pieces for event in self._parser.feed(*piece)]

    def _checked(self, events: list[Event]) -> list[Event]:
        """Make the ids of calls unique, and cut ``events`` behind the last call that is allowed."""
        for at, event in enumerate(events):
            kind = type(event)
            if kind is TextDelta or kind is ReasoningDelta or kind is ArgumentsDelta or kind is Markup:
                continue
            if isinstance(event, ToolCallStart):
                self._ids.ensure_unique(event)
                self._open_call = event.index
            elif kind is ToolCallBroken:
                self._open_call = None
            elif kind is ToolCallEnd:
                self._open_call = None
                if self._calls_left is not None:
                    self._calls_left -= 1
                    if self._calls_left == 0:
                        self.ended, self.stop_sequence = "stop", None
                        return events[: at + 1]
        return events


def merge_deltas(events: list[Event]) -> list[Event]:
    """Merge neighbouring deltas of one kind, so that tokens which came together leave together."""
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
