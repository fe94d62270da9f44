"""What an engine on another server needs of an HTTP client: a few calls, and answers that stream.

``HttpTransport`` is the real one; tests replay recorded traffic instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class ConnectionLost(Exception):
    """The server cannot be reached, closed the connection, or sent nothing for too long; the text has the reason.

    Args:
        unreachable: whether no connection was made, so that the server has not seen the request.
    """

    def __init__(self, reason: str, *, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.unreachable = unreachable


Take = Callable[[bytes], bool]
"""Takes the next bytes of an answer, or none at its end; returns whether it takes more. Never raises."""


class StreamedResponse(Protocol):
    """The answer to one request, which may still have to be sent.

    Attributes:
        status: the HTTP status, after ``begin``.
        retry_after: the header of that name, after ``begin``; empty if there is none.
    """

    status: int
    retry_after: str

    async def begin(self) -> None:
        """Wait for the status. Raises ConnectionLost."""

    async def relay(self, take: Take) -> None:
        """Call ``take`` with all bytes as they come, and return when it takes no more or there are no more.

        Bytes are taken in the call that receives them, without a switch of tasks. Between two calls they are kept, and
        the server is stopped if they become many. Raises ConnectionLost.
        """

    def finish(self) -> None:
        """Leave the little that may still come, so that the connection can be reused."""

    def close(self) -> None:
        """Close the connection, unless all has come or ``finish`` was called: the server drops the request.

        What waits for the answer then raises ConnectionLost.
        """


class Transport(Protocol):
    """An HTTP client for one server."""

    async def open(self) -> None:
        """Prepare the client; called once, in the event loop that will be used."""

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body. Raises ConnectionLost."""

    def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> StreamedResponse:
        """Send JSON and return the answer to come. Raises ConnectionLost if the client is not open.

        Args:
            headers: beside the usual ones.
        """

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""


async def read_answer(response: StreamedResponse, limit: int) -> bytes:
    """Return the body of an answer, or its beginning if it is longer than ``limit`` bytes. Raises ConnectionLost."""
    pieces: list[bytes] = []
    size = 0

    def take(data: bytes) -> bool:
        nonlocal size
        pieces.append(data)
        size += len(data)
        return size < limit

    await response.relay(take)
    return b"".join(pieces)
