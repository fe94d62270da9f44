"""Puts the tokens of remembered turns into a rendered prompt, where the template printed the whole turn.

A turn is located by the text that the template writes around it (``TurnDelimiters``) and by the anchor of the turn
before it. Whether the whole turn is printed there is decided by parsing the text with the model's own parser, or, where
the template prints a turn in another format than its model writes, by finding all its texts in their order. Whatever is
not certain stays text.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from singletree.conversation import ToolCall, Turn
from singletree.prefixes import common_text_prefix
from singletree.prompts.replay.anchors import MIN_ANCHOR, anchor_digest, anchor_of, text_length
from singletree.prompts.replay.generation_prompt import GenerationPrompt
from singletree.prompts.replay.json_values import canonical_json
from singletree.prompts.replay.turn_comparison import generated_parts
from singletree.prompts.replay.turn_memory import GeneratedTurn
from singletree.prompts.tokenizer.added_tokens import GUARD, strip_guards
from singletree.prompts.tokenizer.encode_prompt import Piece, TextSpan

ParseTurn = Callable[[str, str], Turn]
"""Parses printed text: (text, the text with which the prompt opened the turn) -> the turn."""

_MAX_MESSAGES = 16
"""How many messages one turn can span."""

_MAX_TRIES = 32
"""How many occurrences of the text at the end of a turn's known beginning are tried."""

_SEARCH_WINDOW = 1 << 16
"""How many characters after the last turn the anchor of the next one is searched, plus twice the turn's own length."""

_WHOLE_TEXT = sys.maxsize


@dataclass(frozen=True, slots=True)
class TurnDelimiters:
    """The texts with which a template delimits an assistant's turn.

    Attributes:
        headers: texts that can open it. Some templates write none after a tool's result: there it is the token that
            ends the result.
        ends: texts that can end it. Some templates write none: there it is the token that begins what follows.
    """

    headers: tuple[str, ...]
    ends: tuple[str, ...]

    def last_header(self, text: str, start: int = 0, end: int | None = None) -> tuple[int, str]:
        """Return the end of the last header in ``text[start:end]``, and the header; (-1, "") without one."""
        stop = len(text) if end is None else end
        found = ((text.rfind(header, start, stop), header) for header in self.headers)
        return max(((at + len(header), header) for at, header in found if at >= 0), default=(-1, ""))


class SplicePoint(NamedTuple):
    """The state of splicing after one of the assistant's turns, from which a longer prompt continues.

    Attributes:
        turn: the index of the next turn.
        position: the position in the text from which it is searched.
        consumed: the position up to which the text is in the pieces.
        pieces: the number of pieces so far.
        reach: the position up to which the text was read to locate the turns so far; the text after it may change.
    """

    turn: int = 0
    position: int = 0
    consumed: int = 0
    pieces: int = 0
    reach: int = 0


@dataclass(frozen=True, slots=True)
class Spliced:
    """A prompt from a point on: its pieces, and the points after it."""

    pieces: list[Piece]
    points: list[SplicePoint]


def splice(
    text: str,
    turns: Sequence[Turn],
    recalled: Mapping[int, GeneratedTurn],
    delimiters: TurnDelimiters,
    parse: ParseTurn,
    *,
    guard: Callable[[str], str] = str,
    begin: SplicePoint = SplicePoint(),  # noqa: B008 (immutable)
) -> Spliced:
    """Replace the text of remembered turns in a rendered prompt by their tokens, where the whole turn is printed.

    Args:
        text: the rendered prompt. Markers in text of clients are guarded, so that they are not taken for delimiters.
        turns: the conversation that was rendered.
        recalled: the remembered turns, by their index in ``turns``.
        delimiters: the delimiters of the assistant's turns.
        parse: the model's parser.
        guard: the guard that was applied to text of clients.
        begin: a point of an earlier prompt that had the same turns and the same text up to its ``reach``.
    """
    prompt = _Prompt(text, delimiters, guard, begin)
    pieces: list[Piece] = []
    points: list[SplicePoint] = []
    consumed, at = begin.consumed, begin.position
    certain = False
    for i in range(begin.turn, len(turns)):
        turn = turns[i]
        if turn.role != "assistant":
            end = prompt.end_of_turn(turn, at)
            at, certain = (end, len(anchor_of(turn)) >= MIN_ANCHOR) if end >= 0 else (at, False)
            continue
        known, places = recalled.get(i), prompt.next_places(at)
        expected = _generation_prompt_after(known.opening, turns[i - 1]) if known and certain else ""
        if known and expected:
            prompt.extend_reach(at + len(expected))
            places.append(prompt.place_after(at, expected, known.opening.header))
        span = next(_whole_spans(prompt, places, known, parse, certain=certain), None) if known else None
        if known and span:
            start = span[0]
            before = (
                TextSpan(consumed, at, expected)
                if _is_same_opening(text[at:start], expected)
                else TextSpan(consumed, start, known.opening.text)
            )
            pieces += [before, known.token_ids]
            at = consumed = span[1]
        elif places:
            at = max([at, *places[0].ends[:1]])
        certain = False
        points.append(SplicePoint(i + 1, at, consumed, begin.pieces + len(pieces), prompt.reach))
    return Spliced([*pieces, TextSpan(consumed, len(text))], points)


