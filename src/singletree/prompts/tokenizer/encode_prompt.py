"""Encodes a prompt that consists of text and of the tokens of remembered turns."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import TypeAlias

from singletree.prefixes import identical_prefix
from singletree.prompts.tokenizer.tokenizer import TextCheckpoint, Tokenizer


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Text of a rendered prompt; ``opening``, of a remembered turn, replaces what the template printed after it."""

    start: int
    end: int
    opening: str = ""

    def text_in(self, prompt: str) -> str:
        return prompt[self.start : self.end] + self.opening


Piece: TypeAlias = "TextSpan | array[int]"
"""A piece of a prompt: text, or the tokens of a remembered turn."""


@dataclass(frozen=True, slots=True)
class PromptPieces:
    """A rendered prompt with the tokens of remembered turns in their places.

    Text and tokens alternate; the last piece is text. A longer prompt has the same objects for the pieces whose text
    and tokens it has in common with this one.
    """

    text: str
    pieces: Sequence[Piece]

    @property
    def replayed(self) -> int:
        """Return the number of turns that are in the prompt by their own tokens."""
        return len(self.pieces) // 2


_END_BYTES = 100


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """An encoded prompt, which is the checkpoint of its stage as well.

    ``ends`` has the number of tokens up to the end of each piece but the last, the ``tail``. Its ``token_ids`` are all
    tokens of the prompt.
    """

    pieces: Sequence[Piece]
    ends: list[int]
    tail: TextCheckpoint

    @property
    def bytes(self) -> int:
        ends = _END_BYTES * (len(self.ends) + len(self.tail.ends))
        return getsizeof(self.tail.token_ids) + getsizeof(self.tail.text) + ends


@dataclass(frozen=True, slots=True)
class EncodePrompt:
    """The stage that encodes the pieces of a prompt."""

    tokenizer: Tokenizer

    def run(
        self, prompt: PromptPieces, checkpoint: EncodedPrompt | None
    ) -> tuple[EncodedPrompt, EncodedPrompt]:
        *pieces, last = prompt.pieces
        assert isinstance(last, TextSpan)
        text = last.text_in(prompt.text)
        same, ends, token_ids, before = 0, [], array("I"), None
        if checkpoint is not None:
            before = checkpoint.tail
            same = identical_prefix(checkpoint.pieces, pieces)
            if same == len(pieces) == len(checkpoint.pieces) and text == before.text:
                return checkpoint, checkpoint
            ends = checkpoint.ends[:same]
            token_ids = before.token_ids[: ends[-1] if ends else 0]
        for piece in pieces[same:]:
            if isinstance(piece, TextSpan):
                # The text before a turn that came back was in the tail of the last prompt.
                self.tokenizer.encode_incremental(piece.text_in(prompt.text), before, token_ids)
            else:
                token_ids.extend(piece)
            ends.append(len(token_ids))
        tail = self.tokenizer.encode_incremental(text, before, token_ids)
        encoded = EncodedPrompt(pieces, ends, tail)
        return encoded, encoded
