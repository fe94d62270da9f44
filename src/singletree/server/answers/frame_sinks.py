"""Where the frames of a streamed answer go."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from types import BuiltinFunctionType
from typing import Protocol

from starlette.types import Send

from singletree.protocols import sse
from singletree.protocols.answer import Frame

ResponseHeader = tuple[bytes, bytes]

SERVER_SEND = "singletree.send"
"""Where the scope of a connection has the server's own ASGI channel."""

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
        direct: the server's own channel behind it, for what need not pass through all that is around it.

    Attributes:
        write_through: writes without waiting (``SendBuffer``); None where the server cannot.
    """

    def __init__(self, send: Send, direct: Send | None = None) -> None:
        self._send = send
        # Only of a native channel it is known that it sends in the call, and that it needs not be awaited to do so.
        self.write_through = self._write_now if isinstance(direct, BuiltinFunctionType) else None
        self._direct = direct

    async def open(self, headers: Iterable[ResponseHeader]) -> None:
        """Send the status and the headers."""
        start = {"type": "http.response.start", "status": 200, "headers": (*_EVENT_STREAM, *headers)}
        await self._send(start)

    async def write(self, frames: list[Frame]) -> None:
        """Send frames."""
        await self._send({"type": "http.response.body", "body": sse.encode(frames), "more_body": True})

    def _write_now(self, frames: list[Frame]) -> Awaitable[object] | None:
        assert self._direct is not None
        sent = self._direct({"type": "http.response.body", "body": sse.encode(frames), "more_body": True})
        # Granian's channel returns a future while the client does not read, else an object that is done.
        return sent if hasattr(sent, "_asyncio_future_blocking") else None

    async def close(self) -> None:
        """End the body."""
        await self._send({"type": "http.response.body", "body": b""})
