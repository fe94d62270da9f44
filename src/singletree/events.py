"""The events of a generation, and the fold of events into a turn.

The parser returns events in the order in which the model wrote them. Each has ``raw``, the span of the model's text
that it stands for; all ``raw`` concatenated are the model's text, byte for byte.

Do not change an event that you received. Events and counts are not frozen, because making a frozen one costs four times
as much and one is made for every token. Two places change an event before anybody else sees it: the parser cuts what
the prompt already held from ``raw`` and ``text``, and the server replaces a ``ToolCallStart.id`` that is already taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from singletree.conversation import Part, Reasoning, Text, ToolCall, Turn


@dataclass(slots=True)
class TextDelta:
    """A piece of visible text."""

    text: str
    raw: str


@dataclass(slots=True)
class ReasoningDelta:
    """A piece of reasoning."""

    text: str
    raw: str


@dataclass(slots=True)
class Markup:
    """Text of the format itself (markers, and white space that belongs to them); never shown to a client.

    A ``ReasoningDelta`` after a ``Markup`` opens a new span; a ``TextDelta`` continues the text before it.
    """

    raw: str


@dataclass(slots=True)
class ToolCallStart:
    """The start of a call, whose name is known. ``index`` counts the calls of the turn from 0.

    ``written_id`` is the id that the model wrote; empty where its format has none.
    """

    index: int
    id: str
    name: str
    raw: str
    written_id: str = field(default="", compare=False)


@dataclass(slots=True)
class ArgumentsDelta:
    """A piece of the arguments of call ``index``, as JSON text (``json`` may be empty)."""

    index: int
    json: str
    raw: str


@dataclass(slots=True)
class ToolCallEnd:
    """The end of call ``index``: its arguments are complete, valid JSON, so it may be dispatched now."""

    index: int
    raw: str = ""


@dataclass(slots=True)
class ToolCallBroken:
    """Call ``index`` turned out not to be a call: its raw text counts as visible text (house rule H6).

    ``raw`` is the text that the call's earlier events do not cover. The fold puts the whole raw text of the call in its
    place. An encoder that has already sent the call sends this text after it and never ends the call.
    """

    index: int
    raw: str


@dataclass(frozen=True, slots=True)
class Token:
    """A token that the model generated, or could have generated.

    Attributes:
        text: its text, with U+FFFD for bytes that are not a whole character.
        utf8: its bytes.
        logprob: natural logarithm of its probability; None when the engine did not report it.
        alternatives: the most likely tokens at its position; the token itself may be among them.
        is_visible: whether it belongs to visible text, and not to reasoning, calls or markup.
    """

    id: int
    text: str = ""
    utf8: bytes = b""
    logprob: float | None = None
    alternatives: tuple[Token, ...] = ()
    is_visible: bool = True


@dataclass(slots=True)
class TokenLogprobs:
    """The tokens of the events that follow, for a client that asked for tokens. It is no part of the turn."""

    tokens: tuple[Token, ...]
    raw: str = ""


@dataclass(slots=True)
class PromptLogprobs:
    """The tokens of the prompt, for a client that asked for their log-probabilities. It is no part of the turn."""

    tokens: tuple[Token, ...]
    raw: str = ""


@dataclass(slots=True)
class Compacted:
    """The conversation was summarised (compacted); ``sealed`` is the encrypted summary that the client carries."""

    sealed: str
    raw: str = ""


@dataclass(slots=True)
class Usage:
    """Token counts of one generation. ``cached_tokens`` are the prompt tokens that the engine's prefix cache held.

    ``details`` are further fields, which the client asked for.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    details: Mapping[str, Any] | None = None


@dataclass(slots=True)
class UsageUpdate:
    """The token counts so far, for a client that asked for them in every chunk. It is no part of the turn."""

    usage: Usage
    raw: str = ""


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """The generated tokens from ``start`` to before ``end`` are of the weights of this version."""

    version: str | int | None = None
    start: int = 0
    end: int = 0


FinishReason = Literal["stop", "stop_sequence", "length", "context_overflow", "refusal", "cancelled", "error"]


@dataclass(slots=True)
class Finished:
    """The end of a generation.

    ``stop`` is the end of a plain answer and of one with tool calls alike; the events show whether calls were made.
    ``stop_sequence`` is the client's stop string that matched; None when none did. ``weight_versions`` and
    ``routed_experts`` are those of the engine's last ``Chunk``.
    """

    reason: FinishReason
    usage: Usage = field(default_factory=Usage)
    stop_sequence: str | None = None
    weight_versions: Sequence[WeightVersion] = ()
    routed_experts: str | None = None


