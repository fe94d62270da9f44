"""Compiles pictures of markup into patterns, which also match a text that is cut off.

Every pattern has two regular expressions made from the same elements: ``full`` matches the whole markup, ``partial``
matches a text that ends inside it. The parser holds text back exactly while ``partial`` matches.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

LONGEST_SLOT = 256
"""Maximum length of a name or an id, so that the text held back stays bounded."""

_JSON_TOKEN = re.compile(r'"[^"]+"|[{}\[\],:"]|\s+|[^"{}\[\],:\s]+')
_BREAK = re.compile(
    r"\n|(?<=[>`\udc80-\udcff])(?=[<\udc80-\udcff])|(?<=[>\udc80-\udcff])(?=\w)|(?<=\w)(?=[<\udc80-\udcff])"
)
"""A line break, or the place between two tags or a tag and a word. A special token is a code here (``compiled``)."""
_ARGUMENTS_KEY = ('"arguments"', '"parameters"')


class Match(Enum):
    """The result of matching a pattern with a text that may be cut off."""

    FULL = "the text matches"
    PARTIAL = "more text could still make it match"
    NONE = "no further text can make it match"


@dataclass(frozen=True)
class _Literal:
    text: str

    def full(self) -> str:
        return re.escape(self.text)

    def partial(self, rest: str) -> str:
        for character in reversed(self.text):
            rest = f"(?:{re.escape(character)}{rest})?"
        return rest


@dataclass(frozen=True)
class _Space:
    """White space or none; ``all`` takes all of it, for when the next element may contain white space too."""

    all: bool = False

    def full(self) -> str:
        return r"\s*+" if self.all else r"\s*"

    def partial(self, rest: str) -> str:
        return f"{self.full()}{rest}"


@dataclass(frozen=True)
class _Slot:
    """A run of ``item`` characters; without a name it is not captured."""

    name: str
    item: str
    least: int = 1

    def full(self) -> str:
        group = f"?P<{self.name}>" if self.name else "?:"
        return f"({group}(?:{self.item}){{{self.least},{LONGEST_SLOT}}}?)"

    def partial(self, rest: str) -> str:
        return f"(?:(?:{self.item}){{0,{LONGEST_SLOT}}}{rest})"


@dataclass(frozen=True)
class _Either:
    """One of several literals."""

    texts: tuple[str, ...]

    def full(self) -> str:
        return "(?:" + "|".join(map(re.escape, self.texts)) + ")"

    def partial(self, rest: str) -> str:
        return "(?:" + "|".join(_Literal(t).partial(rest) for t in self.texts) + ")"


@dataclass(frozen=True)
class _Ahead:
    """A look-ahead: one of some literals, or (``open_object``) ``{`` and then ``"`` or ``}``."""

    texts: tuple[str, ...] = ()
    open_object: bool = False

    def full(self) -> str:
        return f"(?={'|'.join([*map(re.escape, self.texts), *([_OBJECT] if self.open_object else [])])})"

    def partial(self, rest: str) -> str:
        ways = [_Literal(t).partial("") for t in self.texts]
        if self.open_object:
            ways.append(r"(?:\{\s*)?")
        return f"(?:{'|'.join(ways)})"


_OBJECT = r'\{\s*["}]'
_Element = _Literal | _Space | _Slot | _Either | _Ahead


class Pattern:
    """A sequence of elements, compiled to a pair of regular expressions."""

    __slots__ = ("_full", "_partial")

    def __init__(self, elements: Sequence[_Element]) -> None:
        rest = ""
        for element in reversed(elements):
            rest = element.partial(rest)
        self._full = re.compile("".join(e.full() for e in elements))
        self._partial = re.compile(rest + r"\Z")

    def match(self, text: str, position: int = 0) -> tuple[Match, re.Match[str] | None]:
        """Match ``text`` at ``position``; return the result, and the match when it is a full one."""
        found = self._full.match(text, position)
        if found is not None:
            return Match.FULL, found
        maybe = self._partial.match(text, position) is not None
        return (Match.PARTIAL if maybe else Match.NONE), None


def literal(text: str) -> list[_Element]:
    """Return markup as elements; a line break, and the place beside a tag, is white space or none."""
    elements: list[_Element] = []
    for i, line in enumerate(_BREAK.split(text)):
        if i:
            elements.append(_Space())
        if line:
            elements.append(_Literal(line))
    return elements


def json_literal(text: str, *, in_string: bool = False) -> list[_Element]:
    """Return JSON punctuation and keys as elements, with free white space between them.

    ``in_string``: whether ``text`` begins inside a JSON string.
    """
    elements: list[_Element] = [_Literal('"')] if in_string and text.startswith('"') else []
    for token in _JSON_TOKEN.findall(text[len(elements) :]):
        if token.isspace():
            continue
        if elements and not isinstance(elements[-1], _Space):
            elements.append(_Space())
        elements.append(_Either(_ARGUMENTS_KEY) if token in _ARGUMENTS_KEY else _Literal(token))
    return elements


_ITEMS = {
    "element": r"[^<>/\s]",
    "index": r"[0-9]",
    "type": r"[a-z]",
    "any": r"[^<\n\ud800-\udfff]",
    "sources": r"[0-9:,\[\] ]",
}


def slot(name: str, *, quoted: bool = False, again: bool = False) -> _Element:
    """Return the element of a slot; ``quoted`` inside a JSON string, ``again`` when the slot was captured before."""
    if name in _ITEMS:
        return _Slot(name if name == "type" else "", _ITEMS[name], least=int(name != "any"))
    group = "" if again else name
    if quoted:
        return _Slot(group, r'[^"\\\x00-\x1f]|\\.')
    blanks = r"\n" if name == "key" else r"\s`'"
    return _Slot(group, rf'[^{blanks}<>{{}}\[\]"\ud800-\udfff]')


def space() -> _Element:
    """Return an element for white space or none."""
    return _Space()


def spaced(element: _Element) -> list[_Element]:
    """Return ``element`` with free white space on both sides: models write it beside names, ids and keys."""
    return [_Space(all=True), element, _Space()]


def either(*texts: str) -> _Element:
    """Return an element for one of several literals."""
    return _Either(texts)


def lookahead(*texts: str, open_object: bool = False) -> _Element:
    """Return an element for text that must follow and is not part of the match."""
    return _Ahead(tuple(t for t in texts if t), open_object)


_STRING = r'"(?:[^"\\]|\\.)*"'
_MEMBER = rf"\s*,\s*{_STRING}\s*:\s*(?:{_STRING}|[-+.\w]+)"
_CUT_STRING = r'"(?:[^"\\]|\\.)*\\?'
_CUT_MEMBER = rf'(?:,\s*(?:{_CUT_STRING}|{_STRING}\s*(?::\s*(?:{_CUT_STRING}"?|[-+.\w]*))?)?)?'


class RestOfObject(Pattern):
    """The text after the arguments inside a call object: further plain members and the closing brace."""

    def __init__(self) -> None:
        self._full = re.compile(rf"(?:{_MEMBER})*\s*\}}")
        self._partial = re.compile(rf"(?:{_MEMBER})*\s*{_CUT_MEMBER}\Z")
