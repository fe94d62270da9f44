"""Every error that singletree raises on purpose.

SingletreeError
├── Rejected                    the client's request is at fault; nothing was generated
│   ├── InvalidRequest          a field is missing, of the wrong type, or asks for what is not supported (400)
│   │   ├── PreviousResponseNotFound    previous_response_id names no stored response (400)
│   │   └── ThreadUnsupported           the client wants the server to store the conversation (400)
│   ├── ContextOverflow         the prompt does not fit the model's window (400)
│   ├── BudgetSpent             a session, a sub-agent or a key has used up its budget (400; 402 in Messages)
│   ├── Unauthorized            no key, or a wrong one (401)
│   ├── NotPermitted            the key has not the right that the path needs (403)
│   ├── ForbiddenOrigin         a web page of an origin that is not allowed sent the request (403)
│   ├── ForbiddenHost           the request names a host that is not known to be this server (403)
│   ├── ForbiddenAddress        without a key, prompts are shown on this machine only (403)
│   ├── ModelNotFound           no served model has that name (404)
│   ├── RouteNotFound           no such path (404)
│   ├── NotStored               the path names a response or conversation that is not stored (404)
│   ├── MethodNotAllowed        the path exists, but not with this method (405)
│   ├── RequestTimeout          the body did not arrive in time (408)
│   ├── Superseded              an identical request of the same session took its place (409)
│   ├── RateLimited             the key has asked as often as it may (429)
│   ├── BodyTooLarge            the body is over the limit (413)
│   └── UnsupportedEncoding     the body's Content-Encoding is unknown (415)
├── Overloaded                  no engine can accept the request now (503; 529 in Messages)
├── EngineFailed                the engine died or answered wrongly (500, or an error event in a stream)
│   ├── EngineUnreachable       the engine's server cannot be connected to; it has not seen the request
│   └── EngineUnfit             the engine cannot serve the request, and a retry would not help
├── WeightsUnavailable          a model's files are unavailable (start-up)
├── BadConfiguration            a flag, file or model card is wrong (start-up)
└── BadFamily                   a family's declaration contradicts itself (import time)

A message names the problem, the value and the cure. No message contains prompt text or a path on the server.
Each protocol's ``encode_error`` writes these errors in its own format.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = [
    "BadConfiguration",
    "BadFamily",
    "ContextOverflow",
    "EngineFailed",
    "InvalidRequest",
    "Overloaded",
    "Rejected",
    "SingletreeError",
    "WeightsUnavailable",
]

_LONGEST_ID = 128
"""Number of characters of a client's id that an error message repeats."""

_PASSWORD = re.compile(r"(://[^/@:\s]*:)[^\s]*@")


def without_passwords(text: str) -> str:
    """Return ``text`` with a mark in place of each password of a URL, for messages."""
    return _PASSWORD.sub(r"\1***@", text)


class SingletreeError(Exception):
    """Base class of all errors. ``message`` is safe to show to a client."""

    status = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the attributes: the constructors of the classes take other arguments than the message."""
        return _restore, (type(self), self.message, self.__dict__)


def _restore(kind: type[SingletreeError], message: str, attributes: dict[str, Any]) -> SingletreeError:
    error = kind.__new__(kind, message)
    error.__dict__.update(attributes)
    return error


class Rejected(SingletreeError):
    """The client's request is at fault. ``param`` is the path of the field in the request, if one field is."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(Rejected):
    """A field is missing, of the wrong type, or asks for what is not supported."""


class PreviousResponseNotFound(InvalidRequest):
    """``previous_response_id`` names no stored response, or one whose predecessor is no longer stored."""

    def __init__(self, id: str) -> None:
        super().__init__(
            f"Previous response with id '{id[:_LONGEST_ID]}' not found.", param="previous_response_id"
        )


class ThreadUnsupported(InvalidRequest):
    """The client sent ``thread``, so that the server stores the conversation. This server does not.

    The official SDK sends the whole conversation again when it gets this error.
    """

    def __init__(self) -> None:
        super().__init__(
            "thread: this server does not store conversations; send the whole conversation with every request, "
            "without thread",
            param="thread",
        )


