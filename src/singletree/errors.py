"""Every error singletree raises on purpose.

SingletreeError
├── Rejected                    the client's request is at fault; nothing was generated
│   ├── InvalidRequest          a field is missing, of the wrong type, or says what cannot be done (400)
│   ├── ContextOverflow         the prompt does not fit the model's window (400)
│   ├── Unauthorized            no key, or a wrong one (401)
│   ├── ModelNotFound           no model of that name is served (404)
│   ├── RouteNotFound           no such path (404)
│   ├── MethodNotAllowed        the path exists, not with this method (405)
│   ├── BodyTooLarge            the body is over the limit (413)
│   └── UnsupportedEncoding     the body's Content-Encoding is unknown (415)
├── Overloaded                  no engine can take the request now (503, 529 on Messages)
├── EngineFailed                the engine died or broke its promise (500, or an error event in a stream)
├── WeightsUnavailable          a model's files cannot be had (start-up)
├── BadConfiguration            a flag, file or model card is wrong (start-up)
└── BadFamily                   a family's declaration contradicts itself (import time)

A message says what, the value, and the cure. No message holds prompt text or a path on the server.
Each protocol's ``encode_error`` puts these into its own shape and words.
"""

from __future__ import annotations


class SingletreeError(Exception):
    """The root. ``message`` is safe to show to a client."""

    status = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Rejected(SingletreeError):
    """The client's request is at fault. ``param`` is the path of the field in the request's own terms."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(Rejected):
    """A field is missing, of the wrong type, or says what cannot be done."""


class ContextOverflow(Rejected):
    """The prompt does not fit the model's window. Counts are in tokens."""

    def __init__(self, prompt_tokens: int, maximum: int) -> None:
        super().__init__(f"prompt is too long: {prompt_tokens} tokens > {maximum} maximum")
        self.prompt_tokens = prompt_tokens
        self.maximum = maximum


class Unauthorized(Rejected):
    """No key, or a wrong one."""

    status = 401


class ModelNotFound(Rejected):
    """No model of that name is served."""

    status = 404

    def __init__(self, model: str, served: tuple[str, ...] = ()) -> None:
        known = ", ".join(served) or "none"
        super().__init__(f"model {model!r} is not served here; served: {known}", param="model")
        self.model = model


class RouteNotFound(Rejected):
    """No such path."""

    status = 404


class MethodNotAllowed(Rejected):
    """The path exists, but not with this method."""

    status = 405


class BodyTooLarge(Rejected):
    """The body is over the limit, in bytes, before or after decompression."""

    status = 413


class UnsupportedEncoding(Rejected):
    """The body's Content-Encoding is unknown."""

    status = 415


class Overloaded(SingletreeError):
    """No engine can take the request now; ``retry_after`` is in seconds."""

    status = 503

    def __init__(self, message: str, *, retry_after: float = 2.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineFailed(SingletreeError):
    """The engine died or broke its promise; what it generated so far stands."""


class WeightsUnavailable(SingletreeError):
    """A model's files cannot be had."""


class BadConfiguration(SingletreeError):
    """A flag, file or model card is wrong."""


class BadFamily(SingletreeError):
    """A family's declaration contradicts itself."""
