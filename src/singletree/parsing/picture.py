"""Pictures to patterns: what a piece of markup looks like, and whether a cut text could still become it.

Every pattern comes in two regular expressions made from the same elements: ``full`` matches the whole, ``partial``
matches a text that ends before the whole is there. The parser holds text back exactly while ``partial`` matches.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

LONGEST_SLOT = 256
"""A name or id longer than this is none: what is held back stays bounded."""

_JSON_TOKEN = re.compile(r'"[^"]+"|[{}\[\],:"]|\s+|[^"{}\[\],:\s]+')
_BREAK = re.compile(r"\n|(?<=[>`])(?=<)")
_ARGUMENTS_KEY = ('"arguments"', '"parameters"')


class Verdict(Enum):
    """What a pattern says of a text that may be cut."""

    YES = "it is there"
    MAYBE = "it could still become it"
    NO = "it cannot become it"


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
    """White space or none."""

    def full(self) -> str:
        return r"\s*"

    def partial(self, rest: str) -> str:
        return rf"\s*{rest}"


@dataclass(frozen=True)
class _Slot:
    """A run of ``item`` characters; without a name it is not asked for."""

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
    """What must follow and is not taken: one of some literals, or (``open_object``) ``{`` and then ``"`` or ``}``."""

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
    """Elements as a pair of regular expressions."""

    __slots__ = ("_full", "_partial")

    def __init__(self, elements: Sequence[_Element]) -> None:
        rest = ""
        for element in reversed(elements):
            rest = element.partial(rest)
        self._full = re.compile("".join(e.full() for e in elements))
        self._partial = re.compile(rest + r"\Z")

    def match(self, text: str, position: int = 0) -> tuple[Verdict, re.Match[str] | None]:
        """Whether ``text`` holds it at ``position``."""
        found = self._full.match(text, position)
        if found is not None:
            return Verdict.YES, found
        maybe = self._partial.match(text, position) is not None
        return (Verdict.MAYBE if maybe else Verdict.NO), None


def literal(text: str) -> list[_Element]:
    """Markup as elements: a line break, and the place between two tags or a fence and a tag, is white space or none."""
    elements: list[_Element] = []
    for i, line in enumerate(_BREAK.split(text)):
        if i:
            elements.append(_Space())
        if line:
            elements.append(_Literal(line))
    return elements


def json_literal(text: str, *, in_string: bool = False) -> list[_Element]:
    """JSON punctuation and keys as elements, white space free between them; ``in_string`` begins inside a string."""
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
    """A name, id or key; ``quoted`` inside a JSON string, ``again`` where it has been read before."""
    if name in _ITEMS:
        return _Slot(name if name == "type" else "", _ITEMS[name], least=int(name != "any"))
    group = "" if again else name
    if quoted:
        return _Slot(group, r'[^"\\\x00-\x1f]|\\.')
    blanks = r"\n" if name == "key" else r"\s`'"
    return _Slot(group, rf'[^{blanks}<>{{}}\[\]"\ud800-\udfff]')


def space() -> _Element:
    """White space or none."""
    return _Space()


def either(*texts: str) -> _Element:
    """One of several literals."""
    return _Either(texts)


def ahead(*texts: str, open_object: bool = False) -> _Element:
    """What must follow; not part of the match."""
    return _Ahead(tuple(t for t in texts if t), open_object)


_STRING = r'"(?:[^"\\]|\\.)*"'
_MEMBER = rf"\s*,\s*{_STRING}\s*:\s*(?:{_STRING}|[-+.\w]+)"
_CUT_STRING = r'"(?:[^"\\]|\\.)*\\?'
_CUT_MEMBER = rf'(?:,\s*(?:{_CUT_STRING}|{_STRING}\s*(?::\s*(?:{_CUT_STRING}"?|[-+.\w]*))?)?)?'


class RestOfObject(Pattern):
    """What follows the arguments inside a call object: further plain members and the closing brace."""

    def __init__(self) -> None:
        self._full = re.compile(rf"(?:{_MEMBER})*\s*\}}")
        self._partial = re.compile(rf"(?:{_MEMBER})*\s*{_CUT_MEMBER}\Z")
