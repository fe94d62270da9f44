"""Prepares a slot for a request: parks what it displaces, and restores what is known of its prompt."""

from __future__ import annotations

import logging

from singletree.engines.llamacpp.admission import KEEP_SECONDS, Admission, Ticket
from singletree.engines.llamacpp.parking import ParkedStates
from singletree.engines.llamacpp.prefix_cache import PrefixCache
from singletree.engines.llamacpp.slot_actions import SlotActions

_LOG = logging.getLogger(__name__)


# llama.cpp copies about 120 MB of a state in a second, once to park it and once to restore it.
_PARKED_BYTES_PER_SECOND = 60e6
_LONGEST_KEEP_SECONDS = 30.0


def keep_seconds(tokens: int, parked_bytes: int | None, speed: float | None) -> float:
    """Return how long an idle slot is kept for its session: as long as another turn would cost without its state.

    Then waiting and changing cost the same at worst, whenever the next turn comes.

    Args:
        tokens: how many tokens the slot holds.
        parked_bytes: the size of its state if that would be parked; None if it would be read again.
        speed: how many tokens are read in a second; None if unknown.
    """
    reading = tokens / speed if speed else 0.0
    cost = reading if parked_bytes is None else parked_bytes / _PARKED_BYTES_PER_SECOND
    return min(max(cost, KEEP_SECONDS), _LONGEST_KEEP_SECONDS)


class SlotStates:
    """The states of one running llama.cpp process that are not in its slots: parked ones, and saved ones on disk.

    Args:
        admission: grants the slots.
        actions: saves, restores and erases.
        parked: None for a model whose states cannot be saved.
        prefixes: None without ``--prefix-cache-path``.
    """

    def __init__(
        self,
        admission: Admission,
        actions: SlotActions,
        parked: ParkedStates | None,
        prefixes: PrefixCache | None,
    ) -> None:
        self.parked = parked
        self.prefixes = prefixes
        self._admission = admission
        self._actions = actions

    def known(self, packed_ids: bytes) -> int:
        """Return how many tokens of a prompt, as of ``pack_ids``, are parked or on disk."""
        caches = (self.parked, self.prefixes)
        return max((cache.known(packed_ids) for cache in caches if cache is not None), default=0)

    async def prepare(self, ticket: Ticket) -> None:
        """Prepare the slot of a ticket that was granted, and give back the slots that were lent to it."""
        try:
            await self._park(ticket)
            packed_ids, found = ticket.claim.packed_ids, ticket.found
            # Until the prompt is compared with it, a restored state has all its tokens.
            room = self._admission.room_for(ticket)
            if self.parked is not None:
                found = await self.parked.restore(ticket.slot, packed_ids, found, room)
            if self.prefixes is not None:
                await self.prefixes.restore(ticket.slot, packed_ids, found, room)
        finally:
            self._admission.settle(ticket)

    async def _park(self, ticket: Ticket) -> None:
        if self.parked is None:
            return
        for held in ticket.displaced:
            if held.slot == ticket.slot:
                await self.parked.park(held, ticket.claim.packed_ids)
                continue
            await self.parked.park(held)
            try:
                await self._actions.erase(held.slot)
            except OSError as error:
                _LOG.warning("a slot could not be erased: %s", error)
        if ticket.source is not None:
            await self.parked.park(ticket.source)

    def turn_ended(self, slot: int) -> None:
        """Note that a turn has ended, and that its slot holds the conversation."""
        if self.prefixes is not None:
            self.prefixes.turn_ended(slot)

    async def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` for what is being saved."""
        if self.prefixes is not None:
            await self.prefixes.close(seconds)
