"""Who may run now, when an engine has only so many slots and so much room in its KV cache."""

from __future__ import annotations

import asyncio
import heapq

from singletree.errors import Overloaded


class Admission:
    """Grants slots and cache room, lower priority first, then first come first served.

    Nobody overtakes: a long prompt waits until it fits and shorter ones wait behind it, so that none starves.

    Args:
        slots: generations at once.
        tokens: room in the KV cache.
        queue_limit: requests that may wait before more are refused.
    """

    def __init__(self, slots: int, tokens: int, queue_limit: int) -> None:
        self._free_slots = slots
        self._free_tokens = tokens
        self._queue_limit = queue_limit
        self._waiting: list[tuple[int, int, Ticket]] = []
        self._arrivals = 0

    def ticket(self, tokens: int, priority: int) -> Ticket:
        """Stand in line for a slot and ``tokens`` of room, at most all there is.

        Raises Overloaded when the line is full. The caller must ``release`` the ticket, granted or not.
        """
        self._drop_gone()
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
        """How many stand in line."""
        self._drop_gone()
        return len(self._waiting)

    def _drop_gone(self) -> None:
        if any(ticket.gone for _, _, ticket in self._waiting):
            self._waiting = [entry for entry in self._waiting if not entry[2].gone]
            heapq.heapify(self._waiting)

    def _grant(self) -> None:
        self._drop_gone()
        while self._waiting and self._free_slots and self._waiting[0][2].tokens <= self._free_tokens:
            _, _, ticket = heapq.heappop(self._waiting)
            self._free_slots -= 1
            self._free_tokens -= ticket.tokens
            ticket.grant()

    def give_back(self, tokens: int) -> None:
        """A granted ticket was released."""
        self._free_slots += 1
        self._free_tokens += tokens
        self._grant()

    def line_changed(self) -> None:
        """A ticket that had not been granted was released; those behind it may fit now."""
        self._grant()


class Ticket:
    """One place in line, then one slot."""

    __slots__ = ("_admission", "_event", "gone", "tokens")

    def __init__(self, admission: Admission, tokens: int) -> None:
        self.tokens = tokens
        self.gone = False
        self._admission = admission
        self._event = asyncio.Event()

    def grant(self) -> None:
        """Called by the admission when the turn has come."""
        self._event.set()

    @property
    def is_granted(self) -> bool:
        """Whether the turn has come."""
        return self._event.is_set()

    async def granted(self) -> None:
        """Wait for the turn. When the waiting is cancelled the ticket must still be released."""
        await self._event.wait()

    def release(self) -> None:
        """Give back what was granted, or leave the line. Harmless when repeated."""
        if self.gone:
            return
        self.gone = True
        if self._event.is_set():
            self._admission.give_back(self.tokens)
        else:
            self._admission.line_changed()
