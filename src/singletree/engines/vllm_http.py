"""HTTP as the vLLM engine needs it: a few calls, and answers that stream.

``Transport`` is what the engine asks for, so that tests can put recorded traffic in its place;
``AiohttpTransport`` is the real one. aiohttp, because a streamed event costs it a third to a quarter of what
it costs httpx (CPU of the reading process, one event a read, uvloop: 18 against 59 µs at 1 stream, 6.5
against 28 µs at 16; httpx 0.28.1, aiohttp 3.14.5).
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Protocol

import aiohttp

_LARGE_BYTES = 2**20  # beyond it aiohttp wants a file, which it sends in pieces
# vLLM's uvicorn drops a connection that was idle for 5 s; one picked up at that moment would fail a request.
_IDLE_SECONDS = 2.0
_CONNECT_SECONDS = 10.0
_FINISH_SECONDS = 1.0


class ConnectionLost(Exception):
    """The server cannot be reached, hung up, or sent nothing for too long; the text says which."""


class Answer(Protocol):
    """The answer to one POST, its body still to come."""

    status: int
    retry_after: str

    async def read(self) -> bytes:
        """What has arrived, waiting for something; empty at the end. Raises ConnectionLost."""

    async def finish(self) -> None:
        """Take what little may be left, so that the connection can be used again. Never raises."""

    def close(self) -> None:
        """Hang up: the server drops the request. A ``read`` under way raises ConnectionLost."""


class Transport(Protocol):
    """A way to one server."""

    async def open(self) -> None:
        """Called once, in the event loop that will be used."""

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises ConnectionLost."""

    async def post(self, path: str, body: bytes) -> Answer:
        """Send JSON; returns when the status is known. Raises ConnectionLost."""

    async def close(self) -> None:
        """Hang up on everything. Safe to call twice."""


def _tcp() -> aiohttp.BaseConnector:
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)


class AiohttpTransport:
    """HTTP/1.1 with kept-alive connections.

    Args:
        url: where the server's root is, without a slash at the end.
        api_key: sent as a bearer token; None for none.
        read_timeout: seconds without a byte after which the server counts as lost; None for never.
        connect: makes what opens connections.
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
        self._session = aiohttp.ClientSession(
            connector=self._connect(), timeout=self._timeout, headers=headers
        )

    async def get(self, path: str) -> tuple[int, bytes]:
        try:
            async with self._opened().get(self._url + path) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(error) from error

    async def post(self, path: str, body: bytes) -> Answer:
        data = body if len(body) <= _LARGE_BYTES else io.BytesIO(body)
        headers = {"Content-Type": "application/json"}
        try:
            return _AiohttpAnswer(await self._opened().post(self._url + path, data=data, headers=headers))
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


class _AiohttpAnswer:
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
        return ConnectionLost("it cannot be reached")
    if isinstance(error, TimeoutError):
        return ConnectionLost("it sent nothing for too long")
    return ConnectionLost("the connection broke")
