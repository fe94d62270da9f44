"""Turns the errors of inference servers into ours: one table of statuses for all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from singletree.errors import (
    ContextOverflow,
    EngineFailed,
    EngineUnfit,
    InvalidRequest,
    Overloaded,
    SingletreeError,
)

_OVERLOADED = frozenset((429, 503, 529))
_UNFIT = frozenset((*range(402, 500), 501, 505)) - {408, 425}
"""Statuses that mean that the server cannot do it at all, not that it failed this time."""
_MAX_MESSAGE_LENGTH = 400  # characters of the server's own message that are passed on


class ServerRefusal(msgspec.Struct):
    """An error as a server writes it: in an ``error`` object, or flat."""

    message: str = ""
    param: str | None = None
    code: int | str | None = None
    type: str | None = None


class _Nested(msgspec.Struct):
    error: ServerRefusal | str | None = None
    message: str = ""
    param: str | None = None
    code: int | str | None = None
    detail: str | None = None


_decode = msgspec.json.Decoder(_Nested).decode


@dataclass(frozen=True, slots=True)
class RefusalWords:
    """What differs between servers in their refusals.

    Attributes:
        title: the server's name.
        path: the endpoint.
        key_option: the server's option for its API key.
        overflows: patterns of the messages by which it reports that a prompt is too long; the group ``window``
            is the window in tokens.
        fields: the fields of ``Sampling`` that its ``param`` may name.
    """

    title: str
    path: str
    key_option: str
    overflows: Sequence[str] = ()
    fields: frozenset[str] = frozenset()


def decode_refusal(body: bytes) -> ServerRefusal:
    """Return the error in the body of a refusal; for another body, its first characters."""
    try:
        found = _decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ServerRefusal(body[:_MAX_MESSAGE_LENGTH].decode("utf-8", "replace"))
    if isinstance(found.error, ServerRefusal):
        return found.error
    return ServerRefusal(found.error or found.message or found.detail or "", found.param, found.code)


def convert_refusal(
    words: RefusalWords, status: int, refusal: ServerRefusal, prompt_tokens: int, retry_after: str = ""
) -> SingletreeError:
    """Return our error for a server's.

    ``prompt_tokens`` is the length of the prompt, for ContextOverflow; ``retry_after`` the header of that name.
    """
    message = " ".join(refusal.message[:_MAX_MESSAGE_LENGTH].split()) or "no reason given"
    if status in (400, 422):
        for pattern in words.overflows:
            if found := re.search(pattern, message):
                return ContextOverflow(prompt_tokens, int(found["window"]))
        param = (refusal.param or "").removeprefix("body.").removeprefix("sampling_params.")
        return InvalidRequest(
            f"the engine refused the request: {message}", param=param if param in words.fields else None
        )
    if status in _OVERLOADED:
        wait = {"retry_after": float(retry_after)} if retry_after.isdecimal() else {}
        return Overloaded(
            f"{words.title} accepts no requests at the moment (HTTP {status}): {message}", **wait
        )
    if status in (401, 403):
        return EngineUnfit(
            f"{words.title} refused the API key (HTTP {status}): give --engine-api-key the value of the server's own "
            f"{words.key_option}"
        )
    if status in _UNFIT:
        return EngineUnfit(
            f"{words.title} has no {words.path} for this model (HTTP {status}): {message}; check --engine-url"
        )
    return EngineFailed(f"{words.title} failed (HTTP {status}): {message}")
