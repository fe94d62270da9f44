"""Listen for connections, and close them at the end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from email.utils import formatdate
from typing import Any, Protocol

from starlette.types import ASGIApp

from singletree.server.answers.request_body import BodyAdmission
from singletree.server.doors import open_door
from singletree.server.http.connection import Connection
from singletree.server.http.exchange import Exchange

MOST_CONNECTIONS = 65_536
"""How many connections are open at once; further ones are closed. What bounds streams is --slots and the engines."""

_BACKLOG = 4096
"""How many connections may wait to be accepted. The system may allow fewer (``net.core.somaxconn``)."""
_DOOR = "connections of websockets"
_TICK_SECONDS = 1.0
_CLOSING_SECONDS = 2.0
"""Time for the last bytes of answers to be sent when the server ends."""
_CLOSING_STEP_SECONDS = 0.01


class Upgrades(Protocol):
    """What goes on with the connections of a server that become WebSockets."""

    def take_over(self, transport: asyncio.Transport, request: bytes) -> None:
        """Go on with a connection on which the ``request`` for a WebSocket has come."""


MakeWebSockets = Callable[[ASGIApp, int, set[Any], set[asyncio.Task[None]], BodyAdmission], Upgrades]


class HttpServer:
    """A server of one ASGI application, on the running event loop.

    Args:
        websocket_limit: most bytes of a WebSocket's message; None if the server has no WebSockets.
        admission: bounds what the messages of all WebSockets take while they arrive.

    Attributes:
        connections: the open ones, WebSockets included.
        date: the header with the time.
        tasks: the requests that are being answered.
        is_closing: true once no answer may be followed by another on its connection.
    """

    def __init__(
        self, app: ASGIApp, *, websocket_limit: int | None = None, admission: BodyAdmission | None = None
    ) -> None:
        self._app = app
        self._admission = admission or BodyAdmission()
        self._loop = asyncio.get_running_loop()
        self._listening: asyncio.Server | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._websocket_limit = websocket_limit
        self.connections: set[Any] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.date = b""
        self.is_closing = False
        self.has_websockets = websocket_limit is not None
        self._websockets: Upgrades | None = None

    async def listen(self, address: str, port: int, *, shared: bool = False) -> int:
        """Accept connections from now on; return the port. Raises OSError where that is not possible.

        Args:
            port: 0 for any.
            shared: whether other processes listen on the same port.
        """
        family, kind, protocol, _, name = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(name)
            self._tick()
            self._listening = await self._loop.create_server(
                lambda: Connection(self), sock=listener, backlog=_BACKLOG
            )
        except BaseException:
            listener.close()
            raise
        if self.has_websockets:
            # The import takes a tenth of a second; the first WebSocket should not hold up other streams for it.
            self._loop.run_in_executor(None, open_door, _DOOR)
        return int(listener.getsockname()[1])

    async def close(self) -> None:
        """Close all connections, each after the answer that is running if that ends soon."""
        self.is_closing = True
        if self._listening is not None:
            self._listening.close()
        for connection in list(self.connections):
            connection.shutdown()
        end = self._loop.time() + _CLOSING_SECONDS
        while self.connections and self._loop.time() < end:  # noqa: ASYNC110 (at most 200 times)
            await asyncio.sleep(_CLOSING_STEP_SECONDS)
        for connection in list(self.connections):
            connection.abort()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self._ticking is not None:
            self._ticking.cancel()

    def add(self, connection: Connection) -> bool:
        self.connections.add(connection)
        return len(self.connections) <= MOST_CONNECTIONS

    def start(self, exchange: Exchange) -> None:
        task = self._loop.create_task(exchange.run(self._app))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def take_over(self, transport: asyncio.Transport, request: bytes) -> None:
        if self._websockets is None:
            assert self._websocket_limit is not None
            make: MakeWebSockets = open_door(_DOOR)
            self._websockets = make(
                self._app, self._websocket_limit, self.connections, self.tasks, self._admission
            )
        self._websockets.take_over(transport, request)

    def _tick(self) -> None:
        self.date = f"date: {formatdate(usegmt=True)}".encode()
        now = self._loop.time()
        for connection in list(self.connections):
            connection.check_time(now)
        self._ticking = self._loop.call_later(_TICK_SECONDS, self._tick)
