"""What a generation says, piece by piece, and the fold of the pieces into a turn.

Events leave the parser in the order in which the model wrote them. Each carries ``raw``, the span of the
model's text that it stands for; all ``raw`` concatenated give the model's text back byte for byte.
Treat events as immutable (they are not frozen because making a frozen one costs four times as much, and
one is made for every token).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from singletree.conversation import Part, Reasoning, Text, ToolCall, Turn


@dataclass(slots=True)
class TextDelta:
    """More visible text."""

    text: str
    raw: str


@dataclass(slots=True)
class ReasoningDelta:
    """More reasoning."""

    text: str
    raw: str


@dataclass(slots=True)
class Markup:
    """Text of the format itself (markers, white space that is the format's): shown to nobody.

    A ``ReasoningDelta`` after a ``Markup`` opens a new span; a ``TextDelta`` goes on with the text before it.
    """

    raw: str


@dataclass(slots=True)
class ToolCallStart:
    """A call began and its name is known. ``index`` counts the calls of the turn from 0."""

    index: int
    id: str
    name: str
    raw: str


@dataclass(slots=True)
class ArgumentsDelta:
    """More of the arguments of call ``index``: a piece of JSON text (``json`` may be empty)."""

    index: int
    json: str
    raw: str


@dataclass(slots=True)
class ToolCallEnd:
    """The arguments of call ``index`` are complete, valid JSON: it may be dispatched now."""

    index: int
    raw: str = ""


@dataclass(slots=True)
class ToolCallBroken:
    """Call ``index`` turned out not to be one: what was read of it counts as text (FORMATS.md, H6).

    ``raw`` is the text not yet covered by the call's earlier events. The fold puts the whole raw text of the
    call in its place; an encoder that has already shown the call shows its text after it and never ends it.
    """

    index: int
    raw: str


@dataclass(frozen=True, slots=True)
class Token:
    """One token that the model wrote, or might have written.

    Attributes:
        text: what it spells, U+FFFD where that is no whole character; ``utf8`` are its bytes.
        logprob: natural logarithm of its probability; None where the engine told none.
        alternatives: the most likely tokens in its place, itself among them if it is one.
        is_visible: whether it is of the visible text, and not of reasoning, calls or markup.
    """

    id: int
    text: str = ""
    utf8: bytes = b""
    logprob: float | None = None
    alternatives: tuple[Token, ...] = ()
    is_visible: bool = True


@dataclass(slots=True)
class TokensRead:
    """The tokens of what the next events say, for a client that asked for them. It says nothing itself."""

    tokens: tuple[Token, ...]
    raw: str = ""


@dataclass(slots=True)
class PromptRead:
    """The tokens of the prompt, for a client that asked for their log-probabilities. It says nothing itself."""

    tokens: tuple[Token, ...]
    raw: str = ""


@dataclass(slots=True)
class Compacted:
    """The conversation was summed up, and ``sealed`` is what the client carries of the summary."""

    sealed: str
    raw: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one generation. ``cached_tokens`` is the part of the prompt the engine had already."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(slots=True)
class UsageRead:
    """The counts with what the next events say, for a client that asked for them all along. It says nothing itself."""

    usage: Usage
    raw: str = ""


FinishReason = Literal["stop", "stop_sequence", "length", "context_overflow", "refusal", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation.

    ``stop`` covers both the end of a plain answer and of one with tool calls: whether calls were made is
    seen from the events. ``stop_sequence`` names the string that matched.
    """

    reason: FinishReason
    usage: Usage = field(default_factory=Usage)
    stop_sequence: str | None = None


@dataclass(slots=True)
class OfChoice:
    """What one of several generations for the same request says; ``index`` counts them from 0."""

    index: int
    said: Event | Finished
    raw: str = ""


Event = (
    TextDelta
    | ReasoningDelta
    | Markup
    | ToolCallStart
    | ArgumentsDelta
    | ToolCallEnd
    | ToolCallBroken
    | TokensRead
    | PromptRead
    | UsageRead
    | Compacted
    | OfChoice
)


class Fold:
    """Folds events into a turn. ``feed`` takes them in order; ``turn`` may be read at any time.

    The turn's ``extra`` has the tokens that were told, ``tokens`` of itself and ``prompt_tokens`` of what it answers;
    ``is_open`` where its last text or thought has not come to its end; and ``compaction``, what the client carries of a
    summary. A ``Text`` has its own tokens in ``extra``.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._kind: type[TextDelta] | type[ReasoningDelta] | None = None
        self._pieces: list[str] = []
        self._call: ToolCallStart | None = None
        self._raw: list[str] = []
        self._tokens: list[Token] = []
        self._waiting: list[Token] = []  # tokens of the text to come
        self._spelling: list[Token] = []  # and of the open one
        self._extra: dict[str, tuple[Token, ...] | str] = {}

    def feed(self, event: Event) -> None:
        """Take one more event."""
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
        elif isinstance(event, TokensRead):
            self._tokens += event.tokens
            self._waiting += [token for token in event.tokens if token.is_visible]
        elif isinstance(event, PromptRead):
            self._extra["prompt_tokens"] = event.tokens
        elif isinstance(event, Compacted):
            self._extra["compaction"] = event.sealed
        elif isinstance(event, ToolCallBroken):
            raw = "".join([*self._raw, event.raw])
            self._call, self._raw, self._pieces = None, [], []
            self._add_text(raw)

    def turn(self) -> Turn:
        """The turn so far; a call that has not ended is in it with ``complete=False``."""
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
        return Text(text, {"tokens": tuple(self._spelling)} if self._spelling else None)

    def _take_waiting(self) -> None:
        if self._kind is TextDelta and self._waiting:
            self._spelling += self._waiting
            self._waiting = []

    def _tool_call(self, *, complete: bool) -> ToolCall:
        call = self._call
        assert call is not None
        return ToolCall(call.name, "".join(self._pieces), call.id, complete)

    def _close_open(self) -> None:
        if self._call is not None:
            self._close_call(complete=False)
        elif self._kind is not None and self._pieces:
            self._parts.append(self._open_part())
        self._kind, self._pieces, self._spelling = None, [], []

    def _close_call(self, *, complete: bool) -> None:
        if self._call is not None:
            self._parts.append(self._tool_call(complete=complete))
        self._call, self._raw, self._pieces = None, [], []

    def _add_text(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Text):
            self._parts.pop()
            text = last.text + text
            self._spelling = [*(last.extra or {}).get("tokens", ())]
        self._kind, self._pieces = TextDelta, [text]
        self._take_waiting()


def fold(events: Iterable[Event]) -> Turn:
    """The assistant turn that ``events`` say."""
    folding = Fold()
    for event in events:
        folding.feed(event)
    return folding.turn()
