"""Remembered turns set into a rendered prompt by their own tokens, wherever the template printed all that they say.

Where a turn stands is told by what the template writes around it (``Layout``) and by what was said before it. Whether
it is all there is told by reading it with the model's own parser, or, where the template spells a turn in another way
than its model does, by finding all its words in their order. What is not certain stays text.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from singletree.conversation import ToolCall, Turn
from singletree.prompts.added_tokens import GUARD, strip_guards
from singletree.prompts.last_words import TELLING, digest_of_words, last_words, length
from singletree.prompts.opening import Opening
from singletree.prompts.replay import Remembered, canonical, spoken

Parse = Callable[[str, str], Turn]
"""(text, what the prompt had opened before it) -> the turn that it says."""

_MESSAGES = 16
"""How many messages a turn may be."""

_TRIES = 32
"""How often the last words of a turn's beginning are looked for."""

_NEAR = 1 << 16
"""How far behind the last turn the words of the next are looked for, beside as far as they are long themselves."""

_BEYOND = sys.maxsize


@dataclass(frozen=True, slots=True)
class Layout:
    """How a template sets an assistant's turn.

    Attributes:
        headers: what may stand before it. Some templates write none behind a tool's result: the token that ends
            the result stands for it.
        ends: what may end it. Some templates write none: the token that begins what follows stands for it.
    """

    headers: tuple[str, ...]
    ends: tuple[str, ...]

    def last_header(self, text: str, start: int = 0, end: int | None = None) -> tuple[int, str]:
        """Where the last header in ``text`` ends, and which it is; -1 without one."""
        stop = len(text) if end is None else end
        found = ((text.rfind(header, start, stop), header) for header in self.headers)
        return max(((at + len(header), header) for at, header in found if at >= 0), default=(-1, ""))


class Mark(NamedTuple):
    """How far a prompt was when one of the assistant's turns was behind it.

    Attributes:
        turn: the number of the next turn.
        at: where that is looked for.
        done: up to where the text is among the pieces.
        pieces: how many there were.
        reach: how much of the text told where the turns so far stand; what is behind it may be another.
    """

    turn: int = 0
    at: int = 0
    done: int = 0
    pieces: int = 0
    reach: int = 0


@dataclass(frozen=True, slots=True)
class Spliced:
    """A prompt from a mark on: its pieces, text or the tokens in which a turn was generated, and further marks."""

    pieces: list[str | array[int]]
    marks: list[Mark]


def splice(
    text: str,
    turns: Sequence[Turn],
    recalled: Mapping[int, Remembered],
    layout: Layout,
    parse: Parse,
    *,
    guard: Callable[[str], str] = str,
    begin: Mark = Mark(),  # noqa: B008 (immutable)
) -> Spliced:
    """A rendered prompt as text and, where a turn is kept whole, the tokens in which it was generated.

    Args:
        text: the rendered prompt; its markers that come from clients are guarded, so that the layout's are not theirs.
        turns: the conversation that was rendered.
        recalled: the remembered turns by their position in ``turns``.
        guard: what guarded them.
        begin: where to begin: at a mark of an earlier prompt that had the same turns and the same text so far.
    """
    prompt = _Prompt(text, layout, guard, begin)
    pieces: list[str | array[int]] = []
    marks: list[Mark] = []
    done, at = begin.done, begin.at
    certain = False
    for i in range(begin.turn, len(turns)):
        turn = turns[i]
        if turn.role != "assistant":
            behind = prompt.behind(turn, at)
            at, certain = (behind, len(last_words(turn)) >= TELLING) if behind >= 0 else (at, False)
            continue
        known, places = recalled.get(i), prompt.next_turn(at)
        asked = _as_asked(known.opening, turns[i - 1]) if known and certain else ""
        if known and asked:
            prompt.saw(at + len(asked))
            places.append(prompt.place_behind(at, asked, known.opening.header))
        span = next(_kept(prompt, places, known, parse, certain=certain), None) if known else None
        if known and span:
            start = span[0]
            before = (
                text[done:at] + asked
                if _agree(text[at:start], asked)
                else text[done:start] + known.opening.text
            )
            pieces += [before, known.token_ids]
            at = done = span[1]
        elif places:
            at = max([at, *places[0].ends[:1]])
        certain = False
        marks.append(Mark(i + 1, at, done, begin.pieces + len(pieces), prompt.reach))
    return Spliced([*pieces, text[done:]], marks)


