"""WebSockets: uvicorn's protocol for one connection, with the server's limits."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame

from singletree.errors import Overloaded
from singletree.server.answers.request_body import ArrivingBody, BodyAdmission
from singletree.server.http.connection import FLUSH_SECONDS

PING_SECONDS = 20.0
"""How often a connection is tried, so that the system finds out that the other machine is gone. No answer is asked for:
clients read, and so answer, only while they wait for an event."""
MOST_PARTS = 16 * 1024
"""Most parts of one message: an empty part takes memory although it adds nothing to the size."""
MOST_CONTROL_FRAMES = 100
"""Most pings and pongs in a second; they may take six bytes, and each takes longer than a kilobyte of a message."""
_SLICE = 4096
"""How many bytes are parsed at a time: what ends the connection takes effect in between."""


class WebSockets:
    """Makes the WebSockets of one server.

    Args:
        size_limit: most bytes of a message.
        connections, tasks: get what is open and what runs, while it does.
        admission: bounds what all messages take while they arrive.
    """

    def __init__(
        self,
        app: ASGIApp,
        size_limit: int,
        connections: set[Any],
        tasks: set[asyncio.Task[None]],
        admission: BodyAdmission,
    ) -> None:
        self._admission = admission
        # uvicorn writes a line for each connection; the server has its own for each answer.
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._config = Config(
            app,
            http=asyncio.Protocol,
            ws=_WebSocketConnection,
            ws_max_size=size_limit,
            ws_ping_interval=PING_SECONDS,
            ws_ping_timeout=None,
            # A compressed message may be a thousand times as large as what is read of it at once.
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            interface="asgi3",
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        self._config.load()
        self._state = ServerState()
        self._state.connections, self._state.tasks = connections, tasks

    def take_over(self, transport: asyncio.Transport, request: bytes) -> None:
        protocol = _WebSocketConnection(self._config, self._state, {})
        protocol.admission = self._admission
        protocol.connection_made(transport)
        transport.set_protocol(protocol)
        protocol.data_received(request)


class _WebSocketConnection(WebSocketsSansIOProtocol):
    admission: BodyAdmission
    _arriving: ArrivingBody | None = None
    _control_frames = 0
    _unsent = 0
    _deadline = 0.0

    def check_time(self, now: float) -> None:
        self._control_frames = 0
        if not self.transport.is_closing():
            self._deadline = now + FLUSH_SECONDS
        elif now > self._deadline:
            unsent = self.transport.get_write_buffer_size()
            if unsent == self._unsent:
                self.transport.abort()
            self._unsent, self._deadline = unsent, now + FLUSH_SECONDS

    def abort(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def data_received(self, data: bytes) -> None:
        if self._arriving is None:
            self._arriving = ArrivingBody(self._drop)
        try:
            self.admission.grow(self._arriving, len(data))
        except Overloaded:
            return
        for start in range(0, len(data), _SLICE):
            if self.handshake_initiated and not self.handshake_complete:
                self.transport.abort()
            if self.transport.is_closing():
                break
            super().data_received(data[start : start + _SLICE])
        self._forget_if_empty()

    async def receive(self) -> Any:
        message = await super().receive()
        self._forget_if_empty()
        return message

    def _forget_if_empty(self) -> None:
        if not self.frames and not self.conn.reader.buffer and self.queue.empty():
            self._forget()

    def _forget(self) -> None:
        if self._arriving is not None:
            self.admission.remove(self._arriving)
            self._arriving = None

    def _drop(self) -> None:
        self.frames = []
        self.conn.reader.buffer.clear()
        self._fail(1013, "too many large messages at once; try again in a moment")

    def _fail(self, code: int, reason: str) -> None:
        if not self.transport.is_closing():
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    async def send(self, message: Any) -> None:
        await self.writable.wait()
        if self.close_sent and message["type"] == "websocket.send":
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # Without it, a refusal is logged as an error of the application.

    def handle_ping(self) -> None:
        """Answer a ping, unless the client does not read: all answers would be kept for it."""
        if self.writable.is_set() and not self.transport.is_closing():
            super().handle_ping()
        else:
            self.conn.data_to_send()
        self._count_control_frame()

    def handle_pong(self, event: Frame) -> None:
        super().handle_pong(event)
        self._count_control_frame()

    def _count_control_frame(self) -> None:
        self._control_frames += 1
        if self._control_frames > MOST_CONTROL_FRAMES:
            self._fail(1008, "too many pings")

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MOST_PARTS:
            self._fail(1009, "too many parts")
        else:
            super().handle_cont(event)
