"""One HTTP/1.1 connection to an engine's server, and the answers that come over it.

The parser is httptools, that of uvicorn. A streamed event costs a call for its bytes and one for what takes them; a
client with stream readers wakes a task for each read, which costs more than all the rest.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from singletree.remote.transport import ConnectionLost, Redirected, Take

_BROKE = "the connection broke"
_MAX_UNREAD_BYTES = 2**17  # of an answer that nobody takes; then the server is stopped
_MAX_MARKUP_BYTES = (
    2**16
)  # that may come in a row and are no body: of a head, of trailers, of the sizes of chunks


class ConnectionOwner(Protocol):
    """Keeps the connections."""

    def opened(self, connection: HttpConnection) -> None:
        """Note a new connection, which rests."""

    def released(self, connection: HttpConnection) -> None:
        """Note that the answer is complete: the connection may be used again."""

    def left(self, connection: HttpConnection) -> None:
        """Note that nobody waits for the rest of the answer, which has to end soon."""

    def resend(self, response: HttpResponse, request: Sequence[bytes]) -> None:
        """Send a request again, on a new connection."""

    def lost(self, connection: HttpConnection) -> None:
        """Note that the connection is closed."""


class HttpResponse:
    """The answer to one request, in the event loop ``loop``; see ``StreamedResponse``."""

    __slots__ = (
        "_connection",
        "_failure",
        "_loop",
        "_opening",
        "_unread",
        "_unread_bytes",
        "_waiter",
        "retry_after",
        "status",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.status = 0
        self.retry_after = ""
        self._connection: HttpConnection | None = None  # while more may come
        self._opening: asyncio.Task[None] | None = None
        self._failure: ConnectionLost | None = None
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    async def begin(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self.status:
            await self._wait()

    async def relay(self, take: Take) -> None:
        if self._unread:
            data = b"".join(self._unread)
            self._unread.clear()
            self._unread_bytes = 0
            if self._connection is not None:
                self._connection.resume()
            if not take(data):
                return
        connection = self._connection
        if connection is not None:
            connection.relay_to(take)
            try:
                await self._wait()
            finally:
                connection.stop_relay(take)
        elif self._failure is not None:
            raise self._failure
        else:
            take(b"")

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def finish(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._unread.clear()
            connection.drain()

    def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self.fail(ConnectionLost(_BROKE))
        elif self._connection is not None:
            self._unread.clear()
            self._connection.drop()

    # What the connection and its owner call:

    def opens(self, opening: asyncio.Task[None]) -> None:
        self._opening = opening

    def sent_on(self, connection: HttpConnection) -> None:
        """Note the connection that it will come over."""
        self._opening, self._connection = None, connection

    def begun(self, status: int, retry_after: str) -> None:
        self.status, self.retry_after = status, retry_after
        self.wake()

    def keep(self, data: bytes) -> bool:
        """Keep bytes that nobody takes now; return whether more may come."""
        self._unread.append(data)
        self._unread_bytes += len(data)
        return self._unread_bytes <= _MAX_UNREAD_BYTES

    def ended(self) -> None:
        self._connection = None

    def fail(self, failure: ConnectionLost) -> None:
        """End what waits, now or later, with ``failure``."""
        self._failure, self._opening, self._connection = failure, None, None
        self.wake(failure)

    def wake(self, error: Exception | None = None) -> None:
        """Let what waits go on, or raise ``error``."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


def _ignore(data: bytes) -> None:
    """Parse nothing: the connection is lost."""