class ContextOverflow(Rejected):
    """The prompt does not fit the model's window.

    Attributes:
        prompt_tokens, maximum: in tokens.
        is_estimate: whether the prompt was not tokenized, because it has too many characters.
    """

    def __init__(self, prompt_tokens: int, maximum: int, *, is_estimate: bool = False) -> None:
        self.prompt_tokens = prompt_tokens
        self.maximum = maximum
        self.is_estimate = is_estimate
        super().__init__(f"prompt is too long: {self.counted} tokens > {maximum} maximum{self.cure}")

    @property
    def counted(self) -> str:
        """Return the number of tokens as a text, with "about" before an estimate."""
        return f"about {self.prompt_tokens}" if self.is_estimate else str(self.prompt_tokens)

    @property
    def cure(self) -> str:
        """Return what can be done where the prompt was not tokenized; else nothing. It begins with a space."""
        name = "--limit characters_per_token"
        return (
            f" (it was not tokenized; the operator of this server can raise {name})"
            if self.is_estimate
            else ""
        )


class BudgetSpent(Rejected):
    """The session, the sub-agent or the API key has used up its budget."""


class Unauthorized(Rejected):
    """The request has no API key, or a wrong one."""

    status = 401


class NotPermitted(Rejected):
    """The request's API key has not the right that its path needs."""

    status = 403


class ForbiddenOrigin(Rejected):
    """A web page of an origin that is not allowed sent the request; ``origin`` is empty when the browser hid it."""

    status = 403

    def __init__(self, origin: str) -> None:
        shown = f"origin {origin!a}" if origin else "another site"
        listed = f"--allowed-origins {origin}" if origin and origin.isprintable() else "--allowed-origins"
        super().__init__(
            f"a web page of {shown} may not use this server; if you trust that page, start the server with {listed}. "
            "Clients that are not browsers send no Origin header"
        )


class ForbiddenHost(Rejected):
    """The request names a host that is not known to be this server, as in a DNS rebinding attack."""

    status = 403

    def __init__(self, host: str) -> None:
        super().__init__(
            f"host {host!a} is not a known name of this server; use the address that it listens on, or start the "
            "server with --allowed-hosts and that name, without its port"
        )


class ForbiddenAddress(Rejected):
    """The server has no key by which a client could show that it may see prompts, and the client may be elsewhere: on
    another machine, or a web page with the name ``host``, if that is given."""

    status = 403

    def __init__(self, host: str = "") -> None:
        named = f", and this request asks host {host!a}" if host else ""
        listed = ", or with --allowed-hosts and that name without its port" if host else ""
        super().__init__(
            "sessions and prompts are shown on this machine only, under a name such as localhost, since the server has "
            f"no key{named}; start it with --api-key and send the key{listed}"
        )


class ModelNotFound(Rejected):
    """No served model has that name."""

    status = 404

    def __init__(self, model: str, served: tuple[str, ...] = ()) -> None:
        known = ", ".join(served) or "none"
        super().__init__(f"model {model!r} is not served here; served: {known}", param="model")
        self.model = model


class RouteNotFound(Rejected):
    """The path does not exist."""

    status = 404


class NotStored(Rejected):
    """A path names an object that is not stored, or no longer; ``kind`` is the API's word for it."""

    status = 404

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(f"{kind} with id '{id[:_LONGEST_ID]}' not found.")


class MethodNotAllowed(Rejected):
    """The path exists, but not with this method."""

    status = 405


class RequestTimeout(Rejected):
    """The rest of the body did not arrive in time."""

    status = 408


class Superseded(Rejected):
    """An identical request of the same session took its place; a repetition would cancel that one."""

    status = 409

    def __init__(self) -> None:
        super().__init__(
            "the same request came again in this session and is answered there; do not repeat this one"
        )


class RateLimited(Rejected):
    """The request's API key has asked as often as it may; ``retry_after`` is in seconds."""

    status = 429

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class BodyTooLarge(Rejected):
    """The body is larger than the limit in bytes, before or after decompression."""

    status = 413


class UnsupportedEncoding(Rejected):
    """The body's Content-Encoding is unknown."""

    status = 415


class Overloaded(SingletreeError):
    """No engine can accept the request now; ``retry_after`` is in seconds."""

    status = 503

    def __init__(self, message: str, *, retry_after: float = 2.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineFailed(SingletreeError):
    """The engine died or answered wrongly; what it generated before that stays valid."""


class EngineUnreachable(EngineFailed):
    """The engine's server cannot be connected to: it has not seen the request."""


class EngineUnfit(EngineFailed):
    """The engine cannot serve the request, and a retry would not help.

    It lacks the endpoint or the model, refuses the key, or answers in an unknown format.
    """


class WeightsUnavailable(SingletreeError):
    """A model's files are unavailable."""


class BadConfiguration(SingletreeError):
    """A flag, file or model card is wrong."""


class BadFamily(SingletreeError):
    """A family's declaration contradicts itself."""