def _as_asked(opening: Opening, answered: Turn) -> str:
    """What stood between the last words of ``answered`` and the turn, if it was said in answer to them."""
    return opening.asked if opening.answers == digest_of_words(answered) else ""


def _alike(text: str, at: int, other: str) -> int:
    """How many characters of ``text`` from ``at`` on are those of ``other``, up to the tag in which they part."""
    pairs = zip(text[at : at + len(other)], other, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    opened, closed = (max(other.rfind(mark, 0, same) for mark in marks) for marks in ("<[", ">]"))
    return opened if opened > closed and same < len(other) else same


def _agree(printed: str, asked: str) -> bool:
    """Whether a template means the same by what it prints before a finished turn as by what it asked for it with.

    Some write another line break then, or leave out a header.
    """
    one, other = "".join(printed.split()), "".join(asked.split())
    return bool(other) and (one.startswith(other) or other.startswith(one))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a turn may stand: behind ``header`` from ``start`` on, up to one of ``ends``; ``opened`` is what is printed
    before it.
    """

    header: str
    opened: str
    start: int
    ends: Sequence[int]


def _kept(
    prompt: _Prompt, places: Sequence[_Place], known: Remembered, parse: Parse, *, certain: bool
) -> Iterator[tuple[int, int]]:
    """The spans of the text that say all that the remembered turn says."""
    text = prompt.text
    prompt.saw(max((place.ends[-1] for place in places if place.ends), default=0) + len(known.last_words))
    for place in places:
        if known.opening.header != place.header:
            continue  # what was opened behind another header is not what this one opens
        start, ends = place.start, place.ends
        for end in _ends_of_beginning(text, start, ends, known.last_words) if known.last_words else ends:
            segment = text[start:end]
            judge = partial(_is_kept, segment, place.opened, known, parse, certain=certain)
            if known.answered((_name_of(parse), place.opened, certain), segment, judge):
                yield start, end


def _name_of(parse: Parse) -> Hashable:
    """What tells ``parse`` from others: its ``key`` if it has one, which is kept without all that it reads with."""
    key: Hashable = getattr(parse, "key", parse)
    return key


class _Prompt:
    """A rendered prompt, and where its headers and ends stand, from ``begin`` on.

    Attributes:
        reach: how far anything was looked for.
    """

    def __init__(self, text: str, layout: Layout, guard: Callable[[str], str], begin: Mark) -> None:
        self.text = text
        self._guard = guard
        self._longest = max(map(len, (*layout.headers, *layout.ends)), default=0)
        start = max(0, begin.at - self._longest)
        self._ends = [(at, at + len(end)) for at, end in _places_of(layout.ends, text, start)]
        self._headers = [
            (at, at + len(header), header) for at, header in _places_of(layout.headers, text, start)
        ]
        self.reach = begin.reach

    def saw(self, end: int) -> None:
        """The text was looked at up to ``end``, and up to the end of a marker that begins before it."""
        self.reach = max(self.reach, end + self._longest)

    def behind(self, turn: Turn, at: int) -> int:
        """Where what ``turn`` says last ends, behind ``at``; -1 where it is not found."""
        for part in turn.parts if turn.role == "tool" else (turn,):
            words = last_words(part)
            if not words:
                return -1
            words = self._guard(words).strip(GUARD)
            far = at + _NEAR + 2 * length(part)
            found = self.text.find(words, at, far)
            if found < 0:
                self.saw(far)
                return -1
            at = found + len(words)
            self.saw(at)
        return at

    def next_turn(self, at: int) -> list[_Place]:
        """Where the next assistant turn that begins at or behind ``at`` may stand, the likeliest first.

        An end is certain, a header is not: what stands for one behind a tool's result is none where another result
        follows. So the last one before the end comes first; where a turn is several messages, the first one may be
        its own. It may end with its first message, or with one that follows at once, or with one that is not the
        assistant's by its header.
        """
        first = bisect_left(self._headers, at, key=_end_of)
        if first == len(self._headers):
            self.saw(_BEYOND)
            return []
        end = bisect_left(self._ends, self._headers[first][1], key=_start_of)
        if end == len(self._ends):
            self.saw(_BEYOND)
            return []
        last = bisect_right(self._headers, self._ends[end][0], key=_end_of) - 1
        ends = self._stops(end, last + 1)
        chosen = (self._headers[i] for i in dict.fromkeys((max(first, last), first)))
        return [_Place(header, header, start, ends) for _, start, header in chosen]

    def place_behind(self, at: int, asked: str, header: str) -> _Place:
        """Where a turn may stand that was ``asked`` for at ``at``, whatever is printed there for that.

        Some templates print more or less of it before a turn that is over, or a header that they did not ask with.
        """
        start = at + _alike(self.text, at, asked)
        following = bisect_left(self._headers, start, key=_start_of)
        if following < len(self._headers) and self._headers[following][0] == start:
            start = self._headers[following][1]
            following += 1
        self.saw(start)
        opened = self.text[at:start]
        end = bisect_left(self._ends, start, key=_start_of)
        if end == len(self._ends):
            self.saw(_BEYOND)
            return _Place(header, opened, start, [])
        return _Place(header, opened, start, self._stops(end, following))

    def _stops(self, end: int, header: int) -> list[int]:
        """The starts of the ends from number ``end`` on, as far as they may belong to the turn before ``header``."""
        last = end + _MESSAGES - 1
        stops = [self._ends[end][0]]
        for number in range(end, min(last, len(self._ends) - 1)):
            before, start = self._ends[number][1], self._ends[number + 1][0]
            while header < len(self._headers) and self._headers[header][1] <= start:
                if self._headers[header][0] > before:
                    self.saw(start)
                    return stops
                header += 1
            stops.append(start)
        self.saw(stops[-1] if last < len(self._ends) else _BEYOND)
        return stops


def _start_of(place: tuple[Any, ...]) -> int:
    at: int = place[0]
    return at


def _end_of(place: tuple[Any, ...]) -> int:
    at: int = place[1]
    return at


def _places_of(wanted: Sequence[str], text: str, start: int) -> list[tuple[int, str]]:
    """Where each of ``wanted`` begins from ``start`` on, overlapping ones too; of several at one place the longest.

    A search for one string runs at the speed of memory; a regular expression for several looks at each character.
    """
    found: dict[int, str] = {}
    for each in sorted(wanted, key=len):
        at = start - 1
        while (at := text.find(each, at + 1)) >= 0:
            found[at] = each
    return sorted(found.items())


def _ends_of_beginning(text: str, start: int, stops: Sequence[int], last_words: str) -> Iterator[int]:
    """Where the beginning of the turn at ``start`` may end: behind its last words and their white space."""
    words = last_words.rstrip()
    blank = last_words[len(words) :]
    at = start
    for _ in range(_TRIES if stops else 0):
        found = text.find(words, at, stops[-1])
        if found < 0:
            return
        at = found + len(words)
        yield at + next(size for size in range(len(blank), -1, -1) if text.startswith(blank[:size], at))


def _is_kept(segment: str, opened: str, known: Remembered, parse: Parse, *, certain: bool) -> bool:
    """Whether ``segment`` says all that the remembered turn says.

    Args:
        opened: what is printed before it.
        certain: whether it is sure to be this turn. Then its words are enough, however the template spells what is
            around them (calls in another format, text in the place of reasoning).
    """
    opening = known.opening.text if segment.startswith(known.opening.text) else ""
    printed = parse(segment[len(opening) :], opened + opening)
    return said(printed) == said(known.turn) or (
        certain and not known.last_words and _stands_in(strip_guards(segment), known.turn)
    )


def _stands_in(segment: str, turn: Turn) -> bool:
    """Whether all that ``turn`` says, its calls by their names, is found in ``segment`` in its order."""
    at = 0
    for part in spoken(turn):
        words = part.name if isinstance(part, ToolCall) else part.text.strip()
        found = segment.find(words, at)
        if found < 0:
            return False
        at = found + len(words)
    return True


def said(turn: Turn) -> list[Any]:
    """What a turn says: order counts, spelling and white space at the edges do not."""
    told: list[Any] = []
    for part in spoken(turn):
        if isinstance(part, ToolCall):
            told.append((part.name, canonical(part.arguments, _trimmed), part.complete))
        elif part.text.strip():
            told.append((type(part).__name__, part.text.strip()))
    return told


def _trimmed(value: Any) -> Any:
    """``value`` without the line breaks at the edges of its strings, which belong to the tags in some formats."""
    if isinstance(value, str):
        return value.strip("\n")
    if isinstance(value, dict):
        return {key: _trimmed(each) for key, each in value.items()}
    return [_trimmed(each) for each in value] if isinstance(value, list) else value
