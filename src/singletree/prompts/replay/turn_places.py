"""Finds where turns stand in a rendered prompt, by the texts around a turn and by the anchor of the turn before it.

An anchor is the last line of a turn's text.
"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from singletree.conversation import Part, Text, ToolResult, Turn
from singletree.prefixes import common_text_prefix
from singletree.prompts.tokenizer.added_tokens import GUARD

MIN_ANCHOR = 6
"""An anchor shorter than this many characters could be text of the template itself."""

_MAX_ANCHOR = 200
"""The most characters of a turn that are searched for in the prompt."""

_MAX_MESSAGES = 16
"""How many messages one turn can span."""

_SEARCH_WINDOW = 1 << 16
"""How many characters after the last turn the anchor of the next one is searched, plus twice the turn's own length."""

_WHOLE_TEXT = sys.maxsize


def anchor_of(item: Turn | Part) -> str:
    """Return the end of the last line of text; empty where there is none. No template writes anything into a line."""
    if isinstance(item, Text):
        lines = item.text.rstrip()[-_MAX_ANCHOR:].splitlines()
        return lines[-1].strip() if lines else ""
    inner = item.parts if isinstance(item, Turn | ToolResult) else ()
    return next(filter(None, map(anchor_of, reversed(inner))), "")


def text_length(item: Turn | Part) -> int:
    """Return the length of the text in a turn or part, in characters."""
    if isinstance(item, Text):
        return len(item.text)
    return sum(map(text_length, item.parts)) if isinstance(item, Turn | ToolResult) else 0