class HttpConnection(asyncio.Protocol):
    """A connection, which carries one request after the other.

    A server may close a connection at the moment a second request is sent on it: because it was idle, or without a
    reason, as llama.cpp does after each stream. If not one byte of an answer has come, the request is sent again.

    One timer looks after all reads: it is moved only when it has come, not at each read.

    Attributes:
        rests_until: the time of the loop at which the connection is closed if no request is sent on it before; None
            while it is in use.

    Args:
        owner: keeps it.
        read_timeout: seconds without a byte after which the server counts as lost; None for no limit.
    """

    __slots__ = (
        "_body",
        "_ends_with_connection",
        "_feed",
        "_has_served",
        "_headers",
        "_heard_at",
        "_is_complete",
        "_is_in_body",
        "_is_paused",
        "_loop",
        "_markup_bytes",
        "_may_be_reused",
        "_owner",
        "_parser",
        "_read_timeout",
        "_refusal",
        "_repeatable",
        "_response",
        "_take",
        "_timer",
        "_transport",
        "on_body",
        "rests_until",
    )

    def __init__(self, owner: ConnectionOwner, read_timeout: float | None) -> None:
        self._owner = owner
        self._read_timeout = read_timeout
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        self._response: HttpResponse | None = None
        self._take: Take | None = None
        self._has_served = False
        self._repeatable: Sequence[bytes] = ()  # the request, if it may be sent again
        self._is_paused = False
        self._markup_bytes = 0
        self._body: list[bytes] = []  # what the parser has found in the bytes of one read
        self.on_body = self._body.append  # so that the parser calls no Python for it
        self._headers: dict[bytes, bytes] = {}
        self._is_in_body = self._is_complete = self._ends_with_connection = self._may_be_reused = False
        self._refusal: ConnectionLost | None = None
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._feed: Callable[[bytes], None] = self._parser.feed_data
        self.rests_until: float | None = None

    # Requests

    def send(self, response: HttpResponse, request: Sequence[bytes]) -> None:
        """Send the pieces of a request, whose answer ``response`` will be."""
        if self._transport is None or self._transport.is_closing():
            response.fail(ConnectionLost(_BROKE))
            return
        self._response, self.rests_until = response, None
        self._is_in_body = self._is_complete = False
        self._markup_bytes = 0
        self._headers.clear()
        self._repeatable = request if self._has_served else ()
        response.sent_on(self)
        self._transport.writelines(request)
        self._heard_at = self._loop.time()
        if self._timer is None and self._read_timeout is not None:
            self._timer = self._loop.call_later(self._read_timeout, self._check_silence)

    def relay_to(self, take: Take) -> None:
        """Give ``take`` the bytes of the answer as they come."""
        self._take = take
        self.resume()

    def resume(self) -> None:
        """Read on, if the server was stopped."""
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._heard_at = self._loop.time()
            self._transport.resume_reading()

    def stop_relay(self, take: Take) -> None:
        """Give ``take`` nothing more; the next request may have another one already."""
        if self._take is take:
            self._take = None

    def drain(self) -> None:
        """Read the rest of the answer for nobody."""
        self.relay_to(lambda data: True)
        self._owner.left(self)

    @property
    def is_closing(self) -> bool:
        """Whether it cannot carry a request any more."""
        return self._transport is None or self._transport.is_closing()

    @property
    def ends(self) -> tuple[str, str]:
        """The addresses of the other end and of this one; empty where there is none."""
        names = (
            self._transport and self._transport.get_extra_info(name) for name in ("peername", "sockname")
        )
        peer, own = (str(name[0]) if name else "" for name in names)
        return peer, own

    def drop(self, failure: ConnectionLost | None = None) -> None:
        """Close the connection at once; a pending answer fails with ``failure``."""
        self._feed = _ignore
        response, self._response, self._take = self._response, None, None
        if self._transport is not None:
            self._transport.abort()
        if response is not None:
            response.fail(failure or ConnectionLost(_BROKE))

    def _check_silence(self) -> None:
        self._timer = None
        if self._response is None or self._read_timeout is None:
            return  # The next request starts it again.
        if self._is_paused:
            self._heard_at = self._loop.time()
        left = self._heard_at + self._read_timeout - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_silence)
        else:
            self.drop(ConnectionLost("it sent nothing for too long"))

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast("asyncio.Transport", transport)
        found = transport.get_extra_info("socket")
        if found is not None and found.family != getattr(socket, "AF_UNIX", None):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._heard_at = self._loop.time()
        is_http = True
        try:
            self._feed(data)
        except (HttpParserError, HttpParserUpgrade):
            is_http = False  # What came before it still counts.
        body = self._body
        if body:
            piece = body.pop()
            if body:
                body.append(piece)
                piece = b"".join(body)
                body.clear()
            self._markup_bytes = 0
            take = self._take
            if take is None:
                self._keep(piece)
            else:
                try:
                    if not take(piece):
                        self._stop(take)
                except Exception as error:
                    self._stop(take, error)
        else:
            self._markup_bytes += len(data)
            is_http = is_http and self._markup_bytes <= _MAX_MARKUP_BYTES
        if self._is_complete:
            self._end(is_http=is_http)
        elif not is_http:
            self.drop(self._refusal)

    def eof_received(self) -> bool:
        """See ``asyncio.Protocol``: the connection is closed, since no server answers a half of it."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        response, self._transport = self._response, None
        if response is not None and self._repeatable:
            self._response = None
            self._owner.resend(response, self._repeatable)
        elif exc is None and self._ends_with_connection and self._is_in_body:
            self._end(is_http=False)
        self.drop()
        self._parser = None
        if self._timer is not None:
            self._timer.cancel()
        self._owner.lost(self)

    def _keep(self, data: bytes) -> None:
        if self._response is not None and not self._response.keep(data) and not self._is_complete:
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()

    def _stop(self, take: Take, error: Exception | None = None) -> None:
        if self._take is take:
            self._take = None
            if self._response is not None:
                self._response.wake(error)

    def _end(self, *, is_http: bool) -> None:
        """End the answer, whose last byte has come."""
        response, take = self._response, self._take
        self._is_complete = False
        if response is None:  # It was closed by what took the bytes.
            return
        self._response = self._take = None
        response.ended()
        # An answer may come before the server has read all of the request, and it may never read the rest.
        transport = self._transport
        if is_http and self._may_be_reused and transport and not transport.get_write_buffer_size():
            self._has_served = True
            self.resume()
            self._owner.released(self)
        else:
            self.drop()
        if take is not None:
            try:
                take(b"")
            except Exception as error:
                response.wake(error)
            else:
                response.wake()

    # What the parser calls; an exception ends the parsing

    def on_message_begin(self) -> None:
        """Refuse an answer to nothing."""
        if self._response is None or self._is_complete:
            raise ValueError("an answer without a request")
        self._repeatable = ()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, but no trailer."""
        if not self._is_in_body:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Tell the status to what waits for it, unless another head follows."""
        assert self._parser is not None
        assert self._response is not None
        status, headers = self._parser.get_status_code(), self._headers
        if status < 200:
            headers.clear()
            return
        self._is_in_body = True
        self._refusal = _refused(status, headers)
        if self._refusal is not None:
            raise ValueError(str(self._refusal))
        coding = headers.get(b"transfer-encoding", b"").lower()
        self._ends_with_connection = b"content-length" not in headers and not coding.endswith(b"chunked")
        self._response.begun(status, headers.get(b"retry-after", b"").decode("latin-1"))

    def on_message_complete(self) -> None:
        """Note the end of an answer, but not that of an interim one."""
        assert self._parser is not None
        if self._is_in_body:
            self._is_complete, self._is_in_body = True, False
            self._may_be_reused = self._parser.should_keep_alive()


def _refused(status: int, headers: dict[bytes, bytes]) -> ConnectionLost | None:
    """Return why an answer is of no use, whatever its body; None if it may be of use."""
    if 300 <= status < 400 and b"location" in headers:
        return Redirected(status, headers[b"location"].decode("utf-8", "replace"))
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        return ConnectionLost("it compresses its answers although it was asked not to")
    return None
