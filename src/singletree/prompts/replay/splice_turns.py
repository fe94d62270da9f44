"""Puts the tokens of remembered turns into a prompt that grows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from singletree.prefixes import common_prefix, common_text_prefix, identical_prefix
from singletree.prompts.replay.recall import Recalled
from singletree.prompts.replay.splicing import (
    ParseTurn,
    SplicePoint,
    TurnDelimiters,
    parser_key,
    splice,
)
from singletree.prompts.tokenizer.encode_prompt import Piece, PromptPieces, TextSpan


class RenderedTurns(NamedTuple):
    """A rendered prompt, and the conversation in it with its remembered turns."""

    text: str
    known: Recalled


class SpliceCheckpoint(NamedTuple):
    """A prompt with the tokens of remembered turns in their places.

    Attributes:
        given: the prompt.
        key: ``parser_key`` of the parser that compared its turns; None where none is remembered.
        pieces: the pieces of the prompt.
        points: the places behind its turns, from which a longer prompt goes on.
    """

    given: RenderedTurns
    key: Hashable
    pieces: Sequence[Piece]
    points: list[SplicePoint]

    @property
    def bytes(self) -> int:
        """Return about how much memory it takes, in bytes, without the text of the prompt and the remembered turns."""
        return _POINT_BYTES * (len(self.points) + len(self.pieces))


_POINT_BYTES = 150


@dataclass(frozen=True, slots=True)
class SpliceTurns:
    """The stage that puts the tokens of remembered turns in the place of their text, where the whole turn is printed.

    Attributes:
        delimiters: what the template writes around an assistant's turn; None if turns cannot be separated.
        parse: the model's parser.
        guard: the guard that was applied to text of clients.
    """

    delimiters: TurnDelimiters | None
    parse: ParseTurn
    guard: Callable[[str], str] = str

    def run(
        self, prompt: RenderedTurns, checkpoint: SpliceCheckpoint | None
    ) -> tuple[PromptPieces, SpliceCheckpoint]:
        """Locate the turns behind the last point that the prompt has in common with ``checkpoint``."""
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
    """Return the points of ``checkpoint`` up to which ``prompt`` is the same."""
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
