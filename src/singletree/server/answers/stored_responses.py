"""Stored responses as the core knows them. What stores them is behind a door, and opened by the first use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from singletree.conversation import Request
from singletree.protocols.answer import EncodedResponse
from singletree.protocols.responses.state import References, StoredItems
from singletree.server.settings.config import Config
from singletree.server.turn.generation import Generation

KeepResponse = Callable[[EncodedResponse], None]
"""Gets a finished response and stores it."""


class KnownResponses(Protocol):
    """Responses and conversations that a request can continue, and where its own response is kept."""

    async def look_up(self, named: References) -> StoredItems:
        """Return what a request refers to. Raises PreviousResponseNotFound, or NotStored for a conversation."""

    def keeper(self, request: Request, generation: Generation | None) -> KeepResponse:
        """Return the function that keeps the response to ``request``, with all that ``generation`` has."""


class ResponseStore(Protocol):
    """The store of responses and conversations of a server."""

    async def opened(self) -> KnownResponses | None:
        """Return the open store; None where it cannot be used."""

    def of(self, owner: str) -> ResponseStore:
        """Return what the owner has in the store."""

    async def settled(self) -> None:
        """Wait until other processes can find what was put, for a second at most."""

    def close(self) -> None: ...


class OpenedStore(ResponseStore, KnownResponses, Protocol):
    """A store that is open."""

    def of(self, owner: str) -> OpenedStore: ...


OpenStore = Callable[[Config], OpenedStore | None]
"""Opens the store that a configuration names; None, with a warning, where its default cannot be used."""

OpenConnection = Callable[[Any], KnownResponses]
"""Makes the memory of one connection for its responses, beside the open store of the server, or beside None."""


class LaterStore:
    """A store that ``open`` opens when a request needs it for the first time."""

    def __init__(self, open: Callable[[], Awaitable[OpenedStore | None]]) -> None:
        self._open = open
        self._opening: asyncio.Future[OpenedStore | None] | None = None

    async def opened(self) -> OpenedStore | None:
        if (store := self._opened_now()) is not None:
            return store
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._opening)

    def of(self, owner: str) -> LaterStore:
        async def part() -> OpenedStore | None:
            whole = await self.opened()
            return None if whole is None else whole.of(owner)

        return LaterStore(part)

    async def settled(self) -> None:
        if (store := self._opened_now()) is not None:
            await store.settled()

    def close(self) -> None:
        if (store := self._opened_now()) is not None:
            store.close()

    def _opened_now(self) -> OpenedStore | None:
        opening = self._opening
        is_open = opening is not None and opening.done() and opening.exception() is None
        return opening.result() if opening is not None and is_open else None
