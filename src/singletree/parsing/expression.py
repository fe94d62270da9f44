"""What a constrained turn may spell, as a tree; ``lark`` and ``structural_tag`` write it for the engines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Until:
    """Any text up to and with the first ``stop``; where there is a ``pattern``, one that it matches as a whole."""

    stop: str
    pattern: str = ""


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that the pattern matches as a whole. Only what every engine reads: no look-around, no anchors."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Json:
    """JSON of this schema."""

    schema: Any


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a whole Lark grammar of the client's says, beginning at its ``start``."""

    definition: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other; empty for nothing at all."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these."""

    ways: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """As often as wanted, also never."""

    item: Expression


@dataclass(frozen=True, slots=True)
class Prose:
    """Any text, in which certain markers begin what must follow them.

    Attributes:
        markers: (marker, what must follow it); the text goes on behind that.
        last: the same, with nothing behind it.
        without: texts that may not occur outside of what a marker begins.
    """

    markers: tuple[tuple[str, Expression], ...] = ()
    last: tuple[tuple[str, Expression], ...] = ()
    without: tuple[str, ...] = ()


Expression = Literal | Until | Regex | Json | Grammar | Sequence | Choice | Repeat | Prose
NOTHING = Sequence(())


_SYNTAX = re.compile(r"[.^$*+?{}\[\]\\|()]")


class Unsayable(Exception):
    """A way of writing has no words for an expression; the message says which."""


def sequence(items: Iterable[Expression | str]) -> Expression:
    """One after the other; plain text is literal. Neighbouring literals become one.

    LLGuidance's lexer takes the longest literal and never goes back, so a short literal that starts like another one
    (a line break before the next call, or before the closer) must not stand alone.
    """
    flat: list[Expression] = []
    for item in items:
        for part in item.items if isinstance(item, Sequence) else (item,):
            one = Literal(part) if isinstance(part, str) else part
            if isinstance(one, Literal) and flat and isinstance(flat[-1], Literal):
                flat[-1] = Literal(flat[-1].text + one.text)
            elif one != Literal(""):
                flat.append(one)
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def choice(ways: Iterable[Expression]) -> Expression:
    """One of these."""
    each = tuple(ways)
    return each[0] if len(each) == 1 else Choice(each)


def optional(item: Expression) -> Expression:
    """This, or nothing."""
    return Choice((item, NOTHING))


def pattern_of(text: str) -> str:
    """A pattern that matches ``text`` only. Some engines read ``\\<`` as a word's start, so nothing else is escaped."""
    return _SYNTAX.sub(r"\\\g<0>", text)
