"""Every error singletree raises on purpose.

SingletreeError
├── Rejected                    the client's request is at fault; nothing was generated
│   ├── InvalidRequest          a field is missing, of the wrong type, or says what cannot be done (400)
│   │   ├── PreviousResponseNotFound    previous_response_id names nothing that is stored (400)
│   │   └── ThreadUnsupported           the conversation is to be held by the server, which holds none (400)
│   ├── ContextOverflow         the prompt does not fit the model's window (400)
│   ├── Unauthorized            no key, or a wrong one (401)
│   ├── ModelNotFound           no model of that name is served (404)
│   ├── RouteNotFound           no such path (404)
│   ├── NotStored               the path names a response or conversation that is not stored (404)
│   ├── MethodNotAllowed        the path exists, not with this method (405)
│   ├── Superseded              an identical request of the same session took its place (409)
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

_LONGEST_ID = 128
"""How much of an id that a client made up is shown to it again."""


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


class PreviousResponseNotFound(InvalidRequest):
    """``previous_response_id`` names nothing that is stored, or follows something that no longer is."""

    def __init__(self, id: str) -> None:
        super().__init__(
            f"Previous response with id '{id[:_LONGEST_ID]}' not found.", param="previous_response_id"
        )


class ThreadUnsupported(InvalidRequest):
    """``thread``: the conversation is to be held by the server. The official SDK sends it whole when it reads this."""

    def __init__(self) -> None:
        told = "thread: this server holds no conversations; send the whole of it with every request, without thread"
        super().__init__(told, param="thread")


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


class NotStored(Rejected):
    """A path names what is not stored here, or no longer; ``kind`` is the API's word for it."""

    status = 404

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(f"{kind} with id '{id[:_LONGEST_ID]}' not found.")


class MethodNotAllowed(Rejected):
    """The path exists, but not with this method."""

    status = 405


class Superseded(Rejected):
    """An identical request of the same session took its place; to send it once more would end that one."""

    status = 409

    def __init__(self) -> None:
        super().__init__(
            "the same request came again in this session and is answered there; do not repeat this one"
        )


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
