"""Where the frames of a streamed answer go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from starlette.types import Send

from singletree.protocols import sse
from singletree.protocols.answer import Frame

ResponseHeader = tuple[bytes, bytes]

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

    async def write(self, frames: list[Frame]) -> None:
        """Send frames; return when the transport has accepted them."""
        ...

    async def close(self) -> None:
        """End the answer."""
        ...


class EventStream:
    """Sends frames as server-sent events, all frames of one call in one write.

    Args:
        send: the ASGI channel of an HTTP connection.
    """

    def __init__(self, send: Send) -> None:
        self._send = send

    async def open(self, headers: Iterable[ResponseHeader]) -> None:
        """Send the status and the headers."""
        start = {"type": "http.response.start", "status": 200, "headers": (*_EVENT_STREAM, *headers)}
        await self._send(start)

    async def write(self, frames: list[Frame]) -> None:
        """Send frames."""
        await self._send({"type": "http.response.body", "body": sse.encode(frames), "more_body": True})

    async def close(self) -> None:
        """End the body."""
        await self._send({"type": "http.response.body", "body": b""})
