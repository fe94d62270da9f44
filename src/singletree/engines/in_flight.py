"""One request to an engine's server: sent, read, and possibly ended at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, Protocol, TypeVar

from singletree.engines.engine import StopKind
from singletree.errors import SingletreeError


class _Response(Protocol):
    def close(self) -> object: ...


ResponseT = TypeVar("ResponseT", bound=_Response)


class InFlightRequest(Generic[ResponseT]):
    """One running or waiting request, as ``abort`` and ``close`` need it to end the generation.

    Attributes:
        request_id: the id of the job.
        outcome: how it was ended by ``end``: an error to raise, or a finish reason; None if it was not.
        response: the response, from an HTTP client that has one before it is sent; others use ``open``.
    """

    __slots__ = ("_opening", "outcome", "request_id", "response")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.outcome: SingletreeError | StopKind | None = None
        self.response: ResponseT | None = None
        self._opening: asyncio.Task[ResponseT] | None = None

    async def open(self, sending: Coroutine[Any, Any, ResponseT]) -> ResponseT | None:
        """Await ``sending`` and return the response; None when ``end`` was called meanwhile. Raises what it raises."""
        self._opening = asyncio.create_task(sending)
        # Unlike awaiting the task, this distinguishes a cancellation of our caller from one by ``end``.
        await asyncio.wait((self._opening,))
        return None if self.outcome is not None else self._opening.result()

    def end(self, outcome: SingletreeError | StopKind) -> None:
        """Close the connection and set ``outcome``, unless it is set already."""
        self.outcome = self.outcome or outcome
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connection, or stop opening it; a response that was read to its end keeps its connection."""
        opening = self._opening
        if self.response is not None:
            self.response.close()
        elif opening is None:
            return
        elif not opening.done():
            opening.cancel()
        elif not opening.cancelled() and opening.exception() is None:
            opening.result().close()