def anchor_digest(anchor: str) -> str:
    """Return a digest of ``anchor``, as hexadecimal text."""
    return hashlib.blake2b(anchor.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def anchor_end(prompt: str, anchor: str) -> int:
    """Return the position after the last ``anchor``; 0 where it is not found, or could be text of the template."""
    found = prompt.rfind(anchor) if len(anchor) >= MIN_ANCHOR else -1
    return found + len(anchor) if found >= 0 else 0


@dataclass(frozen=True, slots=True)
class TurnDelimiters:
    """The texts with which a template delimits an assistant's turn.

    Some templates write no header after a tool's result: there it is the token that ends the result. Some write no end:
    there it is the token that begins what follows.
    """

    headers: tuple[str, ...]
    ends: tuple[str, ...]

    def last_header(self, text: str, start: int = 0) -> tuple[int, str]:
        """Return the end of the last header in ``text[start:]``, and the header; (-1, "") without one."""
        found = ((text.rfind(header, start), header) for header in self.headers)
        return max(((at + len(header), header) for at, header in found if at >= 0), default=(-1, ""))


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """A place where a turn can stand, from ``start`` to one of ``ends``; ``opened`` is the text directly before it."""

    header: str
    opened: str
    start: int
    ends: Sequence[int]


class PlaceSearch:
    """Finds turns in a rendered prompt, from ``begin`` on. ``reach`` is the position up to which the text was read."""

    def __init__(
        self, text: str, delimiters: TurnDelimiters, guard: Callable[[str], str], begin: int, reach: int
    ) -> None:
        self.text = text
        self._guard = guard
        self._longest = max(map(len, (*delimiters.headers, *delimiters.ends)), default=0)
        start = max(0, begin - self._longest)
        self._ends = [(at, at + len(end)) for at, end in _occurrences(delimiters.ends, text, start)]
        self._headers = [
            (at, at + len(header), header) for at, header in _occurrences(delimiters.headers, text, start)
        ]
        self.reach = reach

    def extend_reach(self, end: int) -> None:
        """The text was read up to ``end``, and up to the end of a delimiter that begins before it."""
        self.reach = max(self.reach, end + self._longest)

    def end_of_turn(self, turn: Turn, at: int, *, in_head: bool = False) -> int:
        """Return the end of the last anchor of ``turn`` after position ``at``; -1 where an anchor is not found.

        A turn ``in_head`` stands before the first header. Tools, which have any length, can stand before the turn.
        """
        for part in turn.parts if turn.role == "tool" else (turn,):
            anchor = anchor_of(part)
            if not anchor:
                return -1
            anchor = self._guard(anchor).strip(GUARD)
            far = at + _SEARCH_WINDOW + 2 * text_length(part)
            if in_head and self._headers:
                far = max(far, self._headers[0][0])
            found = self.text.find(anchor, at, far)
            if found < 0:
                self.extend_reach(far)
                return -1
            at = found + len(anchor)
            self.extend_reach(at)
        return at

    def next_places(self, at: int) -> list[TurnPlace]:
        """Return the places where the next assistant turn at or after ``at`` can stand, the most likely first.

        An end is certain, a header is not: where the end of a tool's result serves as the header
        (``TurnDelimiters.headers``), it is no header if another result follows, as in ``call<E>one<R>two<R>answer<E>``,
        where only the second ``<R>`` opens the answer. So the last header before the end comes first. Where a turn
        spans several messages, the first header can be its own; the turn can end with its first message, with a
        message that follows directly, or with one whose header is not the assistant's.
        """
        first = bisect_left(self._headers, at, key=itemgetter(1))
        start = self._headers[first][1] if first < len(self._headers) else _WHOLE_TEXT
        end = bisect_left(self._ends, start, key=itemgetter(0))
        if end == len(self._ends):
            self.extend_reach(_WHOLE_TEXT)
            return []
        last = bisect_right(self._headers, self._ends[end][0], key=itemgetter(1)) - 1
        ends = self._stops(end, last + 1)
        chosen = (self._headers[i] for i in dict.fromkeys((max(first, last), first)))
        return [TurnPlace(header, header, start, ends) for _, start, header in chosen]

    def place_after(self, at: int, expected: str, header: str) -> TurnPlace:
        """Return the place behind ``expected``, of which some templates print more or less before a finished turn."""
        start = at + _common_length(self.text, at, expected)
        following = bisect_left(self._headers, start, key=itemgetter(0))
        if following < len(self._headers) and self._headers[following][0] == start:
            start = self._headers[following][1]
            following += 1
        self.extend_reach(start)
        opened = self.text[at:start]
        end = bisect_left(self._ends, start, key=itemgetter(0))
        return TurnPlace(header, opened, start, self._stops(end, following))

    def _stops(self, end: int, header: int) -> list[int]:
        """Return the starts of the ends from index ``end`` on that can belong to the turn before ``header``."""
        if end == len(self._ends):
            self.extend_reach(_WHOLE_TEXT)
            return []
        last = end + _MAX_MESSAGES - 1
        stops = [self._ends[end][0]]
        for number in range(end, min(last, len(self._ends) - 1)):
            before, start = self._ends[number][1], self._ends[number + 1][0]
            while header < len(self._headers) and self._headers[header][1] <= start:
                if self._headers[header][0] > before:
                    self.extend_reach(start)
                    return stops
                header += 1
            stops.append(start)
        self.extend_reach(stops[-1] if last < len(self._ends) else _WHOLE_TEXT)
        return stops


def _common_length(text: str, at: int, other: str) -> int:
    """Return the common prefix length of ``text[at:]`` and ``other``; a tag in which they differ does not count."""
    same = common_text_prefix(text[at : at + len(other)], other)
    opened, closed = (max(other.rfind(bracket, 0, same) for bracket in brackets) for brackets in ("<[", ">]"))
    return opened if opened > closed and same < len(other) else same


def _occurrences(wanted: Sequence[str], text: str, start: int) -> list[tuple[int, str]]:
    """Return the position of each occurrence of ``wanted`` from ``start`` on, and which string it is.

    Occurrences may overlap; of several at one position it is the longest. A search for one string runs at the speed of
    memory; a regular expression for several looks at each character.
    """
    found: dict[int, str] = {}
    for string in sorted(wanted, key=len):
        at = start - 1
        while (at := text.find(string, at + 1)) >= 0:
            found[at] = string
    return sorted(found.items())
