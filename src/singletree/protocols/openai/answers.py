"""What the answers of OpenAI's APIs have in common: errors, finish reasons, token counts, tokens, comparisons.

An error is ``{"error": {"message", "type", "param", "code"}}``, https://platform.openai.com/docs/guides/error-codes.
Harnesses act on ``code`` and on the wording of a context overflow, so both are defined here once.

``logprobs`` of Chat Completions and Completions has every generated token, also those of reasoning, calls, markup and
the end of the turn, aligned with ``token_ids``. OpenAI does not define this; vLLM reports all tokens
(``_create_chat_logprobs``), and training on traces relies on it. On Responses, log-probabilities belong to one text
part, which has only its own.

``prompt_cache_options.comparison_response_id`` asks how the prompt compares with that of an earlier answer; on Chat
Completions it is an extension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from singletree import errors
from singletree.conversation import PromptReport, Request, Turn
from singletree.errors import ContextOverflow, Overloaded, Rejected, SingletreeError
from singletree.events import FinishReason, Token, Usage
from singletree.protocols import wire
from singletree.protocols.answer import KEEP_ALIVE, AnswerContext, Frame
from singletree.protocols.limits import refused
from singletree.request_options import CacheMiss, Change

_CODES: dict[type[SingletreeError], str] = {
    ContextOverflow: "context_length_exceeded",
    errors.BudgetSpent: "insufficient_quota",
    errors.Unauthorized: "invalid_api_key",
    errors.NotPermitted: "insufficient_permissions",
    errors.RateLimited: "rate_limit_exceeded",
    errors.ForbiddenOrigin: "origin_not_allowed",
    errors.ForbiddenHost: "host_not_allowed",
    errors.ForbiddenAddress: "address_not_allowed",
    errors.ModelNotFound: "model_not_found",
    errors.PreviousResponseNotFound: "previous_response_not_found",
    errors.RouteNotFound: "unknown_url",
    errors.MethodNotAllowed: "method_not_supported",
    errors.RequestTimeout: "request_timeout",
    errors.BodyTooLarge: "request_too_large",
    errors.UnsupportedEncoding: "unsupported_content_encoding",
    # Not "server_is_overloaded": Codex gives up for good on that one.
    Overloaded: "overloaded",
}
# OpenAI's limits are on "requests" and on "tokens"; ours are on requests.
_TYPES = {errors.BudgetSpent: "insufficient_quota", errors.RateLimited: "requests"}

DONE: Frame = ("", b"[DONE]")
"""The last frame of a stream."""

# A response cut short is "length": a client must not take it for a complete one.
FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "context_overflow": "length",
    "refusal": "content_filter",
    "cancelled": "length",
    "error": "length",
}

_UNLIKELY = -9999.0
"""JSON has no infinity; OpenAI's API also uses this value for "very unlikely"."""


class ErrorObject(TypedDict):
    """The value of ``error`` in a body, and in a chunk in the middle of a stream."""

    message: str
    type: str
    param: str | None
    code: str | None


def error_object(error: SingletreeError, *, prompt: str = "messages") -> ErrorObject:
    """Return ``error`` in OpenAI's form; ``prompt`` names the field of the request that holds the prompt."""
    rejected = isinstance(error, Rejected)
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), None)
    return ErrorObject(
        message=_message(error, prompt),
        type=_TYPES.get(type(error), "invalid_request_error" if rejected else "server_error"),
        param=prompt if isinstance(error, ContextOverflow) else getattr(error, "param", None),
        code=code if rejected or code else "server_error",
    )


def encode_error(error: SingletreeError, *, prompt: str = "messages") -> tuple[int, bytes]:
    """Return the HTTP status and the JSON body for ``error``."""
    return error.status, msgspec.json.encode({"error": error_object(error, prompt=prompt)})


def _message(error: SingletreeError, prompt: str) -> str:
    if isinstance(error, ContextOverflow):
        # OpenCode, pi and OpenClaw compact their history on ``maximum context length``.
        return (
            f"This model's maximum context length is {error.maximum} tokens. However, your {prompt} resulted in "
            f"{error.counted} tokens. Please reduce the length of the {prompt}.{error.cure}"
        )
    if isinstance(error, Rejected):
        return error.message
    # pi 0.73 retries only if an error in a stream is worded as the server's fault.
    fault = "The server is overloaded" if isinstance(error, Overloaded) else "Internal server error"
    return f"{fault}: {error.message}"


def usage_object(usage: Usage) -> Mapping[str, Any]:
    """Return ``usage`` in the form of Chat Completions and Completions."""
    fields = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
    return fields if usage.details is None else {**fields, **usage.details}


