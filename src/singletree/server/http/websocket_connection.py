"""WebSockets: uvicorn's protocol for one connection, with the server's limits."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame

from singletree.server.http.connection import FLUSH_SECONDS

PING_SECONDS = 20.0
"""How often a connection is tried, so that the system finds out that the other machine is gone. No answer is asked for:
clients read, and so answer, only while they wait for an event.
"""
MOST_PARTS = 16 * 1024
"""Most parts of one message: an empty part takes memory although it adds nothing to the size."""


class WebSockets:
    """Makes the WebSockets of one server.

    Args:
        app: the ASGI application.
        size_limit: most bytes of a message.
        connections, tasks: get what is open and what runs, while it does.
    """

    def __init__(
        self, app: ASGIApp, size_limit: int, connections: set[Any], tasks: set[asyncio.Task[None]]
    ) -> None:
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
        """Let a WebSocket go on with a connection; ``request`` is what was received, from the head of the request."""
        protocol = _WebSocketConnection(self._config, self._state, {})
        protocol.connection_made(transport)
        transport.set_protocol(protocol)
        protocol.data_received(request)


class _WebSocketConnection(WebSocketsSansIOProtocol):
    _unsent = 0
    _deadline = 0.0

    def check_time(self, now: float) -> None:
        """Cut the connection if it is closing and the client does not take what is left."""
        if not self.transport.is_closing():
            self._deadline = now + FLUSH_SECONDS
        elif now > self._deadline:
            unsent = self.transport.get_write_buffer_size()
            if unsent == self._unsent:
                self.transport.abort()
            self._unsent, self._deadline = unsent, now + FLUSH_SECONDS

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """See the base class. A client may not send anything before the answer to its handshake."""
        if self.handshake_initiated and not self.handshake_complete:
            self.transport.abort()
        else:
            super().data_received(data)

    async def send(self, message: Any) -> None:
        """See the base class."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # Without it, a refusal is logged as an error of the application.

    def handle_cont(self, event: Frame) -> None:
        """See the base class."""
        if len(self.frames) >= MOST_PARTS:
            self.conn.fail(1009, "too many parts")
            self.handle_parser_exception()
            return
        super().handle_cont(event)
