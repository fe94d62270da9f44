"""Decides which request may run, for an engine with limited slots and limited room in its KV cache."""

from __future__ import annotations

import asyncio
import heapq

from singletree.errors import Overloaded


class Admission:
    """Grant slots and room in the KV cache: the lowest priority number first, then first come, first served.

    A request never overtakes another of its priority: a long prompt waits until it fits, and shorter ones wait behind
    it, so that no request starves.

    Args:
        slots: how many generations run at once.
        tokens: room in the KV cache, in tokens.
        queue_limit: how many requests may wait; more are refused.
    """

    def __init__(self, slots: int, tokens: int, queue_limit: int) -> None:
        self._free_slots = slots
        self._free_tokens = tokens
        self._queue_limit = queue_limit
        self._waiting: list[tuple[int, int, Ticket]] = []
        self._arrivals = 0

    def ticket(self, tokens: int, priority: int) -> Ticket:
        """Queue for a slot and for room for ``tokens`` tokens, which must not exceed the room of the whole cache.

        Raises Overloaded when the queue is full. The caller must ``release`` the ticket, granted or not.
        """
        self._drop_released()
        if len(self._waiting) >= self._queue_limit:
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting for the engine already; try again later"
            )
        ticket = Ticket(self, tokens)
        self._arrivals += 1
        heapq.heappush(self._waiting, (priority, self._arrivals, ticket))
        self._grant()
        return ticket

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        self._drop_released()
        return len(self._waiting)

    @property
    def free_tokens(self) -> int:
        """Room in the KV cache that no granted request has reserved, in tokens."""
        return self._free_tokens

    def _drop_released(self) -> None:
        if any(ticket.released for _, _, ticket in self._waiting):
            self._waiting = [entry for entry in self._waiting if not entry[2].released]
            heapq.heapify(self._waiting)

    def _grant(self) -> None:
        self._drop_released()
        while self._waiting and self._free_slots and self._waiting[0][2].tokens <= self._free_tokens:
            _, _, ticket = heapq.heappop(self._waiting)
            self._free_slots -= 1
            self._free_tokens -= ticket.tokens
            ticket.grant()

    def return_slot(self, tokens: int) -> None:
        """Take back the slot and the room of a granted ticket that was released."""
        self._free_slots += 1
        self._free_tokens += tokens
        self._grant()

    def queue_changed(self) -> None:
        """Grant what fits now, after a waiting ticket was released: those behind it may fit."""
        self._grant()


class Ticket:
    """A place in the queue, later a slot."""

    __slots__ = ("_admission", "_event", "released", "tokens")

    def __init__(self, admission: Admission, tokens: int) -> None:
        self.tokens = tokens
        self.released = False
        self._admission = admission
        self._event = asyncio.Event()

    def grant(self) -> None:
        """Mark the ticket as granted; called by ``Admission``."""
        self._event.set()

    @property
    def is_granted(self) -> bool:
        """Whether slot and room were granted."""
        return self._event.is_set()

    async def granted(self) -> None:
        """Wait for the grant. A caller whose wait is cancelled must still release the ticket."""
        await self._event.wait()

    def release(self) -> None:
        """Return what was granted, or leave the queue. Safe to call twice."""
        if self.released:
            return
        self.released = True
        if self._event.is_set():
            self._admission.return_slot(self.tokens)
        else:
            self._admission.queue_changed()
