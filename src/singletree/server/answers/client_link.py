"""The client of an answer: where the frames of a stream go, and what happens when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

from starlette.types import Receive, Scope, Send

from singletree.protocols.answer import Frame, encode_sse
from singletree.server.answers.request_body import ClientLeft

ResponseHeader = tuple[bytes, bytes]

WRITE_NOW = "singletree.write_now"
"""The extension of ASGI, in a scope's ``extensions``, that writes a part of a body without a coroutine. It takes the
bytes and whether they end the body, and returns whether it has written them: not while the client reads too slowly."""

WriteNow = Callable[[bytes, bool], bool]

_EVENT_STREAM: tuple[ResponseHeader, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class FrameSink(Protocol):
    """Interface: send the frames of one answer."""

    async def open(self, headers: Iterable[ResponseHeader]) -> None:
        """Begin the answer, with ``headers`` where the transport has any."""

    async def write(self, frames: list[Frame], *, is_last: bool = False) -> None:
        """Send frames, which may be none where the answer ends with them; return when the transport has them."""


class EventStream:
    """Sends frames as server-sent events, all frames of one call in one write; with ``WRITE_NOW`` where it can."""

    def __init__(self, send: Send, write_now: WriteNow | None = None) -> None:
        self._send = send
        self.write_now = write_now

    async def open(self, headers: Iterable[ResponseHeader]) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": (*_EVENT_STREAM, *headers)}
        await self._send(start)

    async def write(self, frames: list[Frame], *, is_last: bool = False) -> None:
        data = encode_sse(frames)
        if self.write_now is None or not self.write_now(data, is_last):
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


ON_DISCONNECT = "singletree.on_disconnect"
"""The extension of ASGI, in a scope's ``extensions``, that reports a disconnected client without a task that waits for
it. It takes the function to call once the client has disconnected (None for none any more), and returns whether the
client is still connected."""

OnDisconnect = Callable[[Callable[[], None] | None], bool]


class StreamedAnswer(Protocol):
    """The ASGI application of an answer, whose stream may go to any sink."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Send the answer over HTTP. Raises ClientLeft when the client disconnects."""

    def stream_to(
        self, sink: FrameSink, receive: Receive, on_disconnect: OnDisconnect | None = None
    ) -> Awaitable[None]:
        """Send the answer as a stream to ``sink``. Raises ClientLeft when the client disconnects."""


class WhileConnected:
    """A context that ends when the client disconnects: the work in it is cancelled and has ended on exit.

    Args:
        on_disconnect: reports what ``receive`` does at less cost (``ON_DISCONNECT``); None where the server cannot.

    Raises:
        ClientLeft: on entry or exit; the client disconnected, or ``leave`` was called.
    """

    __slots__ = ("_earlier_cancels", "_has_left", "_leaving", "_on_disconnect", "_receive", "_task")

    def __init__(self, receive: Receive, on_disconnect: OnDisconnect | None = None) -> None:
        self._receive = receive
        self._on_disconnect = on_disconnect
        self._leaving: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._earlier_cancels = 0
        self._has_left = False

    def __enter__(self) -> Self:
        if self._on_disconnect is None:
            self._leaving = asyncio.create_task(self._wait())
        elif not self._on_disconnect(self.leave):
            raise ClientLeft
        self._task = asyncio.current_task()
        assert self._task is not None
        self._earlier_cancels = self._task.cancelling()
        return self

    def leave(self) -> None:
        """End the work as if the client had disconnected. Later calls have no effect."""
        if self._task is not None and not self._has_left:
            self._has_left = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if self._on_disconnect is not None:
            self._on_disconnect(None)
        elif self._leaving is not None:
            self._leaving.cancel()
        task, self._task = self._task, None
        # A task that somebody else has cancelled as well stays cancelled.
        if self._has_left and task and task.uncancel() <= self._earlier_cancels and error is not None:
            raise ClientLeft from None

    async def _wait(self) -> None:
        with suppress(Exception):
            while (await self._receive())["type"] != "http.disconnect":
                pass
        self.leave()
