"""Constraints as expression trees; ``lark`` and ``structural_tag`` convert them for the engines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from typing import Literal as Literal_


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Until:
    """Any text up to and including the first ``stop``; with a ``pattern``, a text that it matches as a whole."""

    stop: str
    pattern: str = ""


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that the pattern matches as a whole. Only syntax that every engine has: no look-around, no anchors."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Json:
    """A JSON value that fits the schema."""

    schema: Any


@dataclass(frozen=True, slots=True)
class Grammar:
    """A text of a grammar that the client sent, from its rule ``start`` (``lark``) or ``root`` (``ebnf``) on."""

    definition: str
    syntax: Literal_["lark", "ebnf"] = "lark"


@dataclass(frozen=True, slots=True)
class Sequence:
    """Expressions one after the other; without items, the empty text."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of several expressions."""

    ways: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """An expression any number of times, zero included."""

    item: Expression


@dataclass(frozen=True, slots=True)
class Prose:
    """Any text, in which an expression must follow certain markers.

    Attributes:
        markers: (marker, expression that must follow it); more text may come after that.
        last: the same, but the text ends after the expression.
        without: texts that must not occur outside these expressions.
    """

    markers: tuple[tuple[str, Expression], ...] = ()
    last: tuple[tuple[str, Expression], ...] = ()
    without: tuple[str, ...] = ()


Expression = Literal | Until | Regex | Json | Grammar | Sequence | OneOf | Repeat | Prose
NOTHING = Sequence(())


_SYNTAX = re.compile(r"[.^$*+?{}\[\]\\|()]")


class NotExpressible(Exception):
    """A notation cannot express a part of an expression; the message names the part."""


def sequence(items: Iterable[Expression | str]) -> Expression:
    """Return expressions one after the other; plain text is a literal. Adjacent literals are joined.

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


def one_of(ways: Iterable[Expression]) -> Expression:
    """Return a choice of one of several expressions."""
    each = tuple(ways)
    return each[0] if len(each) == 1 else OneOf(each)


def optional(item: Expression) -> Expression:
    """Return a choice of ``item`` or the empty text."""
    return OneOf((item, NOTHING))


def pattern_of(text: str) -> str:
    """Return a pattern that matches only ``text``. Little is escaped: some engines read ``\\<`` as a word start."""
    return _SYNTAX.sub(r"\\\g<0>", text)
