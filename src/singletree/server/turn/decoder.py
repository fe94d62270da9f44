"""Decodes a generation's tokens into events: detokenizer, stop strings, parser; and log-probabilities or ids beside."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from singletree import request_limits
from singletree.conversation import Request
from singletree.engines.engine import Chunk, LogprobRow
from singletree.errors import InvalidRequest
from singletree.events import (
    ArgumentsDelta,
    Event,
    FinishReason,
    Markup,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    Token,
    TokenLogprobs,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
)
from singletree.prompts.tokenizer.detokenizer import Detokenizer
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.ids import TurnCallIds
from singletree.server.models.model import Model
from singletree.server.turn.stop_strings import StopStrings, TextPiece


class EventParser(Protocol):
    """The parser's interface, implemented by ``parsing.parser.Parser``."""

    in_reasoning: bool

    def continues(self, text: str) -> bool:
        """Return whether ``text`` would do nothing but continue the open span: text, reasoning or arguments."""

    def feed(self, text: str, special: bool = False) -> list[Event]:
        """Return the events that are certain after this text."""

    def close(self) -> list[Event]: ...


Tap = Callable[[Sequence[int], list[Event]], None]
"""Called with the tokens that are decoded, up to the end of the turn, and the events that they made certain."""


class DecodedTurn:
    """What is known of a turn that is generated.

    Attributes:
        token_ids: the tokens that the engine generated.
        length: how many of them were decoded: those after the end of the turn are not.
        events: the events so far.
        reasoning_ends: for each span of reasoning that ended, how many tokens were decoded then.
        is_reasoning: whether a span of reasoning with any text is open.
    """

    __slots__ = ("events", "is_reasoning", "length", "reasoning_ends", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("I")
        self.length = 0
        self.events: list[Event] = []
        self.reasoning_ends: list[int] = []
        self.is_reasoning = False

    def end_reasoning(self) -> None:
        self.is_reasoning = False
        self.reasoning_ends.append(self.length)


_DELTAS = (TextDelta, ReasoningDelta, ArgumentsDelta, Markup)
"""Events that change nothing after another of their kind."""


class TurnDecoder:
    """Decodes one turn, token by token.

    Args:
        ids: gives each call an id that is unique in the conversation.
        stop_token_ids: tokens that end the turn and are not part of it.
        stops: strings that end the turn where they are not in reasoning.
        includes_stop: whether the stop string is part of the turn.
        min_tokens: number of tokens at the beginning whose text is not searched for ``stops``.
        max_calls: largest number of calls in the turn; None for any number.
        breaks_cut_call: whether a call that the end of the turn cuts becomes a broken one, which is sent as text.

    Attributes:
        turn: what was decoded; ``turn.token_ids`` belongs to the caller.
        reasoning_tokens: number of tokens while reasoning was open; its closer counts, its opener does not.
        ended: set when the turn is over although the model may continue: a stop string, or the last call allowed.
        stop_sequence: the stop string that ended the turn.
    """

    def __init__(
        self,
        parser: EventParser,
        detokenizer: Detokenizer,
        ids: TurnCallIds,
        *,
        stop_token_ids: Collection[int] = (),
        stops: Sequence[str] = (),
        includes_stop: bool = False,
        min_tokens: int = 0,
        max_calls: int | None = None,
        breaks_cut_call: bool = False,
    ) -> None:
        self._parser = parser
        self._breaks_cut_call = breaks_cut_call
        self._open_call: int | None = None
        self._tap: Tap | None = None
        self._detokenizer = detokenizer
        self._ids = ids
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stops = StopStrings(stops, includes=includes_stop) if any(stops) else None
        self._unwatched = min_tokens
        self._is_behind_reasoning = False
        self._calls_left = max_calls
        self._same: type[Event] | None = None  # events of this kind change nothing
        self.turn = DecodedTurn()
        self.tokens = 0
        self.reasoning_tokens = 0
        self.has_calls = False
        self.ended: FinishReason | None = None
        self.stop_sequence: str | None = None

    def set_tap(self, tap: Tap) -> None:
        self._tap = tap

    def feed(self, token_ids: Sequence[int]) -> list[Event]:
        """Return the events that are certain after these tokens. Tokens that end the turn have no text."""
        count = len(token_ids)
        if count != 1:
            if not count:
                return []
            if not self._continues(token_ids):
                return self._feed_each(token_ids)
        parser, turn = self._parser, self.turn
        self.tokens += count
        turn.length += count
        if parser.in_reasoning:
            self.reasoning_tokens += count
        events: list[Event] = []
        if token_ids[0] not in self._stop_token_ids:
            pieces = self._detokenizer.feed(token_ids)
            if self._stops is not None:
                events = self._parse_until_stop(self._stops, pieces)
            else:
                for text, special in pieces:
                    # Most tokens are one piece; its events are not copied.
                    found = parser.feed(text, special)
                    events = [*events, *found] if events else found
        for event in events:
            if type(event) is not self._same:
                events = self._checked(events)
                break
        turn.events += events
        if self._tap is not None:
            self._tap(token_ids, events)
        return events

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
        if self.ended == "stop":
            return []
        pieces = [] if self.ended else self._detokenizer.flush()
        last: list[Event] = []
        if self._stops is not None:
            if self.ended is None:
                last = self._parse_until_stop(self._stops, pieces)
            pieces = self._stops.close()
        last += [event for piece in pieces for event in self._parser.feed(*piece)]
        last += self._parser.close()
        if last:
            last = merge_deltas(self._checked(last))
        if self._breaks_cut_call and self._open_call is not None:
            last.append(ToolCallBroken(self._open_call, ""))
        self.turn.events += last
        if self._tap is not None:
            self._tap((), last)
        return last

    def _continues(self, token_ids: Sequence[int]) -> bool:
        """Return whether the tokens only continue the open span: then they are decoded as one."""
        if self._stops is not None or not self._stop_token_ids.isdisjoint(token_ids):
            return False
        text = self._detokenizer.whole_text(token_ids)
        return False if not text else self._parser.continues(text)

    def _feed_each(self, token_ids: Sequence[int]) -> list[Event]:
        events: list[Event] = []
        for at in range(len(token_ids)):
            events += self.feed(token_ids[at : at + 1])
            if self.ended is not None:
                self.tokens += len(token_ids) - at - 1  # They were generated, and are not decoded.
                break
        return merge_deltas(events)

    def _parse_until_stop(self, stops: StopStrings, pieces: list[TextPiece]) -> list[Event]:
        """Parse the text up to the first of the client's stop strings outside reasoning.

        The vendors' APIs look for them in visible text: a thought may contain any text, and the white space behind it
        belongs to neither.
        """
        parser, events = self._parser, list[Event]()
        if self._unwatched > 0:
            self._unwatched -= 1
            was_inside = parser.in_reasoning or self._is_behind_reasoning
            events = [event for piece in pieces for event in parser.feed(*piece)]
            has_reasoned = was_inside or any(type(event) is ReasoningDelta for event in events)
            has_text = any(type(event) is TextDelta and not event.text.isspace() for event in events)
            self._is_behind_reasoning = has_reasoned and not has_text and not parser.in_reasoning
            return events
        waiting = pieces[::-1]
        while waiting:
            if parser.in_reasoning or self._is_behind_reasoning:
                events += self._parse_unwatched(waiting)
                continue
            passed = stops.feed([waiting.pop()])
            for at, piece in enumerate(passed, 1):
                events += parser.feed(*piece)
                if parser.in_reasoning:
                    # What follows the opener is in reasoning, and so is a stop string that was found there.
                    waiting += [*passed[at:], *stops.take()][::-1]
                    break
            if stops.matched is not None:
                self.ended, self.stop_sequence = "stop_sequence", stops.matched
                break
        return merge_deltas(events)

    def _parse_unwatched(self, waiting: list[TextPiece]) -> list[Event]:
        parser = self._parser
        text, special = waiting.pop()
        if not parser.in_reasoning:
            visible = text.lstrip()
            if visible:
                self._is_behind_reasoning = False
                waiting.append((visible, special))
            return parser.feed(text[: len(text) - len(visible)])
        if special or parser.continues(text):
            events = parser.feed(text, special)
        else:
            # The end of reasoning may be inside the text.
            events, end = [], 0
            while end < len(text) and parser.in_reasoning:
                events += parser.feed(text[end])
                end += 1
            if end < len(text):
                waiting.append((text[end:], False))
        self._is_behind_reasoning = not parser.in_reasoning
        return events

    def _checked(self, events: list[Event]) -> list[Event]:
        turn = self.turn
        for at, event in enumerate(events):
            kind = type(event)
            if isinstance(event, ReasoningDelta):
                turn.is_reasoning = turn.is_reasoning or bool(event.text)
            elif turn.is_reasoning:
                turn.end_reasoning()
            self._same = kind if kind in _DELTAS and turn.is_reasoning == (kind is ReasoningDelta) else None
            if isinstance(event, ToolCallStart):
                self._ids.ensure_unique(event)
                self._open_call, self.has_calls = event.index, True
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


def _text_range(events: list[Event]) -> tuple[range, int]:
    """Return the bytes of the visible text among those that the model wrote for ``events``, and their number."""
    shown, size = range(0), 0
    for event in events:
        size += len(event.raw.encode())
        text = event.raw if isinstance(event, ToolCallBroken) else getattr(event, "text", "")
        if text and not isinstance(event, ReasoningDelta):  # markup before it is part of its raw span
            shown = range(shown.start if shown else size - len(text.encode()), size)
    return shown, size


class LogprobReader:
    """Decodes a generation token by token, and puts each token before the events that it made certain.

    A token is sent when it is known what it belongs to: the tokens of a marker that may still be text, with its last.
    """

    def __init__(
        self, decoder: TurnDecoder, tokenizer: Tokenizer, prompt: Sequence[int], request: Request
    ) -> None:
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._alternatives = request.sampling.logprobs or 0
        self._prompt_alternatives = request.sampling.prompt_logprobs or 0
        self._waiting: list[tuple[int, LogprobRow]] = []

    def feed(self, chunk: Chunk) -> list[Event]:
        events = [] if chunk.prompt_logprobs is None else self._read_prompt(chunk.prompt_logprobs)
        rows = chunk.logprobs or ()
        for at, id in enumerate(chunk.token_ids):
            self._waiting.append((id, rows[at] if at < len(rows) else ()))
            events += self._with_tokens(self._decoder.feed((id,)))
            if self._decoder.ended is not None:
                break
        return events

    def close(self) -> list[Event]:
        """Return the last events, and the tokens that belong to no event: those that ended the turn."""
        events = self._with_tokens(self._decoder.close())
        rest = tuple(self._token(*each, self._alternatives, False) for each in self._waiting)
        return [*events, TokenLogprobs(rest)] if rest else events

    def _read_prompt(self, rows: Sequence[LogprobRow]) -> list[Event]:
        limit, read = self._prompt_alternatives, zip(self._prompt, rows, strict=False)
        return [PromptLogprobs(tuple(self._token(id, row, limit) for id, row in read))]

    def _with_tokens(self, events: list[Event]) -> list[Event]:
        if not events:
            return events
        text, size = _text_range(events)
        sizes = [len(self._tokenizer.token_bytes(id)) for id, _ in self._waiting]
        at = max(0, size - sum(sizes))  # the end of a token that was sent before, held back until now
        tokens: list[Token] = []
        for (id, row), length in zip(self._waiting, sizes, strict=True):
            if at >= size:
                break
            visible = at + length > text.start and at < text.stop
            tokens.append(self._token(id, row, self._alternatives, visible))
            at += length
        del self._waiting[: len(tokens)]
        return [TokenLogprobs(tuple(tokens)), *events] if tokens else events

    def _token(self, id: int, row: LogprobRow, limit: int, visible: bool = True) -> Token:
        # An engine may report more alternatives than requested, and the token itself besides the most likely ones.
        likely = sorted(row, key=lambda pair: -pair[1])[:limit]
        others = tuple(self._with_text(other, logprob) for other, logprob in likely)
        return self._with_text(id, row[0][1] if row else None, others, visible)

    def _with_text(
        self, id: int, logprob: float | None, others: tuple[Token, ...] = (), visible: bool = True
    ) -> Token:
        utf8 = self._tokenizer.token_bytes(id)
        known = None if logprob is None or math.isnan(logprob) else logprob
        return Token(id, utf8.decode("utf-8", "replace"), utf8, known, others, visible)


def make_logprob_reader(
    model: Model, request: Request, decoder: TurnDecoder, prompt: Sequence[int]
) -> LogprobReader | None:
    """Return a reader for the tokens of a response or its prompt; None if ``request`` does not ask for them.

    Raises:
        InvalidRequest: the engine does not report log-probabilities of the prompt, or they are too many.
    """
    sampling = request.sampling
    if sampling.prompt_logprobs is not None and not model.engine.info().returns_prompt_logprobs:
        raise InvalidRequest(
            f"the engine {model.engine.info().name} does not report log-probabilities of the prompt; "
            "send neither prompt_logprobs nor echo with logprobs",
            param="prompt_logprobs",
        )
    if sampling.prompt_logprobs is not None:
        reported = len(prompt) * (1 + sampling.prompt_logprobs) * request.choices
        what = "log-probabilities of its prompt to report"
        request_limits.check("prompt_logprobs", reported, what=what, param="prompt_logprobs")
    if sampling.logprobs is sampling.prompt_logprobs is None and not request.options.return_token_ids:
        return None
    return LogprobReader(decoder, model.tokenizer, prompt, request)
