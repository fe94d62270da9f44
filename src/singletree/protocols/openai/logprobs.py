"""The tokens of a response, as OpenAI's APIs and vLLM report them.

``logprobs`` of Chat Completions and Completions has every generated token, also those of reasoning, calls, markup and
the end of the turn, aligned with ``token_ids``. OpenAI does not define this; vLLM reports all tokens
(``_create_chat_logprobs``), and training on traces relies on it. On Responses, log-probabilities belong to one text
part, which has only its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from singletree.conversation import Request, Turn
from singletree.errors import InvalidRequest
from singletree.events import Token

_UNLIKELY = -9999.0
"""JSON has no infinity; OpenAI's API also uses this value for "very unlikely"."""


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """The token details that a request asks for, and their encoding.

    Attributes:
        logprobs: whether to report log-probabilities.
        ids: whether to report token ids (``return_token_ids``).
        by_id: whether a token's text is written ``token_id:ID`` (``return_tokens_as_token_ids``).
        of_prompt: whether to report the log-probabilities of the prompt (``prompt_logprobs``).
    """

    logprobs: bool = False
    ids: bool = False
    by_id: bool = False
    of_prompt: bool = False

    @classmethod
    def of(cls, request: Request) -> TokenDetails:
        """Return the details that ``request`` asks for."""
        options = request.options
        return cls(
            request.sampling.logprobs is not None,
            options.return_token_ids,
            options.return_tokens_as_token_ids,
            request.sampling.prompt_logprobs is not None,
        )

    def chat(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Encode ``logprobs`` of Chat Completions; None if not requested."""
        if not self.logprobs:
            return None
        return {"content": [self.encode_token(token) for token in tokens], "refusal": None}

    def encode_token(self, token: Token) -> dict[str, Any]:
        """Encode one token and its alternatives in the form of Chat Completions and Responses."""
        return self._plain(token) | {"top_logprobs": [self._plain(other) for other in token.alternatives]}

    def legacy(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        """Encode ``logprobs`` of Completions; None if not requested. The tokens begin at character ``offset``."""
        if not self.logprobs:
            return None
        offsets = [offset]
        for token in tokens:
            offsets.append(offsets[-1] + len(token.text))
        return {
            "text_offset": offsets[:-1],
            "token_logprobs": [json_logprob(token.logprob) for token in tokens],
            "tokens": [self._name(token) for token in tokens],
            "top_logprobs": [self._likely(token) for token in tokens],
        }

    def prompt(self, turn: Turn) -> list[dict[str, Any] | None] | None:
        """Encode vLLM's ``prompt_logprobs``, keyed by token id; null for the first token. None if not requested."""
        return [self._ranked(token) for token in prompt_of(turn)] if self.of_prompt else None

    def _ranked(self, token: Token) -> dict[str, Any] | None:
        """Return the alternatives with their ranks; the token itself has a rank only if it is among them."""
        if token.logprob is None:
            return None
        ranked = {str(token.id): self._shown(token, None)}
        return ranked | {
            str(other.id): self._shown(other, i) for i, other in enumerate(token.alternatives, 1)
        }

    def _shown(self, token: Token, rank: int | None) -> dict[str, Any]:
        return {"logprob": json_logprob(token.logprob), "rank": rank, "decoded_token": self._name(token)}

    def _likely(self, token: Token) -> dict[str, float | None] | None:
        named = {self._name(other): json_logprob(other.logprob) for other in token.alternatives}
        return named or None

    def _plain(self, token: Token) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": json_logprob(token.logprob), "bytes": list(token.utf8)}

    def _name(self, token: Token) -> str:
        return f"token_id:{token.id}" if self.by_id else token.text


_MAX_LOGPROBS = 20


def check_logprobs(logprobs: int | None, at: str) -> None:
    """Check a number of alternatives to report, whose field is ``at``. Raises InvalidRequest if it is out of range."""
    if logprobs is not None and not 0 <= logprobs <= _MAX_LOGPROBS:
        message = f"{at} is {logprobs!s:.40}; send a number from 0 to {_MAX_LOGPROBS}"
        raise InvalidRequest(message, param=at)


def json_logprob(logprob: float | None) -> float | None:
    """Return ``logprob`` as a value that JSON can hold; None if the engine reported none."""
    return _UNLIKELY if logprob is not None and not math.isfinite(logprob) else logprob


def ids_of(tokens: Sequence[Token]) -> list[int]:
    """Return the ids of ``tokens``."""
    return [token.id for token in tokens]


def tokens_of(turn: Turn) -> Sequence[Token]:
    """Return the tokens that were recorded for ``turn`` when it was folded."""
    tokens: Sequence[Token] = (turn.extra or {}).get("tokens", ())
    return tokens


def prompt_of(turn: Turn) -> Sequence[Token]:
    """Return the tokens that were recorded for the prompt of ``turn``."""
    tokens: Sequence[Token] = (turn.extra or {}).get("prompt_tokens", ())
    return tokens
