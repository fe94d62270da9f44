"""What an engine on another server needs of an HTTP client: calls, answers that stream, requests that may be ended, and
the errors of servers as ours, by one table of statuses for all of them.

``HttpTransport`` is the real one; tests replay recorded traffic instead.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from singletree.engines.engine import StopKind
from singletree.errors import (
    BadConfiguration,
    ContextOverflow,
    EngineFailed,
    EngineUnfit,
    InvalidRequest,
    Overloaded,
    SingletreeError,
)

_MAX_LOCATION_LENGTH = 200  # characters of a redirection's address that an error repeats
_MAX_ANSWER_BYTES = 2**26  # of a short answer


T = TypeVar("T")


class ConnectionLost(Exception):
    """The server cannot be reached, closed the connection, or sent nothing for too long; the text has the reason.

    Args:
        unreachable: whether no connection was made, so that the server has not seen the request.
    """

    def __init__(self, reason: str, *, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.unreachable = unreachable


class Redirected(ConnectionLost):
    """The server sent the client to another address, which it does not follow.

    Args:
        status: the HTTP status.
        location: the address, as the server wrote it.
    """

    def __init__(self, status: int, location: str) -> None:
        super().__init__(f"it redirects to {location[:_MAX_LOCATION_LENGTH]!r}; give that address")
        self.status = status
        self.location = location


Take = Callable[[bytes], bool]
"""Takes the next bytes of an answer, or none at its end; returns whether it takes more. Never raises."""


class StreamedResponse(Protocol):
    """The answer to one request, which may still have to be sent.

    Attributes:
        status: the HTTP status, after ``begin``.
        retry_after: the header of that name, after ``begin``; empty if there is none.
    """

    status: int
    retry_after: str

    async def begin(self) -> None:
        """Wait for the status. Raises ConnectionLost."""

    async def relay(self, take: Take) -> None:
        """Call ``take`` with all bytes as they come, and return when it takes no more or there are no more.

        Bytes are taken in the call that receives them, without a switch of tasks. Between two calls they are kept, and
        the server is stopped if they become many. Raises ConnectionLost.
        """

    def finish(self) -> None:
        """Leave the little that may still come, so that the connection can be reused."""

    def close(self) -> None:
        """Close the connection, unless all has come or ``finish`` was called: the server drops the request.

        What waits for the answer then raises ConnectionLost.
        """


class Transport(Protocol):
    """An HTTP client for one server."""

    async def open(self) -> None:
        """Prepare the client; called once, in the event loop that will be used."""

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body. Raises ConnectionLost."""

    def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> StreamedResponse:
        """Send JSON and return the answer to come. Raises ConnectionLost if the client is not open."""

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""


async def begun(response: StreamedResponse) -> StreamedResponse:
    """Return the response when it has begun; close it if that fails. Raises ConnectionLost."""
    try:
        await response.begin()
    except BaseException:
        response.close()
        raise
    return response


async def ask(
    transport: Transport, path: str, body: bytes, limit: int = _MAX_ANSWER_BYTES
) -> tuple[int, bytes]:
    """Post JSON, and return status and body of a short answer, cut after ``limit`` bytes. Raises ConnectionLost."""
    response = transport.post(path, body)
    try:
        await response.begin()
        return response.status, await read_answer(response, limit)
    finally:
        response.close()


class Pieces:
    """The bytes of an answer as they come, for what awaits between them; iteration raises ConnectionLost.

    It is no generator, because one that is left before its end costs a task.
    """

    def __init__(self, response: StreamedResponse) -> None:
        self._response = response
        self._piece = b""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        await self._response.relay(self._take)
        if not self._piece:
            raise StopAsyncIteration
        return self._piece

    def _take(self, data: bytes) -> bool:
        self._piece = data
        return False


async def read_answer(response: StreamedResponse, limit: int) -> bytes:
    """Return the body of an answer, or its beginning if it is longer than ``limit`` bytes. Raises ConnectionLost."""
    pieces: list[bytes] = []
    size = 0

    def take(data: bytes) -> bool:
        nonlocal size
        pieces.append(data)
        size += len(data)
        return size < limit

    await response.relay(take)
    return b"".join(pieces)


class InFlightRequest:
    """One running or waiting request, as ``abort`` and ``close`` need it to end the generation.

    Attributes:
        outcome: how it was ended by ``end``: an error to raise, or a finish reason; None if it was not.
        response: the response that is read.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.outcome: SingletreeError | StopKind | None = None
        self.response: StreamedResponse | None = None
        self._opening: asyncio.Task[StreamedResponse] | None = None

    async def open(self, sending: Coroutine[Any, Any, StreamedResponse]) -> StreamedResponse | None:
        """Await ``sending`` and return the response; None when ``end`` was called meanwhile. Raises what it raises."""
        self._opening = asyncio.create_task(sending)
        # Unlike awaiting the task, this distinguishes a cancellation of our caller from one by ``end``.
        await asyncio.wait((self._opening,))
        return None if self.outcome is not None else self._opening.result()

    def end(self, outcome: SingletreeError | StopKind) -> None:
        self.outcome = self.outcome or outcome
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connection, or stop opening it; a response that was read to its end keeps its connection."""
        opening = self._opening
        if self.response is not None:
            self.response.close()
        elif opening is None:
            return
        elif not opening.done():
            opening.cancel()
        elif not opening.cancelled() and opening.exception() is None:
            opening.result().close()


def check_key(api_key: str | None) -> None:
    """Raise BadConfiguration for a key that cannot be sent in an HTTP header."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise BadConfiguration(
            "--engine-api-key has a line break or a character that cannot be sent in an HTTP header; check the key"
        )


def root_url(url: str, title: str) -> str:
    """Return the URL without ``/v1`` and slashes at its end. Raises BadConfiguration for a malformed one."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise BadConfiguration(f"{url!r} is not the URL of {title}: it must be http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


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


def decode_as(form: type[T], body: bytes | str) -> T | None:
    """Return JSON of that form, which a server or client wrote; None for all else."""
    with suppress(msgspec.DecodeError, ValueError, RecursionError):
        return msgspec.json.decode(body, type=form)
    return None


def decode_refusal(body: bytes) -> ServerRefusal:
    """Return the error in the body of a refusal; for another body, its first characters."""
    found = decode_as(_Nested, body)
    if found is None:
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
