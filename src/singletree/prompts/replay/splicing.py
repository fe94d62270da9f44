"""Puts the tokens of remembered turns into a rendered prompt, where the template printed the whole turn.

``turn_places`` finds where a turn can stand. Whether the whole turn is printed there is decided by parsing the text
with the model's own parser, or, where the template prints a turn in another format than its model writes, by finding
all its texts in their order. Whatever is not certain stays text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from singletree.conversation import ToolCall, Turn
from singletree.prefixes import common_prefix, common_text_prefix, identical_prefix
from singletree.prompts.replay.recall import Recalled
from singletree.prompts.replay.turn_comparison import canonical_json, generated_parts, with_joined_texts
from singletree.prompts.replay.turn_memory import GeneratedTurn, GenerationPrompt
from singletree.prompts.replay.turn_places import (
    MIN_ANCHOR,
    PlaceSearch,
    TurnDelimiters,
    TurnPlace,
    anchor_digest,
    anchor_of,
)
from singletree.prompts.tokenizer.added_tokens import GUARD, strip_guards
from singletree.prompts.tokenizer.encode_prompt import Piece, PromptPieces, TextSpan

ParseTurn = Callable[[str, str], Turn]
"""Parses printed text: (text, the text with which the prompt opened the turn) -> the turn."""

_HEAD_TURNS = 8
"""How many turns before the first of the assistant are searched in all the text before it, however long it is."""

_MAX_TRIES = 32
"""How many occurrences of the text at the end of a turn's known beginning are tried."""


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


class RenderedTurns(NamedTuple):
    """A rendered prompt, and the conversation in it with its remembered turns."""

    text: str
    known: Recalled


class SpliceCheckpoint(NamedTuple):
    """The prompt ``given``, with the tokens of remembered turns in their places, and the places behind its turns.

    ``key`` is the ``parser_key`` of the parser that compared its turns; None where none is remembered.
    """

    given: RenderedTurns
    key: Hashable
    pieces: Sequence[Piece]
    points: list[SplicePoint]

    @property
    def bytes(self) -> int:
        return _POINT_BYTES * (len(self.points) + len(self.pieces))


_POINT_BYTES = 150


@dataclass(frozen=True, slots=True)
class SpliceTurns:
    """The stage that puts the tokens of remembered turns in the place of their text, where the whole turn is printed.

    ``delimiters`` is None if turns cannot be separated; ``guard`` was applied to text of clients.
    """

    delimiters: TurnDelimiters | None
    parse: ParseTurn
    guard: Callable[[str], str] = str

    def run(
        self, prompt: RenderedTurns, checkpoint: SpliceCheckpoint | None
    ) -> tuple[PromptPieces, SpliceCheckpoint]:
        text, known = prompt
        if self.delimiters is None or not known.turns:
            pieces: list[Piece] = [TextSpan(0, len(text))]
            return PromptPieces(text, pieces), SpliceCheckpoint(prompt, None, pieces, [])
        key = parser_key(self.parse)
        points: list[SplicePoint] = []
        pieces = []
        begin = SplicePoint()
        if checkpoint is not None and checkpoint.key == key:
            points = _common_points(checkpoint, prompt)
            begin = points[-1] if points else begin
            pieces += checkpoint.pieces[: begin.pieces]
        turns = known.conversation.turns
        spliced = splice(text, turns, known.turns, self.delimiters, self.parse, guard=self.guard, begin=begin)
        pieces += spliced.pieces
        made = SpliceCheckpoint(prompt, key, pieces, [*points, *spliced.points])
        return PromptPieces(text, pieces), made


def _common_points(checkpoint: SpliceCheckpoint, prompt: RenderedTurns) -> list[SplicePoint]:
    one, other = checkpoint.given.known, prompt.known
    turns = common_prefix(one.conversation.turns, other.conversation.turns)
    places, other_places = sorted(one.turns), sorted(other.turns)
    same = min(identical_prefix(one.in_order, other.in_order), common_prefix(places, other_places))
    turns = min([turns, *places[same : same + 1], *other_places[same : same + 1]])
    characters = common_text_prefix(checkpoint.given.text, prompt.text)
    # Both rise from point to point.
    end = bisect_right(checkpoint.points, turns, key=attrgetter("turn"))
    end = bisect_right(checkpoint.points, characters, hi=end, key=attrgetter("reach"))
    return checkpoint.points[:end]


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

    ``recalled`` has the remembered turns, by their index in ``turns``; ``guard`` was applied to text of clients, so
    that markers in it are not taken for delimiters. ``begin`` is a point of an earlier prompt that had the same turns
    and the same text up to its ``reach``.
    """
    prompt = PlaceSearch(text, delimiters, guard, begin.position, begin.reach)
    pieces: list[Piece] = []
    points: list[SplicePoint] = []
    consumed, at = begin.consumed, begin.position
    certain, in_head = False, begin.turn == 0
    for i in range(begin.turn, len(turns)):
        turn = turns[i]
        if turn.role != "assistant":
            end = prompt.end_of_turn(turn, at, in_head=in_head and i < _HEAD_TURNS)
            at, certain = (end, len(anchor_of(turn)) >= MIN_ANCHOR) if end >= 0 else (at, False)
            continue
        in_head = False
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


def _is_same_opening(printed: str, expected: str) -> bool:
    """Before a finished turn, some templates write another line break, or leave out a header."""
    one, other = "".join(printed.split()), "".join(expected.split())
    return bool(other) and (one.startswith(other) or other.startswith(one))


_MEMO_CHARACTERS = 16
"""How many characters a token of a turn may have where the comparison of its text is remembered."""


def _whole_spans(
    prompt: PlaceSearch, places: Sequence[TurnPlace], known: GeneratedTurn, parse: ParseTurn, *, certain: bool
) -> Iterator[tuple[int, int]]:
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
            # A turn that is not printed whole is looked for up to the end of the prompt: its memo must not keep that.
            is_short = len(segment) <= _MEMO_CHARACTERS * (len(known.token_ids) + len(known.ending) + 1)
            key = (parser_key(parse), place.opened, certain)
            if known.memoized(key, segment, compare) if is_short else compare():
                yield start, end


def parser_key(parse: ParseTurn) -> Hashable:
    """Return the identity of a parser: its ``key`` if it has one, so that a memo does not keep the parser alive."""
    key: Hashable = getattr(parse, "key", parse)
    return key


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
    """Return whether ``segment``, before which ``opened`` is printed, prints the whole remembered turn.

    If the place is ``certain`` to be this turn's, it is enough that its texts are found, whatever format the template
    uses (calls in another format, text in the place of reasoning).
    """
    opening = known.opening.text if segment.startswith(known.opening.text) else ""
    printed = parse(segment[len(opening) :], opened + opening)
    if not all(map(_may_have_id, printed.tool_calls, known.turn.tool_calls)):
        return False  # the template numbers calls itself, and does so in their results
    return comparable_parts(printed) == comparable_parts(known.turn) or (
        certain and not known.ending and _contains_texts(strip_guards(segment), known.turn)
    )


def _may_have_id(printed: ToolCall, generated: ToolCall) -> bool:
    """Return whether a printed call has the id that the model wrote, as far as both have one behind the name."""
    one, other = (call.written_id.rpartition(call.name)[2] for call in (printed, generated))
    return not one or not other or one == other


def _contains_texts(segment: str, turn: Turn) -> bool:
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
    for part in with_joined_texts(generated_parts(turn)):
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
