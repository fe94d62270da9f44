"""Errors in OpenAI's form, for Chat Completions, Responses and everything else under an OpenAI path.

``{"error": {"message", "type", "param", "code"}}``, https://platform.openai.com/docs/guides/error-codes.
Harnesses act on ``code`` and on the wording of a context overflow, so both are defined here once.
"""

from __future__ import annotations

from typing import TypedDict

import msgspec

from singletree.errors import (
    BodyTooLarge,
    ContextOverflow,
    ForbiddenHost,
    ForbiddenOrigin,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    PreviousResponseNotFound,
    Rejected,
    RouteNotFound,
    SingletreeError,
    Unauthorized,
    UnsupportedEncoding,
)

_CODES: dict[type[SingletreeError], str] = {
    ContextOverflow: "context_length_exceeded",
    Unauthorized: "invalid_api_key",
    ForbiddenOrigin: "origin_not_allowed",
    ForbiddenHost: "host_not_allowed",
    ModelNotFound: "model_not_found",
    PreviousResponseNotFound: "previous_response_not_found",
    RouteNotFound: "unknown_url",
    MethodNotAllowed: "method_not_supported",
    BodyTooLarge: "request_too_large",
    UnsupportedEncoding: "unsupported_content_encoding",
    # Not "server_is_overloaded": Codex gives up for good on that one.
    Overloaded: "overloaded",
}


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
        type="invalid_request_error" if rejected else "server_error",
        param=prompt if isinstance(error, ContextOverflow) else getattr(error, "param", None),
        code=code if rejected or code else "server_error",
    )


def encode_error(error: SingletreeError, *, prompt: str = "messages") -> tuple[int, bytes]:
    """Return the HTTP status and the JSON body for ``error``."""
    return error.status, msgspec.json.encode({"error": error_object(error, prompt=prompt)})


def _message(error: SingletreeError, prompt: str) -> str:
    """Return the message. pi 0.73 retries only if an error in a stream is worded as the server's fault."""
    if isinstance(error, ContextOverflow):
        return _overflow(error, prompt)
    if isinstance(error, Rejected):
        return error.message
    fault = "The server is overloaded" if isinstance(error, Overloaded) else "Internal server error"
    return f"{fault}: {error.message}"


def _overflow(error: ContextOverflow, prompt: str) -> str:
    """Return the overflow message: OpenCode, pi and OpenClaw compact their history on ``maximum context length``."""
    return (
        f"This model's maximum context length is {error.maximum} tokens. However, your {prompt} resulted in "
        f"{error.prompt_tokens} tokens. Please reduce the length of the {prompt}."
    )
