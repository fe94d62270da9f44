"""Where the frames of a streamed answer go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from starlette.types import Send

from singletree.protocols import sse
from singletree.protocols.answer import Frame

ResponseHeader = tuple[bytes, bytes]

WRITE_NOW = "singletree.write_now"
"""The extension of ASGI, in a scope's ``extensions``, that writes a part of a body without a coroutine. It takes the
bytes and whether they end the body, and returns whether it has written them: false while the client has to be waited
for.
"""

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
        ...

    async def write(self, frames: list[Frame], *, is_last: bool = False) -> None:
        """Send frames; return when the transport has accepted them.

        Args:
            frames: may be empty where ``is_last``.
            is_last: whether the answer ends with them.
        """
        ...


class EventStream:
    """Sends frames as server-sent events, all frames of one call in one write.

    Args:
        send: the ASGI channel of an HTTP connection.
        write_now: writes bytes without waiting (``WRITE_NOW``); None where the server cannot.
    """

    def __init__(self, send: Send, write_now: WriteNow | None = None) -> None:
        self._send = send
        self.write_now = write_now

    async def open(self, headers: Iterable[ResponseHeader]) -> None:
        """Send the status and the headers."""
        start = {"type": "http.response.start", "status": 200, "headers": (*_EVENT_STREAM, *headers)}
        await self._send(start)

    async def write(self, frames: list[Frame], *, is_last: bool = False) -> None:
        """Send frames, and the end of the body with the last ones."""
        data = sse.encode(frames)
        if self.write_now is None or not self.write_now(data, is_last):
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