def _generation_prompt_after(opening: GenerationPrompt, previous: Turn) -> str:
    """Return the text between the anchor of ``previous`` and the turn, if the turn was generated after that anchor."""
    return opening.since_anchor if opening.anchor_digest == anchor_digest(anchor_of(previous)) else ""


def _common_length(text: str, at: int, other: str) -> int:
    """Return the common prefix length of ``text[at:]`` and ``other``; a tag in which they differ does not count."""
    same = common_text_prefix(text[at : at + len(other)], other)
    opened, closed = (max(other.rfind(bracket, 0, same) for bracket in brackets) for brackets in ("<[", ">]"))
    return opened if opened > closed and same < len(other) else same


def _is_same_opening(printed: str, expected: str) -> bool:
    """Return whether the text printed before a finished turn has the meaning of the text ``expected`` before it.

    Before a finished turn, some templates write another line break, or leave out a header.
    """
    one, other = "".join(printed.split()), "".join(expected.split())
    return bool(other) and (one.startswith(other) or other.startswith(one))


@dataclass(frozen=True, slots=True)
class _Place:
    """A candidate for the place of a turn in the text.

    Attributes:
        header: the header before it.
        opened: the text that is printed directly before it.
        start: the position at which it begins.
        ends: the positions at which it can end.
    """

    header: str
    opened: str
    start: int
    ends: Sequence[int]


