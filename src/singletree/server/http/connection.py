"""One client's connection: HTTP/1.1 as llhttp parses it, requests one after another, limits of size and time.

Everything runs on the event loop of the application, and an answer is written to the transport in the call that makes
it: a server with threads of its own has to wake one of them for each token of a stream.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote

import httptools

from singletree.errors import InvalidRequest, RequestTimeout
from singletree.server.http.exchange import Exchange

HEAD_BYTES = 128 * 1024
"""Most bytes of a head, of trailers and of the extensions of a chunk."""
MOST_HEADERS = 256
MOST_PIPELINED = 256
"""Most requests that may wait for the answer to an earlier one on their connection."""

HEAD_SECONDS = 30.0
"""Time for the head of a request, and for a new connection to send one."""
BODY_SECONDS = 60.0
BODY_STEP = 16 * 1024
"""How many bytes of a body have to come within ``BODY_SECONDS``."""
IDLE_SECONDS = 330.0
"""How long a connection stays open between two requests. HTTP clients keep idle connections for up to five minutes: one
that the server closes first may be closed just when the next request is on its way."""
_LINGER_SECONDS = 5.0
"""How long what a client still sends is dropped after an answer that did not wait for all of the request. A connection
that is closed with unread data is reset, and the client may not see the answer."""
_PROBE_SECONDS, _SLOW_PROBE_SECONDS = 0.05, 1.0
"""Between the lines that a client gets and ignores once it has closed its side; one that is gone answers a reset."""
FLUSH_SECONDS = 30.0
"""A closing connection that sends nothing for this time is cut: its client does not read."""


class _Refused(Exception):
    """The request is not read any further; the status is its first argument."""


class ConnectionServer(Protocol):
    """The server of a connection; ``http_server.HttpServer`` is it."""

    connections: set[Any]
    tasks: set[asyncio.Task[None]]
    date: bytes
    is_closing: bool
    has_websockets: bool

    def add(self, connection: Connection) -> bool:
        """Keep an open connection. Return whether it may send requests."""

    def start(self, exchange: Exchange) -> None:
        """Let the application answer a request."""

    def take_over(self, transport: asyncio.Transport, request: bytes) -> None:
        """Let a WebSocket go on with a connection; ``request`` is what was received, from the head of the request."""


class Connection(asyncio.Protocol):
    """The protocol of one connection."""

    __slots__ = (
        "_client",
        "_current",
        "_deadline",
        "_declined",
        "_exchanges",
        "_fresh",
        "_has_progress",
        "_headers",
        "_is_in_message",
        "_is_paused",
        "_loop",
        "_parser",
        "_server",
        "_server_address",
        "_unparsed",
        "_unsent",
        "_url",
        "_writable",
        "is_writable",
        "transport",
    )

    def __init__(self, server: ConnectionServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport
        self._client: tuple[str, int] | None = None
        self._server_address: tuple[str, int] | None = None
        self._exchanges: deque[Exchange] = deque()
        self._current: Exchange | None = None
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._declined: list[tuple[bytes, bytes]] = []  # headers that the parser must not see
        self._is_in_message = self._has_progress = self._is_paused = False
        self._unparsed = self._fresh = self._unsent = 0
        self._deadline = self._loop.time() + HEAD_SECONDS
        self._writable: asyncio.Future[None] | None = None
        self.is_writable = True

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        names = map(transport.get_extra_info, ("peername", "sockname"))
        self._client, self._server_address = (name[:2] if name else None for name in names)  # host and port
        if not self._server.add(self):
            transport.abort()  # type: ignore[attr-defined]

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._parser = self._current = None  # They refer to this connection.
        self._leave()
        self.resume_writing()

    def eof_received(self) -> bool:
        """Go on while requests that came whole are answered: a client may have closed its side alone."""
        if not self._exchanges or not self._exchanges[-1].has_all:
            self.close()
            return False
        self._exchanges[-1].keep_alive = False
        self._loop.call_later(_PROBE_SECONDS, self._probe, 2 * _PROBE_SECONDS)
        return True

    def _probe(self, seconds: float) -> None:
        if self._exchanges and self._exchanges[0].probe():
            self._loop.call_later(seconds, self._probe, min(2 * seconds, _SLOW_PROBE_SECONDS))
        elif self._exchanges:
            self.close()

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        self._has_progress = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            is_version = error.args == ("Invalid HTTP version",)
            self._refuse(cause.args[0] if isinstance(cause, _Refused) else 505 if is_version else 400)
        else:
            self._unparsed = 0 if self._has_progress else self._unparsed + len(data)
            if self._unparsed > HEAD_BYTES:
                self._refuse(431)

    def pause_writing(self) -> None:
        """Let answers wait: the client does not read."""
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    # From the parser

    def on_message_begin(self) -> None:
        if len(self._exchanges) > MOST_PIPELINED:
            raise _Refused(429)
        self._is_in_message = True
        self._current = None
        self._url, self._headers = b"", []
        self._deadline = self._loop.time() + HEAD_SECONDS

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers are ignored."""
        if self._current is not None:
            return
        if len(self._headers) >= MOST_HEADERS:
            raise _Refused(431)
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Begin the exchange, unless the client asks for another protocol (``_upgrade``)."""
        assert self._parser is not None
        self._has_progress = True
        version = self._parser.get_http_version()
        url = httptools.parse_url(self._url)
        _check_head(version, self._url, url, self._headers)
        if self._parser.should_upgrade():
            return
        self._headers += self._declined
        self._declined = []
        headers = dict(self._headers)
        if b"host" not in headers:
            self._headers.append((b"host", b""))  # It is no host name that the server knows.
        path = (url.path or b"/").decode("ascii")
        exchange = Exchange(
            {
                "type": "http",
                "asgi": {"version": "3.0", "spec_version": "2.3"},
                "http_version": version,
                "method": self._parser.get_method().decode("ascii"),
                "scheme": "http",
                "path": unquote(path) if "%" in path else path,
                "raw_path": url.path,
                "query_string": url.query or b"",
                "root_path": "",
                "headers": self._headers,
                "client": self._client,
                "server": self._server_address,
            },
            self,
            keep_alive=version == "1.1" and self._parser.should_keep_alive(),
            expects_continue=headers.get(b"expect", b"").lower() == b"100-continue",
        )
        self._current = exchange
        self._fresh, self._deadline = 0, self._loop.time() + BODY_SECONDS
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._server.start(exchange)
        else:
            self._pause()

    def on_body(self, piece: bytes) -> None:
        self._has_progress = True
        if self._current is None:
            return
        self._fresh += len(piece)
        if self._fresh >= BODY_STEP:
            self._fresh, self._deadline = 0, self._loop.time() + BODY_SECONDS
        if not self._current.take(piece):
            self._pause()

    def on_message_complete(self) -> None:
        self._has_progress = True
        self._is_in_message = False
        self._deadline = math.inf
        if self._current is not None:
            self._current.complete()

    # From the exchange that is being answered

    @property
    def date(self) -> bytes:
        return self._server.date

    async def writable(self) -> None:
        while not self.is_writable:
            self._writable = self._loop.create_future()
            try:
                await self._writable
            finally:
                self._writable = None

    def read_on(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if self._is_in_message:
                self._deadline = self._loop.time() + BODY_SECONDS
            self.transport.resume_reading()

    def answered(self) -> None:
        """Go on with the next request, or close."""
        exchange = self._exchanges.popleft()
        if not exchange.keep_alive or self._server.is_closing:
            if exchange.has_all and self._parser is not None:
                self.close()
            else:
                self._linger()
            return
        if self._exchanges:
            self._server.start(self._exchanges[0])
        elif not self._is_in_message:
            self._deadline = self._loop.time() + IDLE_SECONDS
        if len(self._exchanges) <= 1:
            self.read_on()

    # From the server

    def check_time(self, now: float) -> None:
        """End the connection when its time is over, and cut it when the client does not take what is left."""
        if now < self._deadline:
            return
        unsent = self.transport.get_write_buffer_size()
        if not self.transport.is_closing():
            if self._is_in_message:
                self._refuse(408)
            else:
                self.close()
        elif unsent == self._unsent:
            self.transport.abort()
        else:
            self._unsent, self._deadline = unsent, now + FLUSH_SECONDS

    def shutdown(self) -> None:
        if not self._exchanges:
            self.close()

    def close(self) -> None:
        self._leave()
        self._unsent = self.transport.get_write_buffer_size()
        self._deadline = self._loop.time() + FLUSH_SECONDS
        self.transport.close()

    def abort(self) -> None:
        self._leave()
        self.transport.abort()

    def _leave(self) -> None:
        for exchange in self._exchanges:
            exchange.leave()
        self._exchanges.clear()

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._deadline = math.inf
            self.transport.pause_reading()

    def _linger(self) -> None:
        """Drop what the client still sends, for a while, so that it gets to read the answer."""
        self._parser, self._is_in_message = None, False
        self._leave()
        self.read_on()
        self._deadline = self._loop.time() + _LINGER_SECONDS
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _refuse(self, status: int) -> None:
        """Read no further, since the client breaks the protocol, and end with one answer.

        That is the one to the last request whose head was read: of the application, also where the body is broken.
        """
        broken = self._current if self._is_in_message else None
        self._parser, self._is_in_message = None, False
        if self._exchanges:
            self._exchanges[-1].keep_alive = False
            self._deadline = math.inf
            if broken is not None:
                late = f"the rest of the body did not come within {BODY_SECONDS:g} s; send the request again"
                malformed = "the chunks of the body are malformed; RFC 9112, section 7.1, has their form"
                broken.fail(RequestTimeout(late) if status == 408 else InvalidRequest(malformed))
            return
        reason = HTTPStatus(status).phrase.encode()
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (status, reason, len(reason), reason)
        )
        self._linger()

    def _upgrade(self, rest: bytes) -> None:
        """Let a WebSocket take over. Clients that offer another protocol, such as HTTP/2, go on with this one.

        ``rest`` is what came after the head.
        """
        assert self._parser is not None
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        upgrades = [value.lower() for name, value in self._headers if name == b"upgrade"]
        is_websocket = upgrades == [b"websocket"] and self._server.has_websockets
        if method == b"CONNECT" or (is_websocket and (rest or self._exchanges)):
            self._refuse(400)
            return
        kept = [each for each in self._headers if is_websocket or each[0] != b"upgrade"]
        self._declined = [] if is_websocket else [each for each in self._headers if each[0] == b"upgrade"]
        lines = [b"%b %b HTTP/%b" % (method, self._url, version), *(b"%b: %b" % each for each in kept)]
        request = b"\r\n".join(lines) + b"\r\n\r\n" + rest
        if is_websocket:
            self._parser = None
            self._server.connections.discard(self)
            self._server.take_over(self.transport, request)
        else:
            # The parser takes the body for the other protocol's.
            self._parser = httptools.HttpRequestParser(self)
            self.data_received(request)


def _check_head(version: str, target: bytes, url: Any, headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse a head that a proxy in front may have read in another way (request smuggling).

    Raises _Refused for another version of HTTP, for several hosts or none, and for a body whose end only the last of
    several transfer codings would tell (https://www.rfc-editor.org/rfc/rfc9112#section-6.1).
    """
    if version not in ("1.1", "1.0"):
        raise _Refused(505)
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1") or url.fragment is not None:
        raise _Refused(400)
    if url.schema is not None and target.split(b"/", 3)[2].lower() not in [host.lower() for host in hosts]:
        raise _Refused(400)
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or version == "1.0"):
        raise _Refused(501)
