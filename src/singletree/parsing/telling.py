"""Events with their raw spans: every character read stands in the ``raw`` of exactly one event."""

from __future__ import annotations

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
from singletree.parsing.grammar import Grammar


def numbered(index: int, name: str) -> str:
    """The id of a call whose format carries none, where nobody gives another."""
    return f"call_{index}"


class Telling:
    """Collects the events of one turn. Markup joins the raw span of what comes next.

    The first ``known`` characters were in the prompt: they are in no event.
    ``coded`` is set once a special token was replaced by its code; ``said`` once anything was told. A call of a name
    in ``silent`` is markup.
    """

    __slots__ = (
        "_grammar",
        "_index",
        "_known",
        "_markup",
        "_mint_id",
        "_muted",
        "_out",
        "coded",
        "said",
        "silent",
    )

    def __init__(self, grammar: Grammar, mint_id: Callable[[int, str], str], known: int = 0) -> None:
        self._grammar = grammar
        self._mint_id = mint_id
        self._out: list[Event] = []
        self._markup: list[str] = []
        self._known = known
        self._index = -1
        self._muted = False
        self.coded = False
        self.said = False
        self.silent: frozenset[str] = frozenset()

    def take(self) -> list[Event]:
        """What was told since the last time."""
        out, self._out = self._out, []
        return self._without_known(out) if self._known and out else out

    def _without_known(self, out: list[Event]) -> list[Event]:
        for event in out:
            cut = min(self._known, len(event.raw))
            self._known -= cut
            event.raw = event.raw[cut:]
            if isinstance(event, TextDelta | ReasoningDelta):
                event.text = event.text[max(0, len(event.text) - len(event.raw)) :]
        return [e for e in out if e.raw or not isinstance(e, TextDelta | ReasoningDelta | Markup)]

    def prose(self, piece: str, reasoning: bool) -> str:
        """Reasoning or visible text; returns it as spelled."""
        self.said = True
        raw = text = self._spell(piece)
        if self._markup:
            raw, self._markup = "".join([*self._markup, raw]), []
        self._out.append(ReasoningDelta(text, raw) if reasoning else TextDelta(text, raw))
        return text

    def markup(self, text: str) -> None:
        """Text of the format."""
        if text:
            self._markup.append(self._spell(text))

    def flush(self) -> None:
        """Close what was being said: the markup so far becomes an event of its own."""
        if self._markup:
            self._out.append(Markup("".join(self._markup)))
            self._markup = []

    def start(self, name: str, wire_id: str, raw: str) -> None:
        """A call begins."""
        self.flush()
        self.said = True
        if name in self.silent:
            self._muted = True
            self._out.append(Markup(self._spell(raw)))
            return
        self._index += 1
        id = wire_id or self._mint_id(self._index, name)
        self._out.append(ToolCallStart(self._index, id, name, self._spell(raw)))

    def delta(self, json_text: str, raw: str) -> None:
        """More arguments."""
        if self.coded:
            json_text, raw = self._grammar.spell(json_text, in_json=True), self._spell(raw)
        self._out.append(Markup(raw) if self._muted else ArgumentsDelta(self._index, json_text, raw))

    def end(self) -> None:
        """The arguments are complete."""
        if not self._muted:
            self._out.append(ToolCallEnd(self._index))
        self._muted = False

    def broken(self, raw: str) -> None:
        """The call is none."""
        if self._muted:
            self._muted = False
            self.prose(raw, False)
            return
        self._out.append(ToolCallBroken(self._index, self._spell(raw)))

    def _spell(self, text: str) -> str:
        return self._grammar.spell(text) if self.coded else text
