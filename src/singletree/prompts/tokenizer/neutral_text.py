"""Decodes a prompt for an engine that reads text, in which every text of a special token becomes that token."""

from __future__ import annotations

from collections.abc import Sequence

from singletree.prompts.tokenizer.added_tokens import GUARD, NEUTRAL
from singletree.prompts.tokenizer.tokenizer import Tokenizer


class MarkupDecoder:
    """Decodes token ids to text with the special tokens by name.

    Attributes:
        special_ids: the ids of special tokens.
        added_ids: the ids of all added tokens.
        section_ends: the tokens that end a turn.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.added_ids = frozenset(tokenizer.added_tokens.values())
        self.special_ids = frozenset(tokenizer.added_tokens[text] for text in tokenizer.special_tokens)
        self.section_ends = tokenizer.stop_token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``."""
        return self._tokenizer.decode(token_ids)

    def decode_neutral(self, token_ids: Sequence[int]) -> str:
        """Return the same, where ordinary text that reads like an added token is broken by ``NEUTRAL``."""
        stream = self._tokenizer.new_detokenizer()
        pieces: list[str] = []
        run: list[str] = []
        for id in token_ids:
            text = "".join(piece for piece, _ in stream.feed((id,)))
            if id in self.added_ids:
                pieces += [self._broken("".join(run)), text]
                run = []
            else:
                run.append(text)
        run += [piece for piece, _ in stream.flush()]
        return "".join([*pieces, self._broken("".join(run))])

    def _broken(self, text: str) -> str:
        return self._tokenizer.guard(text).replace(GUARD, NEUTRAL)
