"""The HTTP client: HTTP/1.1 over TCP, TLS and UNIX sockets, with connections that are used again."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from urllib.parse import quote, unquote, urlsplit

from singletree.remote.http_connection import HttpConnection, HttpResponse
from singletree.remote.transport import ConnectionLost, StreamedResponse, read_answer

# The servers' uvicorn closes a connection that was idle for 5 s; a request sent on it at that moment would fail.
_IDLE_SECONDS = 2.0
_CONNECT_SECONDS = 10.0
_FINISH_SECONDS = 1.0
_STAGGER_SECONDS = 0.25  # after which the next address of a name is tried beside the others (RFC 8305)
_RESOLVED_SECONDS = 10.0  # for which the addresses of a name are kept
_MAX_PAGE_BYTES = 2**26  # of the body of a GET
_URL_CHARACTERS = "%/:?[]@!$&'()*+,;=~"

MakeConnection = Callable[[], HttpConnection]
Connect = Callable[[MakeConnection], Awaitable[HttpConnection]]
"""Opens a connection, whose protocol the argument makes. Raises OSError or ValueError."""


class HttpTransport:
    """HTTP/1.1 client with keep-alive connections; see ``Transport``. It uses no proxy and follows no redirection.

    Args:
        url: root URL of the server, without a slash at the end; it may have a user and a password.
        api_key: sent as a bearer token; None to send none.
        read_timeout: seconds without a byte after which the server counts as lost; None for no limit.
        connect: opens connections; None for TCP, and TLS if the URL is one of https.
        keep_alive: whether a connection carries another request after the first.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        read_timeout: float | None = None,
        connect: Connect | None = None,
        keep_alive: bool = True,
    ) -> None:
        parts = urlsplit(url)
        self._prefix = parts.path
        self._head = _common_head(url, api_key) + (b"" if keep_alive else b"Connection: close\r\n")
        self._read_timeout = read_timeout
        self._keep_alive = keep_alive
        self._connect = connect or Addresses(url).connect
        # Kept, because Python 3.11 asks the system for the process each time that the running loop is looked up.
        self._loop: asyncio.AbstractEventLoop | None = None  # while it is open
        self._connections: set[HttpConnection] = set()
        self._idle: list[HttpConnection] = []  # the one used last at the end
        self._opening: set[HttpResponse] = set()  # whose connections are being opened
        self._sweeper: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def get(self, path: str) -> tuple[int, bytes]:
        response = self.stream(path)
        try:
            await response.begin()
            body = await read_answer(response, _MAX_PAGE_BYTES)
        finally:
            response.close()
        if len(body) >= _MAX_PAGE_BYTES:
            raise ConnectionLost(f"it sent a page of more than {_MAX_PAGE_BYTES} bytes")
        return response.status, body

    def stream(self, path: str) -> StreamedResponse:
        """Send a GET and return the answer to come. Raises ConnectionLost if the client is not open."""
        return self._send(b"GET", path, b"", b"")

    def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> StreamedResponse:
        more = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
        for name, value in headers.items():
            more += b"%b: %b\r\n" % (name.encode(), value.encode())
        return self._send(b"POST", path, more, body)

    def _send(self, method: bytes, path: str, headers: bytes, body: bytes) -> HttpResponse:
        if self._loop is None:
            raise ConnectionLost("the engine is not started, or closed")
        head = b"%b %b HTTP/1.1\r\n%b%b\r\n" % (method, _target(self._prefix + path), self._head, headers)
        request = (head, body) if body else (head,)
        response = HttpResponse(self._loop)
        connection = self._idle_connection(self._loop.time())
        if connection is not None:
            connection.send(response, request)
        else:
            self._start_opening(response, request, ConnectionLost("it cannot be reached", unreachable=True))
        return response

    def _start_opening(
        self, response: HttpResponse, request: Sequence[bytes], failure: ConnectionLost
    ) -> None:
        opening = asyncio.create_task(self._open_and_send(response, request, failure))
        self._opening.add(response)
        opening.add_done_callback(lambda _: self._opening.discard(response))
        response.opens(opening)

    def _idle_connection(self, now: float) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closing and now < (connection.rests_until or 0.0):
                return connection
            connection.drop()
        return None

    async def _open_and_send(
        self, response: HttpResponse, request: Sequence[bytes], failure: ConnectionLost
    ) -> None:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                connection = await self._connect(lambda: HttpConnection(self, self._read_timeout))
        except (OSError, ValueError) as error:
            failure.__cause__ = error
            response.fail(failure)
        else:
            connection.send(response, request)

    async def close(self) -> None:
        self._loop = None
        for response in tuple(self._opening):
            response.close()
        for connection in tuple(self._connections):
            connection.drop()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    # What the connections call; see ``ConnectionOwner``

    def opened(self, connection: HttpConnection) -> None:
        """Keep a new connection for a while: of two that were tried side by side only one is used."""
        self._connections.add(connection)
        self._rest(connection, _IDLE_SECONDS)

    def released(self, connection: HttpConnection) -> None:
        if not self._keep_alive:
            connection.drop()
            return
        self._idle.append(connection)
        self._rest(connection, _IDLE_SECONDS)

    def left(self, connection: HttpConnection) -> None:
        """Give the rest of an answer that nobody reads a moment to come."""
        self._rest(connection, _FINISH_SECONDS)

    def resend(self, response: HttpResponse, request: Sequence[bytes]) -> None:
        """Send a request again, on a new connection. If there is none, the server may still have seen the request."""
        self._start_opening(response, request, ConnectionLost("the connection broke"))

    def lost(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)

    def _rest(self, connection: HttpConnection, seconds: float) -> None:
        loop = self._loop
        if loop is None:
            return  # It is closed, and closes the connection, too.
        connection.rests_until = loop.time() + seconds
        if self._sweeper is None:
            self._sweeper = loop.call_later(_IDLE_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Close the connections that have rested for too long; one timer looks after all of them."""
        self._sweeper = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        resting = [each for each in self._connections if each.rests_until is not None]
        for connection in resting:
            if now >= (connection.rests_until or 0.0):
                connection.drop()
        if resting and self._loop is not None:
            self._sweeper = loop.call_later(_IDLE_SECONDS, self._sweep)


@lru_cache(maxsize=64)
def _target(path: str) -> bytes:
    return quote(path, safe=_URL_CHARACTERS).encode()


def _common_head(url: str, api_key: str | None) -> bytes:
    parts = urlsplit(url)
    host = (parts.hostname or "").encode("idna").decode()
    host = f"[{host}]" if ":" in host else host
    lines = [f"Host: {host}" if parts.port is None else f"Host: {host}:{parts.port}"]
    lines += ["User-Agent: singletree", "Accept: */*", "Accept-Encoding: identity"]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    elif parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        lines.append(f"Authorization: Basic {base64.b64encode(user.encode()).decode()}")
    return "".join(f"{line}\r\n" for line in lines).encode()


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def over_unix(path: str) -> Connect:
    """Return what opens connections to a UNIX socket."""

    async def connect(make: MakeConnection) -> HttpConnection:
        _, connection = await asyncio.get_running_loop().create_unix_connection(make, path)
        return connection

    return connect


class Addresses:
    """The addresses of a server's host, tried one after the other, with a short delay between."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._is_secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_secure else 80)
        self._resolved: Sequence[str] = ()
        self._resolved_until = 0.0
        with suppress(ValueError):
            ipaddress.ip_address(self._host)
            self._resolved, self._resolved_until = (self._host,), float("inf")

    async def connect(self, make: MakeConnection) -> HttpConnection:
        """Open a connection to the first address that answers. Raises OSError or ValueError."""
        waiting = deque(await self.resolve())
        trying: set[asyncio.Task[HttpConnection]] = set()
        failure: BaseException = OSError("the name has no address")
        try:
            while waiting or trying:
                if waiting:
                    trying.add(asyncio.create_task(self.connect_to(waiting.popleft(), make)))
                delay = _STAGGER_SECONDS if waiting else None
                done, trying = await asyncio.wait(trying, timeout=delay, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    failure = task.exception() or failure
                for task in done:
                    if task.exception() is None:
                        return task.result()
        finally:
            for task in trying:
                task.cancel()
        raise failure

    async def resolve(self) -> Sequence[str]:
        """Return the addresses. Raises OSError or ValueError."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._resolved_until:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._resolved = tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
            self._resolved_until = loop.time() + _RESOLVED_SECONDS
        return self._resolved

    async def connect_to(self, address: str, make: MakeConnection) -> HttpConnection:
        """Open a connection to one address. Raises OSError or ValueError."""
        context, name = (_tls(), self._host) if self._is_secure else (None, None)
        _, connection = await asyncio.get_running_loop().create_connection(
            make, address, self._port, ssl=context, server_hostname=name
        )
        return connection