Event = (
    TextDelta
    | ReasoningDelta
    | Markup
    | ToolCallStart
    | ArgumentsDelta
    | ToolCallEnd
    | ToolCallBroken
    | TokenLogprobs
    | PromptLogprobs
    | UsageUpdate
    | Compacted
)


class Fold:
    """Folds events into a turn. Feed the events in order; ``turn`` may be called at any time.

    Keys of the turn's ``extra``, each present only when it applies: ``tokens`` (tokens of the turn), ``prompt_tokens``
    (tokens of the prompt), ``is_open`` (the last text or reasoning has not ended) and ``compaction`` (the encrypted
    summary). A ``Text`` has its own tokens in its ``extra``.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._kind: type[TextDelta] | type[ReasoningDelta] | None = None
        self._pieces: list[str] = []
        self._call: ToolCallStart | None = None
        self._raw: list[str] = []
        self._tokens: list[Token] = []
        self._waiting: list[Token] = []  # tokens of the text that follows
        self._text_tokens: list[Token] = []  # tokens of the open text
        self._extra: dict[str, tuple[Token, ...] | str] = {}

    def feed(self, event: Event) -> None:
        if isinstance(event, TextDelta | ReasoningDelta):
            if self._kind is not type(event):
                self._close_open()
                self._kind = type(event)
            if event.text:
                self._pieces.append(event.text)
                self._take_waiting()
        elif isinstance(event, Markup):
            if self._call is not None:
                self._raw.append(event.raw)
            elif self._kind is ReasoningDelta:
                self._close_open()
        elif isinstance(event, ToolCallStart):
            self._close_open()
            self._call, self._pieces, self._raw = event, [], [event.raw]
        elif isinstance(event, ArgumentsDelta):
            self._pieces.append(event.json)
            self._raw.append(event.raw)
        elif isinstance(event, ToolCallEnd):
            self._close_call(complete=True)
        elif isinstance(event, TokenLogprobs):
            self._tokens += event.tokens
            self._waiting += [token for token in event.tokens if token.is_visible]
        elif isinstance(event, PromptLogprobs):
            self._extra["prompt_tokens"] = event.tokens
        elif isinstance(event, Compacted):
            self._extra["compaction"] = event.sealed
        elif isinstance(event, ToolCallBroken):
            raw = "".join([*self._raw, event.raw])
            self._call, self._raw, self._pieces = None, [], []
            self._add_text(raw)

    def feed_all(self, events: Iterable[Event]) -> None:
        for event in events:
            # The next piece of the open text or reasoning comes first, because it is most of the events.
            if type(event) is self._kind and (text := event.text) and not self._waiting:
                self._pieces.append(text)
            else:
                self.feed(event)

    def turn(self) -> Turn:
        """Return the turn so far; a call that has not ended is in it with ``complete=False``."""
        parts = list(self._parts)
        extra: dict[str, Any] = {**self._extra, **({"tokens": tuple(self._tokens)} if self._tokens else {})}
        if self._call is not None:
            parts.append(self._tool_call(complete=False))
        elif self._kind is not None and self._pieces:
            parts.append(self._open_part())
            extra["is_open"] = True
        return Turn("assistant", tuple(parts), extra or None)

    def _open_part(self) -> Text | Reasoning:
        text = "".join(self._pieces)
        if self._kind is ReasoningDelta:
            return Reasoning(text)
        return Text(text, {"tokens": tuple(self._text_tokens)} if self._text_tokens else None)

    def _take_waiting(self) -> None:
        if self._kind is TextDelta and self._waiting:
            self._text_tokens += self._waiting
            self._waiting = []

    def _tool_call(self, *, complete: bool) -> ToolCall:
        call = self._call
        assert call is not None
        arguments = "".join(self._pieces)
        return ToolCall(call.name, arguments, call.id, complete, written_id=call.written_id)

    def _close_open(self) -> None:
        if self._call is not None:
            self._close_call(complete=False)
        elif self._kind is not None and self._pieces:
            self._parts.append(self._open_part())
        self._kind, self._pieces, self._text_tokens = None, [], []

    def _close_call(self, *, complete: bool) -> None:
        if self._call is not None:
            self._parts.append(self._tool_call(complete=complete))
        self._call, self._raw, self._pieces = None, [], []

    def _add_text(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Text):
            self._parts.pop()
            text = last.text + text
            self._text_tokens = [*(last.extra or {}).get("tokens", ())]
        self._kind, self._pieces = TextDelta, [text]
        self._take_waiting()


def fold(events: Iterable[Event]) -> Turn:
    """Return the assistant turn that ``events`` make up."""
    folding = Fold()
    folding.feed_all(events)
    return folding.turn()
