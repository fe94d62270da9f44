"""Encodes a prompt that consists of text and of the tokens of remembered turns."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import NamedTuple, TypeAlias

from singletree.prefixes import identical_prefix
from singletree.prompts.tokenizer.tokenizer import TextCheckpoint, Tokenizer


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A part of a rendered prompt that stays text.

    Attributes:
        start: its first character in the prompt.
        end: the first character behind it.
        opening: text that follows in place of what the template printed there: the opening of the remembered turn.
    """

    start: int
    end: int
    opening: str = ""

    def text_in(self, prompt: str) -> str:
        """Return the text in the rendered ``prompt``."""
        return prompt[self.start : self.end] + self.opening


Piece: TypeAlias = "TextSpan | array[int]"
"""A piece of a prompt: text, or the tokens of a remembered turn."""


@dataclass(frozen=True, slots=True)
class PromptPieces:
    """A rendered prompt with the tokens of remembered turns in their places.

    Attributes:
        text: the rendered prompt.
        pieces: text and tokens in turn; the last piece is text. A longer prompt has the same objects for the pieces
            whose text and tokens it has in common with this one.
    """

    text: str
    pieces: Sequence[Piece]

    @property
    def replayed(self) -> int:
        """Return the number of turns that are in the prompt by their own tokens."""
        return len(self.pieces) // 2


@dataclass(frozen=True, slots=True)
class EncodeCheckpoint:
    """An encoded prompt.

    Attributes:
        pieces: its pieces, without the last.
        ends: the number of tokens up to the end of each of them.
        tail: the last piece; its ``token_ids`` are all tokens of the prompt.
    """

    pieces: Sequence[Piece]
    ends: list[int]
    tail: TextCheckpoint

    @property
    def bytes(self) -> int:
        """Return about how much memory it takes, in bytes, without the tokens of remembered turns."""
        ends = _END_BYTES * (len(self.ends) + len(self.tail.ends))
        return getsizeof(self.tail.token_ids) + getsizeof(self.tail.text) + ends


_END_BYTES = 100


class EncodedPrompt(NamedTuple):
    """The tokens of a prompt, and the number of tokens up to the end of each piece but the last."""

    token_ids: array[int]
    ends: Sequence[int]


@dataclass(frozen=True, slots=True)
class EncodePrompt:
    """The stage that encodes the pieces of a prompt.

    Attributes:
        tokenizer: the model's tokenizer.
    """

    tokenizer: Tokenizer

    def run(
        self, prompt: PromptPieces, checkpoint: EncodeCheckpoint | None
    ) -> tuple[EncodedPrompt, EncodeCheckpoint]:
        """Encode the pieces that ``checkpoint`` does not have, and of the last piece the text that is new."""
        *pieces, last = prompt.pieces
        assert isinstance(last, TextSpan)
        text = last.text_in(prompt.text)
        if checkpoint is None:
            same, ends, token_ids, before = 0, [], array("I"), None
        else:
            before = checkpoint.tail
            same = identical_prefix(checkpoint.pieces, pieces)
            if same == len(pieces) == len(checkpoint.pieces) and text == before.text:
                return EncodedPrompt(before.token_ids, checkpoint.ends), checkpoint
            ends = checkpoint.ends[:same]
            token_ids = before.token_ids[: ends[-1] if ends else 0]
        for piece in pieces[same:]:
            token_ids.extend(
                self.tokenizer.encode_array(piece.text_in(prompt.text))
                if isinstance(piece, TextSpan)
                else piece
            )
            ends.append(len(token_ids))
        tail = self.tokenizer.encode_incremental(text, before, token_ids)
        return EncodedPrompt(token_ids, ends), EncodeCheckpoint(pieces, ends, tail)