def _whole_spans(
    prompt: _Prompt, places: Sequence[_Place], known: GeneratedTurn, parse: ParseTurn, *, certain: bool
) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of each span of the text that prints the whole remembered turn."""
    text = prompt.text
    prompt.extend_reach(
        max((place.ends[-1] for place in places if place.ends), default=0) + len(known.ending)
    )
    for place in places:
        if known.opening.header != place.header:
            continue  # a turn opened by another header is a different turn
        start, ends = place.start, place.ends
        for end in _ends_of_beginning(text, start, ends, known.ending) if known.ending else ends:
            segment = text[start:end]
            compare = partial(_is_printed_whole, segment, place.opened, known, parse, certain=certain)
            if known.memoized((parser_key(parse), place.opened, certain), segment, compare):
                yield start, end


def parser_key(parse: ParseTurn) -> Hashable:
    """Return the identity of a parser: its ``key`` if it has one, so that a memo does not keep the parser alive."""
    key: Hashable = getattr(parse, "key", parse)
    return key


class _Prompt:
    """A rendered prompt with the positions of its headers and ends, from ``begin`` on.

    Attributes:
        reach: the position up to which the text was read.
    """

    def __init__(
        self, text: str, delimiters: TurnDelimiters, guard: Callable[[str], str], begin: SplicePoint
    ) -> None:
        self.text = text
        self._guard = guard
        self._longest = max(map(len, (*delimiters.headers, *delimiters.ends)), default=0)
        start = max(0, begin.position - self._longest)
        self._ends = [(at, at + len(end)) for at, end in _occurrences(delimiters.ends, text, start)]
        self._headers = [
            (at, at + len(header), header) for at, header in _occurrences(delimiters.headers, text, start)
        ]
        self.reach = begin.reach

    def extend_reach(self, end: int) -> None:
        """Record that the text was read up to ``end``, and up to the end of a delimiter that begins before it."""
        self.reach = max(self.reach, end + self._longest)

    def end_of_turn(self, turn: Turn, at: int) -> int:
        """Return the end of the last anchor of ``turn`` after position ``at``; -1 where an anchor is not found."""
        for part in turn.parts if turn.role == "tool" else (turn,):
            anchor = anchor_of(part)
            if not anchor:
                return -1
            anchor = self._guard(anchor).strip(GUARD)
            far = at + _SEARCH_WINDOW + 2 * text_length(part)
            found = self.text.find(anchor, at, far)
            if found < 0:
                self.extend_reach(far)
                return -1
            at = found + len(anchor)
            self.extend_reach(at)
        return at

    def next_places(self, at: int) -> list[_Place]:
        """Return the places where the next assistant turn at or after ``at`` can stand, the most likely first.

        An end is certain, a header is not: where the end of a tool's result serves as the header
        (``TurnDelimiters.headers``), it is no header if another result follows, as in ``call<E>one<R>two<R>answer<E>``,
        where only the second ``<R>`` opens the answer. So the last header before the end comes first. Where a turn
        spans several messages, the first header can be its own; the turn can end with its first message, with a
        message that follows directly, or with one whose header is not the assistant's.
        """
        first = bisect_left(self._headers, at, key=_end_of)
        if first == len(self._headers):
            self.extend_reach(_WHOLE_TEXT)
            return []
        end = bisect_left(self._ends, self._headers[first][1], key=_start_of)
        if end == len(self._ends):
            self.extend_reach(_WHOLE_TEXT)
            return []
        last = bisect_right(self._headers, self._ends[end][0], key=_end_of) - 1
        ends = self._stops(end, last + 1)
        chosen = (self._headers[i] for i in dict.fromkeys((max(first, last), first)))
        return [_Place(header, header, start, ends) for _, start, header in chosen]

    def place_after(self, at: int, expected: str, header: str) -> _Place:
        """Return the place of a turn for which the prompt had the text ``expected`` at ``at``.

        Before a finished turn, some templates print more or less of that text, or another header.
        """
        start = at + _common_length(self.text, at, expected)
        following = bisect_left(self._headers, start, key=_start_of)
        if following < len(self._headers) and self._headers[following][0] == start:
            start = self._headers[following][1]
            following += 1
        self.extend_reach(start)
        opened = self.text[at:start]
        end = bisect_left(self._ends, start, key=_start_of)
        if end == len(self._ends):
            self.extend_reach(_WHOLE_TEXT)
            return _Place(header, opened, start, [])
        return _Place(header, opened, start, self._stops(end, following))

    def _stops(self, end: int, header: int) -> list[int]:
        """Return the starts of the ends from index ``end`` on that can belong to the turn before ``header``."""
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


def _start_of(place: tuple[Any, ...]) -> int:
    at: int = place[0]
    return at


def _end_of(place: tuple[Any, ...]) -> int:
    at: int = place[1]
    return at


def _occurrences(wanted: Sequence[str], text: str, start: int) -> list[tuple[int, str]]:
    """Return the position of each occurrence of ``wanted`` from ``start`` on, and which string it is.

    Occurrences may overlap; of several at one position it is the longest.

    A search for one string runs at the speed of memory; a regular expression for several looks at each character.
    """
    found: dict[int, str] = {}
    for string in sorted(wanted, key=len):
        at = start - 1
        while (at := text.find(string, at + 1)) >= 0:
            found[at] = string
    return sorted(found.items())


def _ends_of_beginning(text: str, start: int, stops: Sequence[int], ending: str) -> Iterator[int]:
    """Yield the positions at which the known beginning of the turn at ``start`` can end: after ``ending``."""
    stripped = ending.rstrip()
    blank = ending[len(stripped) :]
    segment = text[start : stops[-1]] if stops else ""
    plain = strip_guards(segment)
    # The generated text has no guards; the printed text may have some.
    offsets = [i for i, c in enumerate(segment) if c != GUARD] if len(plain) < len(segment) else None
    end = 0
    for _ in range(_MAX_TRIES if stops else 0):
        found = plain.find(stripped, end)
        if found < 0:
            return
        end = found + len(stripped)
        at = start + (end if offsets is None else offsets[end - 1] + 1)
        yield at + next(size for size in range(len(blank), -1, -1) if text.startswith(blank[:size], at))


def _is_printed_whole(
    segment: str, opened: str, known: GeneratedTurn, parse: ParseTurn, *, certain: bool
) -> bool:
    """Return whether ``segment`` prints the whole remembered turn.

    Args:
        opened: the text that is printed before it.
        certain: whether the place is certain to be this turn's. Then it is enough that its texts are found, whatever
            format the template uses (calls in another format, text in the place of reasoning).
    """
    opening = known.opening.text if segment.startswith(known.opening.text) else ""
    printed = parse(segment[len(opening) :], opened + opening)
    return comparable_parts(printed) == comparable_parts(known.turn) or (
        certain and not known.ending and _contains_texts(strip_guards(segment), known.turn)
    )


def _contains_texts(segment: str, turn: Turn) -> bool:
    """Return whether ``segment`` contains the texts of ``turn`` and the names of its calls, in their order."""
    at = 0
    for part in generated_parts(turn):
        text = part.name if isinstance(part, ToolCall) else part.text.strip()
        found = segment.find(text, at)
        if found < 0:
            return False
        at = found + len(text)
    return True


def comparable_parts(turn: Turn) -> list[Any]:
    """Return the content of a turn, for comparison: order counts; JSON formatting and white space at edges do not."""
    parts: list[Any] = []
    for part in generated_parts(turn):
        if isinstance(part, ToolCall):
            parts.append((part.name, canonical_json(part.arguments, _trimmed), part.complete))
        elif part.text.strip():
            parts.append((type(part).__name__, part.text.strip()))
    return parts


def _trimmed(value: Any) -> Any:
    """Return ``value`` without the line breaks at the edges of its strings: in some formats they belong to the tags."""
    if isinstance(value, str):
        return value.strip("\n")
    if isinstance(value, dict):
        return {key: _trimmed(item) for key, item in value.items()}
    return [_trimmed(item) for item in value] if isinstance(value, list) else value