class ChunkStream:
    """The frames of a stream of chunks that do not depend on its chunks."""

    prompt_field = "messages"
    """The field of the request that holds the prompt, for error objects."""

    def keep_alive(self) -> list[Frame]:
        # A comment: every client skips it, while some fail on unknown events.
        return [KEEP_ALIVE]

    def fail(self, error: SingletreeError) -> list[Frame]:
        # OpenAI's SDKs raise on an error object. No finish reason is sent.
        return [("", wire.dump({"error": error_object(error, prompt=self.prompt_field)})), DONE]


class CompletionStream(ChunkStream):
    """The frames that Chat Completions and Completions have in common; ``kind`` is ``object`` of every chunk."""

    def __init__(self, context: AnswerContext, kind: bytes) -> None:
        request = context.request
        head = b'{"id":%b,"object":"%b","created":%d,"model":%b,"choices":['
        self._head = head % (wire.dump(context.id), kind, context.created, wire.dump(request.model))
        self._include_usage = request.options.include_usage
        self._counted = b""
        self._details = TokenDetails(request)
        self._is_plain = not (
            self._details.logprobs or self._details.ids or request.options.continuous_usage_stats
        )

    def count(self, usage: Usage) -> None:
        """Put ``usage`` beside the choice in each chunk from now on."""
        self._counted = b',"usage":%b' % wire.dump(usage_object(usage))

    def tail(self, usage: Usage) -> list[Frame]:
        if not self._include_usage:
            return [DONE]
        return [("", self._head + b'],"usage":%b}' % wire.dump(usage_object(usage))), DONE]

    def side_event(self, name: str, data: Mapping[str, Any]) -> list[Frame]:
        # Clients that do not know ``name`` see a chunk without choices.
        return [(name, b"%b],%b" % (self._head, wire.dump(data)[1:]))]


class TokenDetails:
    """The token details that a request asks for, and their encoding.

    Attributes:
        logprobs: whether to report log-probabilities.
        ids: whether to report token ids (``return_token_ids``).
    """

    def __init__(self, request: Request) -> None:
        self.logprobs = request.sampling.logprobs is not None
        self.ids = request.options.return_token_ids
        self._by_id = request.options.return_tokens_as_token_ids
        self._of_prompt = request.sampling.prompt_logprobs is not None

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
            "top_logprobs": [
                {self._name(other): json_logprob(other.logprob) for other in token.alternatives} or None
                for token in tokens
            ],
        }

    def prompt(self, turn: Turn) -> list[dict[str, Any] | None] | None:
        """Encode vLLM's ``prompt_logprobs``, keyed by token id; null for the first token. None if not requested."""
        return [self._ranked(token) for token in prompt_of(turn)] if self._of_prompt else None

    def _ranked(self, token: Token) -> dict[str, Any] | None:
        """Return the alternatives with their ranks; the token itself has a rank only if it is among them."""
        if token.logprob is None:
            return None
        ranks = [(token, None), *((other, i) for i, other in enumerate(token.alternatives, 1))]
        return {
            str(each.id): {
                "logprob": json_logprob(each.logprob),
                "rank": rank,
                "decoded_token": self._name(each),
            }
            for each, rank in ranks
        }

    def _plain(self, token: Token) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": json_logprob(token.logprob), "bytes": list(token.utf8)}

    def _name(self, token: Token) -> str:
        return f"token_id:{token.id}" if self._by_id else token.text


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


_OPENAI_REASONS: Mapping[Change, str] = {
    "model": "model_changed",
    "tools": "tools_changed",
    "settings": "reasoning_effort_changed",
    "compacted": "context_compacted",
    "system": "input_changed",
    "messages": "input_changed",
}
_OPENAI_TYPES = {"hit": "cache_hit", "not_found": "comparison_response_not_found"}


def compared_answer(options: Mapping[str, Any] | None) -> str | None:
    """Return the id of the answer with which ``prompt_cache_options`` asks for a comparison; None for none.

    Raises InvalidRequest if it is not a string.
    """
    id = (options or {}).get("comparison_response_id")
    if id is not None and not isinstance(id, str):
        at = "prompt_cache_options.comparison_response_id"
        raise refused(at, f"is {id!r}; send the id of a response")
    return id or None


def response_diagnostics(report: PromptReport) -> dict[str, Any]:
    """Return the field of a response of OpenAI's APIs; empty if the request does not ask for it."""
    found = report.cache_diagnosis
    if found is None:
        return {}
    diagnostics: dict[str, Any] = {"type": "cache_miss"}
    if isinstance(found, CacheMiss):
        diagnostics["reason"] = _OPENAI_REASONS[found.change]
        diagnostics["cache_missed_tokens"] = found.missed_tokens
        diagnostics["comparison_reusable_tokens"] = found.reusable_tokens
        diagnostics["singletree"] = found.report
    else:
        diagnostics["type"] = _OPENAI_TYPES.get(found, found)
    return {"prompt_cache_diagnostics": diagnostics}
