"""One HTTP request and its answer on a connection, as the application sees them (ASGI)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

from singletree.errors import Rejected
from singletree.server.answers.client_link import ON_DISCONNECT, WRITE_NOW

PIECE_BYTES = 2**17
"""Size from which a part of a body is given to the application before the whole body is there. It is less than uvloop
reads at a time, 256,000: no part is put together here, and a turn of the loop takes no more from a connection."""

_DISCONNECT: Message = {"type": "http.disconnect"}
_LAST_CHUNK = b"0\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}".encode() for each in HTTPStatus}
GATHERED_BYTES = 64 * 1024
"""From which size on what follows the head is written at once."""
_WITHOUT_BODY = (204, 304)
_LOG = logging.getLogger(__name__)


class Carrier(Protocol):
    """Interface: the connection of an exchange.

    ``is_writable`` is false while the client does not read and the transport has enough.
    """

    is_writable: bool
    transport: asyncio.Transport

    @property
    def date(self) -> bytes:
        """Return the header with the time."""

    async def writable(self) -> None:
        """Wait until ``is_writable``, or until the connection is closed."""

    def read_on(self) -> None:
        """Read on, if reading was paused because of a large body."""

    def answered(self) -> None:
        """Go on with the next request, or close: the first exchange has its answer."""

    def close(self) -> None:
        """Close, perhaps without the end of the answer, so that the client sees that it is not complete."""


class Exchange:
    """A request whose head has been read (``scope``, without extensions).

    Attributes:
        keep_alive: whether further requests may follow on the connection.
        has_all: whether the whole body has been received.
        is_answered: whether the whole answer has been written.
    """

    __slots__ = (
        "_answer_left",
        "_body",
        "_carrier",
        "_error",
        "_expects_continue",
        "_gathered",
        "_has_begun",
        "_is_chunked",
        "_is_delivered",
        "_is_event_stream",
        "_is_gone",
        "_is_head",
        "_on_leave",
        "_waiting",
        "has_all",
        "is_answered",
        "keep_alive",
        "scope",
    )

    def __init__(self, scope: Scope, carrier: Carrier, *, keep_alive: bool, expects_continue: bool) -> None:
        self.scope = scope
        scope["extensions"] = {WRITE_NOW: self.write_now, ON_DISCONNECT: self.on_disconnect}
        self.keep_alive = keep_alive
        self.has_all = self.is_answered = self._is_event_stream = False
        self._carrier = carrier
        self._expects_continue = expects_continue
        self._body: bytes | bytearray = b""
        self._is_delivered = self._is_gone = self._has_begun = self._is_chunked = False
        self._is_head = scope["method"] == "HEAD"
        self._answer_left = 0
        # The head, and what follows it in the same turn of the loop: one packet, where the client waits for all.
        self._gathered: bytearray | None = None
        self._error: Rejected | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._on_leave: Callable[[], None] | None = None

    async def run(self, app: ASGIApp) -> None:
        """Let the application answer. Whatever it does, the connection can go on or is closed."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            _LOG.exception("the application failed to answer")
        finally:
            self._error = None  # Once it is raised, it refers to this exchange,
            self.scope["extensions"].clear()  # and so do they.
        if self.is_answered or self._is_gone:
            return
        if self._has_begun:
            self._flush()
            self._carrier.close()
            return
        self.keep_alive = False
        self._begin({"status": 500, "headers": [(b"content-length", b"0")]})
        self._end()

    # From the connection

    def take(self, piece: bytes) -> bool:
        """Keep a piece of the body. Return whether more may be read now."""
        if self.is_answered or self._is_gone:
            return True
        if not self._body:
            self._body = piece
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += piece
        if len(self._body) < PIECE_BYTES:
            return True
        self._wake()
        return False

    def complete(self) -> None:
        self.has_all = True
        self._wake()

    def fail(self, error: Rejected) -> None:
        """Let the application answer that the rest of the body does not come."""
        self._error = error
        self._wake()

    def probe(self) -> bool:
        """Write what the client ignores. Return false where it ignores nothing: before an answer to HTTP/1.0."""
        if self._is_event_stream:
            self.write_now(b":\n\n")
        elif not self._has_begun:
            if self.scope["http_version"] != "1.1":
                return False
            self._carrier.transport.write(_CONTINUE)
        return True

    def leave(self) -> None:
        """Note that the client is gone: nothing more is written."""
        self._is_gone = True
        self._body = b""
        self._wake()
        if self._on_leave is not None:
            self._on_leave()

    # From the application

    async def receive(self) -> Message:
        """Return the body, in one message unless it is large; after it, wait until the client disconnects.

        Raises what was given to ``fail``.
        """
        while not (self._is_gone or self.is_answered or self._error or self._has_piece()):
            if self._expects_continue:
                self._expects_continue = False
                self._carrier.transport.write(_CONTINUE)
            if not self.has_all:
                self._carrier.read_on()
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        if self._is_gone or self.is_answered:
            return _DISCONNECT
        if self._error is not None:
            raise self._error
        body, self._body = bytes(self._body), b""
        self._is_delivered = self.has_all
        return {"type": "http.request", "body": body, "more_body": not self.has_all}

    async def send(self, message: Message) -> None:
        if not self._carrier.is_writable:
            await self._carrier.writable()
        if self._is_gone:
            return
        if message["type"] == "http.response.start":
            self._begin(message)
            return
        self._write(b"" if self._is_head else message.get("body", b""), not message.get("more_body"))

    def write_now(self, body: bytes, is_last: bool = False) -> bool:
        """Write a part of the body, the last perhaps empty; return False if the client has to be waited for."""
        if not self._carrier.is_writable:
            return False
        if not self._is_gone:
            self._write(body, is_last)
        return True

    def on_disconnect(self, leave: Callable[[], None] | None) -> bool:
        """Call ``leave`` once the client has disconnected; None for nothing. Return whether it is connected still."""
        self._on_leave = leave
        return not self._is_gone

    def _write(self, body: bytes, is_last: bool) -> None:
        if self._is_chunked:
            # As one piece: the transport makes a system call for each write, and a token is short enough to be copied.
            if body:
                body = b"%x\r\n%b\r\n" % (len(body), body)
            if is_last:
                body += _LAST_CHUNK
        else:
            self._answer_left -= len(body)
        if self._gathered is not None:
            self._gathered += body
            if len(self._gathered) >= GATHERED_BYTES:
                self._flush()
        elif body:
            self._carrier.transport.write(body)
        if is_last:
            self._end()

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered and not self._is_gone:
            self._carrier.transport.write(gathered)

    def _begin(self, message: Message) -> None:
        status = message["status"]
        headers = message["headers"]
        # Messages answers 529, which is no status of HTTP's registry.
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status
        lines = [line, self._carrier.date, *[b"%b: %b" % each for each in headers]]
        by_name = dict(headers)
        self._is_event_stream = by_name.get(b"content-type", b"").startswith(b"text/event-stream")
        length = by_name.get(b"content-length")
        has_body = not self._is_head and status not in _WITHOUT_BODY
        if length is None and has_body:
            if self.scope["http_version"] == "1.1":
                self._is_chunked = True
                lines.append(b"transfer-encoding: chunked")
            else:
                self.keep_alive = False
        if not self.has_all:
            self.keep_alive = False  # What is left of the body is not read.
        if not self.keep_alive:
            lines.append(b"connection: close")
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
            raise ValueError("a header of the answer has a line break")
        self._answer_left = int(length) if length is not None and has_body else 0
        self._has_begun = True
        self._gathered = bytearray(head + b"\r\n\r\n")
        asyncio.get_running_loop().call_soon(self._flush)

    def _end(self) -> None:
        if self._answer_left > 0:
            self.keep_alive = False  # The client waits for more: only the end of the connection tells it.
        self._flush()
        self.is_answered = True
        self._body = b""
        self._carrier.answered()

    def _has_piece(self) -> bool:
        return not self._is_delivered and (self.has_all or len(self._body) >= PIECE_BYTES)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
