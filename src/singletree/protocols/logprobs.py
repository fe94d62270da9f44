"""The tokens of an answer, as OpenAI's APIs and vLLM show them.

``logprobs`` of Chat Completions and Completions has every token that the model wrote, those of reasoning, calls, markup
and the end of the turn too, in step with ``token_ids``. OpenAI says nothing about them; vLLM tells all
(``_create_chat_logprobs``), and who trains on traces counts on it. On Responses they belong to one text part, which
has its own alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from singletree.conversation import Request, Turn
from singletree.events import Token

_UNLIKELY = -9999.0
"""JSON has no infinity; this stands for "very unlikely" in OpenAI's API too."""


@dataclass(frozen=True, slots=True)
class Telling:
    """What a request wants to be told of the tokens.

    Attributes:
        logprobs: their log-probabilities.
        ids: their ids (``return_token_ids``).
        by_id: spelled ``token_id:ID`` (``return_tokens_as_token_ids``).
        of_prompt: the log-probabilities of the prompt's tokens (``prompt_logprobs``).
    """

    logprobs: bool = False
    ids: bool = False
    by_id: bool = False
    of_prompt: bool = False

    @classmethod
    def of(cls, request: Request) -> Telling:
        """What ``request`` wants."""
        extra = request.extra
        return cls(
            request.sampling.logprobs is not None,
            bool(extra.get("return_token_ids")),
            bool(extra.get("return_tokens_as_token_ids")),
            request.sampling.prompt_logprobs is not None,
        )

    def chat(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """``logprobs`` of Chat Completions; None when not wanted."""
        if not self.logprobs:
            return None
        return {"content": [self.one(token) for token in tokens], "refusal": None}

    def one(self, token: Token) -> dict[str, Any]:
        """One token with the likely ones in its place, as Chat Completions and Responses show it."""
        return self._plain(token) | {"top_logprobs": [self._plain(other) for other in token.alternatives]}

    def legacy(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        """``logprobs`` of Completions for tokens whose text begins at character ``offset``; None when not wanted."""
        if not self.logprobs:
            return None
        offsets = [offset]
        for token in tokens:
            offsets.append(offsets[-1] + len(token.text))
        return {
            "text_offset": offsets[:-1],
            "token_logprobs": [number(token.logprob) for token in tokens],
            "tokens": [self._name(token) for token in tokens],
            "top_logprobs": [self._likely(token) for token in tokens],
        }

    def prompt(self, turn: Turn) -> list[dict[str, Any] | None] | None:
        """vLLM's ``prompt_logprobs``: by token id, null for the first, which follows nothing; None when not wanted."""
        return [self._ranked(token) for token in prompt_of(turn)] if self.of_prompt else None

    def _ranked(self, token: Token) -> dict[str, Any] | None:
        """The likely ones with their ranks; the token itself has one if it is among them."""
        if token.logprob is None:
            return None
        said = {str(token.id): self._shown(token, None)}
        return said | {str(other.id): self._shown(other, i) for i, other in enumerate(token.alternatives, 1)}

    def _shown(self, token: Token, rank: int | None) -> dict[str, Any]:
        return {"logprob": number(token.logprob), "rank": rank, "decoded_token": self._name(token)}

    def _likely(self, token: Token) -> dict[str, float | None] | None:
        named = {self._name(other): number(other.logprob) for other in token.alternatives}
        return named or None

    def _plain(self, token: Token) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": number(token.logprob), "bytes": list(token.utf8)}

    def _name(self, token: Token) -> str:
        return f"token_id:{token.id}" if self.by_id else token.text


def number(logprob: float | None) -> float | None:
    """As JSON can say it; null where the engine told none."""
    return _UNLIKELY if logprob is not None and not math.isfinite(logprob) else logprob


def ids_of(tokens: Sequence[Token]) -> list[int]:
    """Their ids."""
    return [token.id for token in tokens]


def tokens_of(turn: Turn) -> Sequence[Token]:
    """The tokens that were told of ``turn`` when it was folded."""
    tokens: Sequence[Token] = (turn.extra or {}).get("tokens", ())
    return tokens


def prompt_of(turn: Turn) -> Sequence[Token]:
    """The tokens that were told of what ``turn`` answers."""
    tokens: Sequence[Token] = (turn.extra or {}).get("prompt_tokens", ())
    return tokens
