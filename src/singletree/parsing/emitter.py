"""Makes events with their raw spans: every character read is in the ``raw`` of exactly one event.

``Quoting`` follows the text that was emitted, so that a marker in code or in quotes is told from a real one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

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
from singletree.parsing.compiled import CompiledFamily

_MOST_MARKUP = 256
"""Of how many pieces of markup the text is kept for the event that follows; more are an event of their own."""


def numbered_id(index: int, name: str) -> str:
    """Return the default id of a call whose format has no id."""
    return f"call_{index}"


class EventEmitter:
    """Collects the events of one turn. Markup joins the raw span of the event that follows.

    Args:
        compiled: the tables of the family.
        mint_id: (index, name) -> id, for calls whose format has no id.
        known: number of characters at the start that the prompt already held; they are left out of the events.

    Example:
        >>> from singletree import families
        >>> from singletree.parsing.compiled import compile_family
        >>> emitter = EventEmitter(compile_family(families.get("hermes")), numbered_id)
        >>> emitter.markup("</think>")
        >>> emitter.prose("Hello", reasoning=False)
        'Hello'
        >>> emitter.take()
        [TextDelta(text='Hello', raw='</think>Hello')]

    Attributes:
        coded: whether a special token was replaced by its code, so that codes have to be decoded.
        has_output: whether any text, reasoning or call was emitted.
        index: number of the last call; -1 before the first.
        hidden_names: names of which calls are emitted as markup.
    """

    def __init__(self, compiled: CompiledFamily, mint_id: Callable[[int, str], str], known: int = 0) -> None:
        self._compiled = compiled
        self._mint_id = mint_id
        self._out: list[Event] = []
        self._markup: list[str] = []
        self._known = known
        self.index = -1
        self._muted = False
        self.coded = False
        self.has_output = False
        self.hidden_names: frozenset[str] = frozenset()

    def take(self) -> list[Event]:
        out, self._out = self._out, []
        return self._without_known(out) if self._known and out else out

    @property
    def is_settled(self) -> bool:
        """Return whether the raw span of the next prose is its own text alone, and prose was emitted before."""
        return self.has_output and not self._markup and not self._known

    @property
    def shows_arguments(self) -> bool:
        """Return whether a piece of the arguments is an event of its own text alone."""
        return not (self._muted or self._known)

    def _without_known(self, out: list[Event]) -> list[Event]:
        for event in out:
            cut = min(self._known, len(event.raw))
            self._known -= cut
            event.raw = event.raw[cut:]
            if isinstance(event, TextDelta | ReasoningDelta):
                event.text = event.text[max(0, len(event.text) - len(event.raw)) :]
        return [e for e in out if e.raw or not isinstance(e, TextDelta | ReasoningDelta | Markup)]

    def prose(self, piece: str, reasoning: bool) -> str:
        """Add reasoning or visible text; return it with codes decoded."""
        self.has_output = True
        raw = text = self._decoded(piece)
        if self._markup:
            raw, self._markup = "".join([*self._markup, raw]), []
        self._out.append(ReasoningDelta(text, raw) if reasoning else TextDelta(text, raw))
        return text

    def markup(self, text: str) -> None:
        if text:
            self._markup.append(self._decoded(text))
            if len(self._markup) > _MOST_MARKUP:
                self.flush()

    def flush(self) -> None:
        """Emit the markup so far as an event of its own: the span before it has ended."""
        if self._markup:
            self._out.append(Markup("".join(self._markup)))
            self._markup = []

    def start(self, name: str, wire_id: str, raw: str) -> None:
        self.flush()
        self.has_output = True
        if name in self.hidden_names:
            self._muted = True
            self._out.append(Markup(self._decoded(raw)))
            return
        self.index += 1
        id = wire_id or self._mint_id(self.index, name)
        self._out.append(ToolCallStart(self.index, id, name, self._decoded(raw), wire_id))

    def delta(self, json_text: str, raw: str) -> None:
        if self.coded:
            json_text, raw = self._compiled.decode(json_text, in_json=True), self._decoded(raw)
        self._out.append(Markup(raw) if self._muted else ArgumentsDelta(self.index, json_text, raw))

    def end(self) -> None:
        if not self._muted:
            self._out.append(ToolCallEnd(self.index))
        self._muted = False

    def broken(self, raw: str) -> None:
        """Withdraw the call: its text is not a call; ``raw`` is the part that no event covers yet."""
        if self._muted:
            self._muted = False
            self.prose(raw, False)
            return
        self._out.append(ToolCallBroken(self.index, self._decoded(raw)))

    def _decoded(self, text: str) -> str:
        return self._compiled.decode(text) if self.coded else text


_TICKS = re.compile(r"`+|[^`]+")
_FENCE = 3
_MATES = {"`": "`", '"': '"', "'": "'", "“": "”", "‘": "’", "«": "»"}


class Quoting:
    """The state of Markdown text that is read piece by piece.

    Attributes:
        fenced: whether the text is inside a code fence.
        inline: whether the text is inside inline code.
        last: the last character; empty at the start.
    """

    __slots__ = ("_run", "fenced", "inline", "last")

    def __init__(self) -> None:
        self.fenced = False
        self.inline = False
        self.last = ""
        self._run = 0

    @property
    def is_plain(self) -> bool:
        """Return whether text without a backtick changes nothing but ``last``."""
        return not (self.inline or self._run)

    def feed(self, text: str) -> None:
        if text:
            self.last = text[-1]
            if self._run or self.inline or "`" in text:
                self._follow(text)

    def _follow(self, text: str) -> None:
        for found in _TICKS.finditer(text):
            if found.group()[0] == "`":
                before, self._run = self._run, self._run + len(found.group())
                if before < _FENCE <= self._run:
                    self.fenced = not self.fenced
                    self.inline = False
                elif not before:
                    self.inline = not self.inline
            else:
                self._run = 0
                self.inline = self.inline and "\n" not in found.group()

    def closing_mark(self, mark: str) -> str:
        """Return the character that closes a quotation opened by ``mark``; empty when ``mark`` opens none."""
        return _MATES.get(mark, "")
