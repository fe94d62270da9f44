"""The HTTP client of engines on other servers: a few calls, and answers that stream.

The engine needs a ``Transport``, so that tests can replay recorded traffic; ``AiohttpTransport`` is the real one. It
uses aiohttp because a streamed event costs a third to a quarter of what it costs with httpx (CPU of the reading
process, one event for each read, uvloop: 18 against 59 µs with 1 stream, 6.5 against 28 µs with 16; httpx 0.28.1,
aiohttp 3.14.5).
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, cast, runtime_checkable

import aiohttp
from aiohttp.client_proto import ResponseHandler

_LARGE_BYTES = 2**20  # aiohttp sends larger bodies in pieces, but only from a file object
# The servers' uvicorn closes a connection that was idle for 5 s; a request sent on it at that moment would fail.
_IDLE_SECONDS = 2.0
_CONNECT_SECONDS = 10.0
_FINISH_SECONDS = 1.0


class ConnectionLost(Exception):
    """The server cannot be reached, closed the connection, or sent nothing for too long; the text has the reason.

    Args:
        unreachable: whether no connection was made, so that the server has not seen the request.
    """

    def __init__(self, reason: str, *, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.unreachable = unreachable


class StreamedResponse(Protocol):
    """The answer to one POST, whose body is still to be read."""

    status: int
    retry_after: str

    async def read(self) -> bytes:
        """Wait for the next bytes and return them; empty at the end. Raises ConnectionLost."""

    async def finish(self) -> None:
        """Read the little that may be left, so that the connection can be reused. Never raises."""

    def close(self) -> None:
        """Close the connection: the server drops the request, and a pending ``read`` raises ConnectionLost."""


Take = Callable[[bytes], bool]
"""Takes the next bytes of an answer, or none at its end; returns whether it takes more. Never raises."""


@runtime_checkable
class RelayedResponse(StreamedResponse, Protocol):
    """An answer whose bytes can be taken where they are received, without a switch of tasks."""

    async def relay(self, take: Take) -> None:
        """Call ``take`` with all bytes as they come, and return when it takes no more. Raises ConnectionLost."""


class Transport(Protocol):
    """An HTTP client for one server."""

    async def open(self) -> None:
        """Prepare the client; called once, in the event loop that will be used."""

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body. Raises ConnectionLost."""

    async def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> StreamedResponse:
        """Send JSON, and return when the status is known. Raises ConnectionLost.

        Args:
            headers: beside the usual ones.
        """

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""


def _tcp() -> aiohttp.BaseConnector:
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)


class AiohttpTransport:
    """HTTP/1.1 client with keep-alive connections.

    Args:
        url: root URL of the server, without a slash at the end.
        api_key: sent as a bearer token; None to send none.
        read_timeout: seconds without a byte after which the server counts as lost; None for no limit.
        connect: creates the connector, which opens connections.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        read_timeout: float | None = None,
        connect: Callable[[], aiohttp.BaseConnector] = _tcp,
    ) -> None:
        self._url = url
        self._connect = connect
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=read_timeout
        )
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        headers = {**self._headers, "Accept-Encoding": "identity"}
        connector = self._connect()
        made = cast("type[ResponseHandler]", _Connection)
        connector._factory = partial(made, loop=asyncio.get_running_loop())
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=headers)

    async def get(self, path: str) -> tuple[int, bytes]:
        try:
            async with self._opened().get(self._url + path) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(error) from error

    async def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> StreamedResponse:
        data = body if len(body) <= _LARGE_BYTES else io.BytesIO(body)
        sent = {**headers, "Content-Type": "application/json"}
        try:
            return _AiohttpResponse(await self._opened().post(self._url + path, data=data, headers=sent))
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(error) from error

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise ConnectionLost("the engine is not started, or closed")
        return self._session


class _Connection(ResponseHandler):
    """A connection that calls ``heard`` for all that happens on it, after aiohttp has read it.

    aiohttp has no interface for this. A ``StreamReader`` wakes a task for each read, which costs more than the read.
    """

    heard: Callable[[], None] | None = None
    _is_held = False

    def pause_reading(self) -> None:
        self._is_held = True
        super().pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume, if reading was paused: aiohttp (3.14) calls it at each read, and parses nothing once more then."""
        if self._is_held:
            self._is_held = False
            super().resume_reading(resume_parser)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.heard is not None:
            self.heard()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if self.heard is not None:
            self.heard()


class _Relay:
    """Gives what a connection receives to ``take``; ``over`` is done when it takes no more, or with the error."""

    __slots__ = (
        "_came_again",
        "_connection",
        "_content",
        "_is_taking",
        "_last",
        "_limit",
        "_loop",
        "_take",
        "_timer",
        "over",
    )

    def __init__(self, connection: _Connection, content: aiohttp.StreamReader, take: Take) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._content = content
        self._take = take
        self._is_taking = self._came_again = False
        self._last = self._loop.time()
        self._limit = connection.read_timeout
        self._timer = None if self._limit is None else self._loop.call_later(self._limit, self._check)
        self.over: asyncio.Future[None] = self._loop.create_future()
        # One timer looks after all reads; aiohttp would set a new one for each.
        connection.read_timeout = None
        connection.heard = self.hear

    def hear(self) -> None:
        """Take what has come."""
        if self._is_taking:
            # To read lets aiohttp parse what it had held back, before the read returns.
            self._came_again = True
            return
        self._is_taking = True
        try:
            more = self._take_all()
        except (aiohttp.ClientError, OSError) as error:
            self._end(_lost(error))
        except Exception as error:
            self._end(error)
        else:
            if not more:
                self._end()
        finally:
            self._is_taking = False

    def _take_all(self) -> bool:
        """Return whether more may come."""
        self._came_again = True
        while self._came_again:
            self._came_again = False
            data = self._content.read_nowait()
            if data and not self._take(data):
                return False
        if self._content.at_eof():
            return self._take(b"") and False
        self._last = self._loop.time()
        return True

    def stop(self) -> None:
        """Leave the connection. This must not wait for a task: the next request may be on it already."""
        if self._timer is not None:
            self._timer.cancel()
        if self._connection.heard == self.hear:
            self._connection.heard, self._connection.read_timeout = None, self._limit

    def _end(self, error: Exception | None = None) -> None:
        self.stop()
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)

    def _check(self) -> None:
        assert self._limit is not None
        left = self._last + self._limit - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self._end(_lost(TimeoutError()))


class _AiohttpResponse:
    __slots__ = ("_response", "retry_after", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.retry_after = response.headers.get("Retry-After", "")

    async def read(self) -> bytes:
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(error) from error

    async def relay(self, take: Take) -> None:
        connection = self._response.connection
        protocol = None if connection is None else connection.protocol
        if not isinstance(protocol, _Connection):  # All bytes are here.
            while take(data := await self.read()) and data:
                pass
            return
        relay = _Relay(protocol, self._response.content, take)
        try:
            relay.hear()
            await relay.over
        finally:
            relay.stop()

    async def finish(self) -> None:
        try:
            async with asyncio.timeout(_FINISH_SECONDS):
                while await self._response.content.readany():
                    pass
        except (aiohttp.ClientError, OSError):
            self._response.close()

    def close(self) -> None:
        self._response.close()


def _lost(error: Exception) -> ConnectionLost:
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return ConnectionLost("it cannot be reached", unreachable=True)
    if isinstance(error, TimeoutError):
        return ConnectionLost("it sent nothing for too long")
    return ConnectionLost("the connection broke")
