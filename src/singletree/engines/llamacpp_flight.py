"""One generation under way in llama.cpp: waiting in line, sent, read, and ended at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp

from singletree.engines.admission import Ticket
from singletree.engines.engine import StopKind
from singletree.errors import SingletreeError


class Flight:
    """What ``abort`` and ``close`` need to end a generation.

    Attributes:
        outcome: how it was ended from outside: an error to raise, or a finish; None if it was not.
    """

    __slots__ = ("_opening", "outcome", "request_id", "ticket")

    def __init__(self, request_id: str, ticket: Ticket) -> None:
        self.request_id = request_id
        self.ticket = ticket
        self.outcome: SingletreeError | StopKind | None = None
        self._opening: asyncio.Task[aiohttp.ClientResponse] | None = None

    async def open(
        self, connect: Callable[[], Awaitable[aiohttp.ClientSession]], url: str, body: bytes
    ) -> aiohttp.ClientResponse | None:
        """Wait in line and send; None when it was ended meanwhile. Raises what aiohttp and ``connect`` raise.

        ``connect`` is asked when the turn has come: what ran when it stood in line may have died since.
        """
        self._opening = asyncio.create_task(self._send(connect, url, body))
        # Unlike awaiting the task, this tells our caller's cancellation from one by ``end``.
        await asyncio.wait((self._opening,))
        return None if self.outcome is not None else self._opening.result()

    async def _send(
        self, connect: Callable[[], Awaitable[aiohttp.ClientSession]], url: str, body: bytes
    ) -> aiohttp.ClientResponse:
        await self.ticket.granted()
        session = await connect()
        return await session.post(url, data=body, headers={"Content-Type": "application/json"})

    def end(self, outcome: SingletreeError | StopKind) -> None:
        """Hang up, and let ``outcome`` be found."""
        self.outcome = self.outcome or outcome
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connection, wherever the request is. Harmless when repeated."""
        opening = self._opening
        if opening is None:
            return
        if not opening.done():
            opening.cancel()
        elif not opening.cancelled() and opening.exception() is None:
            opening.result().close()
