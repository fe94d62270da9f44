"""Compiles patterns of markup into patterns, and matches them with text that arrives in pieces.

A pattern is a sequence of elements. Each is read from where the one before ended, takes all that it can, and gives
nothing back; so every character is read once, whatever the text. A pattern that the text cuts off goes on where it
stopped (``Matching``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

LONGEST_SLOT = 256
"""Maximum length of a name or an id, in characters."""

LONGEST_MARKUP = 1024
"""Maximum length of what a pattern matches, in characters. What is still cut off after so many matches nothing."""

_BREAK = re.compile(
    r"\n|(?<=[>`\udc80-\udcff])(?=[<\udc80-\udcff])|(?<=[>\udc80-\udcff])(?=\w)|(?<=\w)(?=[<\udc80-\udcff])"
)
"""A line break, or the place between two tags or a tag and a word. A special token is a code here (``compiled``)."""


class Match(Enum):
    """The result of matching a pattern with a text that may be cut off."""

    FULL = "the text matches"
    PARTIAL = "more text could still make it match"
    NONE = "no further text can make it match"


class Found(NamedTuple):
    """A full match: the position of its end, and the text of each slot by name."""

    end: int
    slots: dict[str, str]


class Element(Protocol):
    """One part of a pattern."""

    @property
    def slot(self) -> str:
        """Return the name under which its text is given; empty for none."""

    def read(self, text: str, at: int, begun: int) -> int | None:
        """Read on from ``at`` in the element that began at ``begun``.

        Returns:
            The position of its end; ``~position`` if the text is cut, from where it is read on; None for no match.
        """


_SPACES = re.compile(rf"\s{{0,{LONGEST_MARKUP + 1}}}")


@dataclass(frozen=True)
class Exact:
    """A text; ``spaced``: with white space or none before it."""

    text: str
    spaced: bool = False
    slot = ""

    def read(self, text: str, at: int, begun: int) -> int | None:
        if text.startswith(self.text, at):
            return at + len(self.text)
        if self.spaced:
            spaces = _SPACES.match(text, at).end()  # type: ignore[union-attr]
            if spaces > at:
                at = spaces
                if text.startswith(self.text, at):
                    return at + len(self.text)
        return ~at if len(text) - at < len(self.text) and self.text.startswith(text[at:]) else None

    def may_begin(self, character: str) -> bool:
        return character == self.text[0] or (self.spaced and character.isspace())


@dataclass(frozen=True)
class _Space:
    """White space, of ``least`` characters or more."""

    least: int = 0
    slot = ""

    def read(self, text: str, at: int, begun: int) -> int | None:
        end = _SPACES.match(text, at).end()  # type: ignore[union-attr]
        if end == len(text):
            return ~end
        return end if end - begun >= self.least else None


SPACE = _Space()
"""White space or none."""


@dataclass(frozen=True)
class _Slot:
    """A run of ``item`` characters, which ends where ``stop`` begins, if that may be a part of the run."""

    slot: str
    item: str
    least: int = 1
    stop: str = ""

    @cached_property
    def _run(self) -> re.Pattern[str]:
        return re.compile(f"(?:{self.item})*")

    def before(self, follows: str) -> _Slot:
        """Return the slot as it is before the literal ``follows``."""
        is_item = re.fullmatch(self.item, follows[:1]) is not None
        return _Slot(self.slot, self.item, self.least, follows) if is_item else self

    def read(self, text: str, at: int, begun: int) -> int | None:
        end = self._run.match(text, at, begun + LONGEST_SLOT + 1).end()  # type: ignore[union-attr]
        if self.stop:
            stops = text.find(self.stop, max(at, begun + self.least), end + len(self.stop))
            if stops >= 0:
                return stops
        if end - begun > LONGEST_SLOT:
            return None
        if end == len(text) and self.stop:
            return ~max(at, end + 1 - len(self.stop))
        if end == len(text) or (text[end] == "\\" and end + 1 == len(text)):
            return ~end
        return end if end - begun >= self.least else None


@dataclass(frozen=True)
class Either:
    """One of several literals."""

    texts: tuple[str, ...]
    slot = ""

    def read(self, text: str, at: int, begun: int) -> int | None:
        for each in self.texts:
            if text.startswith(each, at):
                return at + len(each)
        rest = len(text) - at
        is_cut = any(rest < len(each) and each.startswith(text[at:]) for each in self.texts)
        return ~at if is_cut else None


@dataclass(frozen=True)
class _End:
    """The end of the match: the elements behind it must follow, and are no part of it."""

    slot = ""

    def read(self, text: str, at: int, begun: int) -> int | None:
        return at


_END = _End()


@dataclass(frozen=True)
class Scalar:
    """A string in one of the ``quotes``, or a run of the characters ``words``, if there are any."""

    quotes: str = '"'
    words: str = ""
    slot = ""

    @cached_property
    def _runs(self) -> dict[str, re.Pattern[str]]:
        most = LONGEST_MARKUP + 1
        runs = {mark: rf"(?:[^{mark}\\]|\\.){{0,{most}}}" for mark in self.quotes}
        runs |= {"": f"{self.words}{{0,{most}}}"} if self.words else {}
        return {mark: re.compile(run, re.DOTALL) for mark, run in runs.items()}

    def read(self, text: str, at: int, begun: int) -> int | None:
        if begun == len(text):
            return ~begun
        mark = text[begun] if text[begun] in self.quotes else ""
        run = self._runs.get(mark)
        if run is None:
            return None
        end = run.match(text, max(at, begun + len(mark))).end()  # type: ignore[union-attr]
        if end == len(text) or (mark and text[end] == "\\"):
            return ~end
        if mark:
            return end + 1 if text[end] == mark else None
        return end if end > begun else None


class _Attempt:
    """How far a pattern was matched at one place; positions are counted from there."""

    __slots__ = ("at", "begun", "end", "index", "place", "result", "slots")

    def __init__(self, place: int) -> None:
        self.place = place
        self.result = Match.PARTIAL
        self.index = self.at = self.begun = 0
        self.end = -1
        self.slots: dict[str, str] = {}

    def found(self, position: int) -> Found | None:
        return Found(position + self.end, dict(self.slots)) if self.result is Match.FULL else None


class Pattern:
    """A sequence of elements.

    With ``until``, ``elements`` repeat any number of times with white space before each time, until this text takes
    their place; the elements of ``behind`` follow it.
    """

    __slots__ = ("_begins", "_elements", "_repeated", "_until")

    def __init__(self, elements: Sequence[Element], until: str = "", behind: Sequence[Element] = ()) -> None:
        first = [SPACE, *_unambiguous(elements)] if until else _unambiguous(elements)
        self._elements = (*first, *_unambiguous(behind))
        self._until = until
        self._repeated = len(first) if until else 0
        self._begins = first[0] if first and isinstance(first[0], Exact) else None

    def begins(self, text: str, position: int) -> bool:
        """Return whether the character at ``position`` may be the first of a match."""
        return self._begins is None or position >= len(text) or self._begins.may_begin(text[position])

    def match(self, text: str, position: int = 0) -> tuple[Match, Found | None]:
        """Match ``text`` at ``position``; return the result, and the match when it is a full one."""
        attempt = _Attempt(0)
        self.go_on(attempt, text, position)
        return attempt.result, attempt.found(position)

    def go_on(self, attempt: _Attempt, text: str, position: int) -> None:
        """Match more of the text that ``attempt`` began at ``position``; what was decided stays."""
        if attempt.result is not Match.PARTIAL:
            return
        elements, index = self._elements, attempt.index
        at, begun, last = position + attempt.at, position + attempt.begun, len(self._elements)
        while index < last:
            if index == 1 and self._until and text.startswith(self._until, at):
                at = begun = at + len(self._until)
                index = self._repeated
                continue
            element = elements[index]
            end = element.read(text, at, begun)
            if end is None:
                attempt.result = Match.NONE
                return
            if end < 0:
                attempt.index, attempt.at, attempt.begun = index, ~end - position, begun - position
                if len(text) - position >= LONGEST_MARKUP:
                    attempt.result = Match.NONE
                return
            if element.slot:
                attempt.slots[element.slot] = text[begun:end]
            elif element is _END:
                attempt.end = end - position
            at = begun = end
            index = 0 if index + 1 == self._repeated else index + 1
        attempt.result = Match.FULL if at - position <= LONGEST_MARKUP else Match.NONE
        attempt.end = at - position if attempt.end < 0 else attempt.end


class Matching:
    """Matches patterns with text that arrives in pieces.

    Of a text that is held and comes again with more behind it, no pattern reads a character twice.

    Attributes:
        offset: how much text came before the one that is matched now, in characters.
    """

    __slots__ = ("_attempts", "offset")

    def __init__(self) -> None:
        self._attempts: dict[Pattern, _Attempt] = {}
        self.offset = 0

    def forget(self) -> None:
        """Forget the text so far: none of it comes again."""
        self._attempts.clear()

    def match(self, pattern: Pattern, text: str, position: int) -> tuple[Match, Found | None]:
        place = self.offset + position
        attempt = self._attempts.get(pattern)
        if attempt is None or attempt.place != place:
            if not pattern.begins(text, position):
                return Match.NONE, None
            attempt = self._attempts[pattern] = _Attempt(place)
        pattern.go_on(attempt, text, position)
        return attempt.result, attempt.found(position)


def _unambiguous(elements: Sequence[Element]) -> list[Element]:
    """Return elements of which each ends at one place only, whatever follows it."""
    found: list[Element] = []
    for element in elements:
        before = found[-1] if found else None
        if isinstance(element, _Space) and isinstance(before, _Space):
            continue
        if isinstance(element, Exact) and isinstance(before, _Space) and element.text[:1].isspace():
            found[-1], element = _Space(least=1), Exact(element.text.lstrip())
        if isinstance(element, Exact) and element.text:
            at = next((i for i in reversed(range(len(found))) if not isinstance(found[i], _Space)), 0)
            if found and isinstance(slot := found[at], _Slot):
                found[at] = slot.before(element.text)
            if found and found[-1] == SPACE:
                found.pop()
                element = Exact(element.text, spaced=True)
        if element != Exact(""):
            found.append(element)
    while found and isinstance(found[-1], _Space):
        found.pop()
    return found


def literal(text: str) -> list[Element]:
    """Return markup as elements; a line break, and the place beside a tag, is white space or none."""
    elements: list[Element] = []
    for i, line in enumerate(_BREAK.split(text)):
        if i:
            elements.append(SPACE)
        if line:
            elements.append(Exact(line))
    return elements


_ITEMS = {"element": r"[^<>/\s]", "index": r"[0-9]", "type": r"[a-z]", "any": r"[^<\n\ud800-\udfff]",
          "sources": r"[0-9:,\[\] ]"}  # fmt: skip


def slot(name: str, *, quoted: bool = False, again: bool = False) -> Element:
    """Return the element of a slot; ``quoted`` inside a JSON string, ``again`` when the slot was captured before."""
    if name in _ITEMS:
        return _Slot(name if name == "type" else "", _ITEMS[name], least=int(name != "any"))
    group = "" if again else name
    if quoted:
        return _Slot(group, r'[^"\\\x00-\x1f\ud800-\udfff]|\\.')
    blanks = r"\n" if name == "key" else r"\s`'"
    return _Slot(group, rf'[^{blanks}<>{{}}\[\]"\ud800-\udfff]')


def ends_before(*texts: str) -> list[Element]:
    """Return the end of a match, and one of ``texts`` that must follow it."""
    known = tuple(t for t in texts if t)
    return [_END, Either(known)] if known else []


@dataclass(frozen=True)
class _Body:
    """The beginning of a JSON object, or ``closer`` if there is one: then the object may be missing."""

    closer: str
    slot = ""

    def read(self, text: str, at: int, begun: int) -> int | None:
        if not text.startswith("{", begun):
            return Exact(self.closer or "{").read(text, begun, begun)
        end = _SPACES.match(text, max(at, begun + 1)).end()  # type: ignore[union-attr]
        if end == len(text):
            return ~end
        return end + 1 if text[end] in '"}' else None


def ends_before_object(closer: str = "") -> list[Element]:
    """Return the end of a match, and the beginning of a JSON object, or ``closer``, that must follow it."""
    return [_END, _Body(closer)]


@dataclass(frozen=True)
class TextSearch:
    """Finds one of several texts in a text that arrives in pieces.

    Attributes:
        pattern: finds a whole one.
        trigger: finds the first character of one.
        breaks: finds a first character, or another one that is not just the next piece of the text around.
        prefixes: the texts, cut off.
        longest: the length of the longest prefix.
    """

    pattern: re.Pattern[str]
    trigger: re.Pattern[str]
    breaks: re.Pattern[str]
    prefixes: frozenset[str]
    longest: int

    @classmethod
    def of(cls, texts: Collection[str], pattern: str, breaks: str, **more: Any) -> Self:
        """Return the search for ``texts``; ``breaks`` are further characters, as in a set of a pattern."""
        firsts = re.escape("".join(sorted({text[0] for text in texts})))
        return cls(
            pattern=re.compile(pattern),
            trigger=re.compile(f"[{firsts}]" if firsts else r"(?!)"),
            breaks=re.compile(f"[{breaks}{firsts}]"),
            prefixes=frozenset(text[:n] for text in texts for n in range(1, len(text))),
            longest=max(map(len, texts), default=1) - 1,
            **more,
        )

    def held(self, text: str, position: int) -> int:
        """Return the position of text that could still become one of the texts; the end of ``text`` if none could."""
        length = len(text)
        found = self.trigger.search(text, max(position, length - self.longest))
        while found is not None:
            if text[found.start() :] in self.prefixes:
                return found.start()
            found = self.trigger.search(text, found.end())
        return length
