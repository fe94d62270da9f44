"""Finds regular expressions that may give back what they took: those whose time is not linear."""

from __future__ import annotations

import re
from collections.abc import Sequence
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

SAMPLE = "".join(map(chr, range(0x100))) + "Ġ▁｜“\u2028\udc80\udc81"
FEW = 16
"""A repetition of at most so many characters may be given back."""

Nodes = Sequence[tuple[Any, Any]]


def ambiguous(pattern: re.Pattern[str], *, searched: bool = False) -> str:
    """Return why ``pattern`` may look at a character more than a few times; empty if it cannot.

    Args:
        pattern: the regular expression.
        searched: whether it is tried at each position, so that nothing in it may repeat.
    """
    nodes = list(_parser.parse(pattern.pattern, pattern.flags))
    return _sequence(nodes, [], searched, bool(pattern.flags & re.DOTALL))


def _sequence(nodes: Nodes, after: Nodes, searched: bool, dotall: bool) -> str:
    for at, (code, value) in enumerate(nodes):
        rest = [*nodes[at + 1 :], *after]
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, body = value
            inner = _sequence(list(body), [(code, value), *rest] if most > 1 else rest, searched, dotall)
            if inner:
                return inner
            if most == 1 or (most <= FEW and least == most):
                continue
            if searched and most > FEW:
                return f"{body} repeats, and is searched for"
            if most > FEW and _first(list(body), dotall)[1]:
                return f"{body} repeats and may be empty"
            follows = _first(rest, dotall)[0]
            both = _first(list(body), dotall)[0] & follows
            if most > FEW and rest and both:
                return f"{body} repeats, and {sorted(both)[:5]} may follow it"
        elif code is op.SUBPATTERN:
            inner = _sequence(list(value[3]), rest, searched, dotall)
            if inner:
                return inner
        elif code is op.BRANCH:
            for each in value[1]:
                inner = _sequence(list(each), rest, searched, dotall)
                if inner:
                    return inner
    return ""


def _first(nodes: Nodes, dotall: bool) -> tuple[set[str], bool]:
    """Return with which characters ``nodes`` may begin, and whether they may be empty."""
    found: set[str] = set()
    for code, value in nodes:
        characters, empty = _first_of(code, value, dotall)
        found |= characters
        if not empty:
            return found, False
    return found, True


def _first_of(code: Any, value: Any, dotall: bool) -> tuple[set[str], bool]:
    if code in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
        characters, empty = _first(list(value[2]), dotall)
        return characters, empty or value[0] == 0
    if code is op.SUBPATTERN:
        return _first(list(value[3]), dotall)
    if code is op.BRANCH:
        ways = [_first(list(each), dotall) for each in value[1]]
        return set().union(*(way[0] for way in ways)), any(way[1] for way in ways)
    if code in (op.AT, op.ASSERT, op.ASSERT_NOT):
        return set(), True
    if code is op.LITERAL:
        return {chr(value)} & set(SAMPLE), False
    if code is op.NOT_LITERAL:
        return set(SAMPLE) - {chr(value)}, False
    if code is op.ANY:
        return set(SAMPLE) - (set() if dotall else {"\n"}), False
    if code is op.IN:
        return {character for character in SAMPLE if _is_in(value, character)}, False
    raise AssertionError(code)


_CATEGORIES = {
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}


def _is_in(items: Nodes, character: str) -> bool:
    negated, found = False, False
    for code, value in items:
        if code is op.NEGATE:
            negated = True
        elif code is op.LITERAL:
            found = found or ord(character) == value
        elif code is op.RANGE:
            found = found or value[0] <= ord(character) <= value[1]
        else:
            found = found or re.match(_CATEGORIES[value], character) is not None
    return found is not negated
