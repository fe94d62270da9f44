"""Makes events with their raw spans: every character read is in the ``raw`` of exactly one event.

``Quoting`` follows the text that was emitted, so that a marker in code or in quotes is told from a real one. The state
in which a turn begins is found from the tail of the rendered prompt (house rule H1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import NamedTuple

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
from singletree.parsing.family import Family, markers

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
CLOSING_MARKS = {"`": "`", '"': '"', "'": "'", "“": "”", "‘": "’", "«": "»"}
"""The characters that close a quotation, by those that open one."""


class Quoting:
    """The state of Markdown text that is read piece by piece. Reasoning between two pieces opens and closes no code.

    Attributes:
        fenced: whether the text is inside a code fence.
        inline: whether the text is inside inline code.
        last: the last character, of reasoning too; empty at the start.
        run: number of backticks at the end of the text.
    """

    __slots__ = ("fenced", "inline", "last", "run")

    def __init__(self) -> None:
        self.fenced = False
        self.inline = False
        self.last = ""
        self.run = 0

    @property
    def is_plain(self) -> bool:
        """Return whether text without a backtick changes nothing but ``last``."""
        return not (self.inline or self.run)

    def feed(self, text: str, reasoning: bool) -> None:
        if text:
            self.last = text[-1]
            if not reasoning and (self.run or self.inline or "`" in text):
                self._follow(text)

    def _follow(self, text: str) -> None:
        for found in _TICKS.finditer(text):
            if found.group()[0] == "`":
                before, self.run = self.run, self.run + len(found.group())
                if before < _FENCE <= self.run:
                    self.fenced = not self.fenced
                    self.inline = False
                elif not before:
                    self.inline = not self.inline
            else:
                self.run = 0
                self.inline = self.inline and "\n" not in found.group()


_NEAR = (24, 48, 128)
"""In how many characters at the end of the tail a turn boundary is looked for, one after the other.

A template ends all its prompts in a few ways: of the first two sizes, what was found is remembered."""


def opens_in_reasoning(family: Family, prompt_tail: str, special_tokens: Collection[str] = ()) -> bool:
    """Return whether the first token already belongs to reasoning.

    Of ``prompt_tail`` only the text after the last turn boundary counts; where it is empty, ``Family.starts_open``
    decides. A special token that is not a marker of the family is a turn boundary.
    """
    if family.reasoning is None:
        return False
    if not prompt_tail:
        return family.starts_open
    known = frozenset(special_tokens)
    for size in _NEAR[:-1]:
        if size < len(prompt_tail):
            found = _state_near(family, known, prompt_tail[-size:])
            if found is not None:
                return found
    return _is_open(family, _after_boundary(prompt_tail, _NEAR[-1], _boundaries(family, known)))


@lru_cache(maxsize=1024)
def _state_near(family: Family, special_tokens: frozenset[str], near: str) -> bool | None:
    """Return whether a prompt that ends with ``near`` opens reasoning; None if more of it has to be seen."""
    tail = _behind_boundary(near, _boundaries(family, special_tokens))
    return None if tail is None else _is_open(family, tail)


def _is_open(family: Family, tail: str) -> bool:
    pairs = [pair for pair in (family.reasoning, *family.also_reasoning) if pair is not None]
    opened = max(tail.rfind(opener.strip()) for opener, _ in pairs)
    return opened > max(tail.rfind(closer.strip()) for _, closer in pairs)


def continues_message(family: Family, prompt_tail: str) -> bool:
    """Return whether the prompt ends with a message header (``Family.message_header``) that the model continues."""
    return bool(family.message_header) and (not prompt_tail or prompt_tail.endswith(family.message_header))


def _after_boundary(tail: str, size: int, boundaries: _Boundaries) -> str:
    while size < len(tail):
        found = _behind_boundary(tail[-size:], boundaries)
        if found is not None:
            return found
        size *= 8
    return tail[_last_end(tail, boundaries.texts) :]


def _behind_boundary(near: str, boundaries: _Boundaries) -> str | None:
    """Return what is behind the last boundary of a text that ends with ``near``; None if that may begin before."""
    cut = _last_end(near, boundaries.texts)
    return near[cut:] if cut and cut >= boundaries.longest_around else None


def _last_end(text: str, boundaries: Collection[str]) -> int:
    return max((at + len(b) for b in boundaries if (at := text.rfind(b)) >= 0), default=0)


class _Boundaries(NamedTuple):
    """The texts that end a turn, and the length of the longest one that has another in it; 0 if none has."""

    texts: tuple[str, ...]
    longest_around: int


@lru_cache(maxsize=256)
def _boundaries(family: Family, special_tokens: frozenset[str]) -> _Boundaries:
    own = "\n".join(markers(family))
    opens = [pair[0] for pair in (family.reasoning, *family.also_reasoning) if pair]
    texts = (
        *(e for e in family.dropped_markers if not any(e in o for o in opens)),
        *(t for t in special_tokens if t and t not in own),
    )
    around = (text for text in texts if any(other in text for other in texts if other != text))
    return _Boundaries(texts, max(map(len, around), default=0))
