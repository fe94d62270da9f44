"""Prepares a slot for a request: parks what it displaces, restores what is known of its prompt, estimates the rest."""

from __future__ import annotations

import logging

from singletree.llamacpp.admission import KEEP_SECONDS, Admission, Ticket
from singletree.llamacpp.parking import ParkedStates
from singletree.llamacpp.prefix_cache import PrefixCache
from singletree.llamacpp.slots import SlotActions

MIN_REPORTED_SECONDS = 5.0
"""Shorter waits are not logged."""
REPORT_SECONDS = 30.0
"""After this time the rest of the same prompt is logged again."""
_FEWEST_TOKENS = 32
"""A measurement of fewer tokens is too inexact."""


class PrefillSpeed:
    """The last measured speed at which an engine reads prompts.

    Attributes:
        tokens_per_second: None until enough tokens of a prompt have been read.
    """

    def __init__(self) -> None:
        self.tokens_per_second: float | None = None

    def record(self, tokens: int, seconds: float) -> None:
        """Record that the engine read ``tokens`` uncached tokens in ``seconds``."""
        if tokens >= _FEWEST_TOKENS and seconds > 0:
            self.tokens_per_second = tokens / seconds


class PrefillEstimator:
    """Estimate the remaining time for one prompt.

    Args:
        speed: the engine's speed; updated with what is measured here.
    """

    def __init__(self, speed: PrefillSpeed) -> None:
        self._speed = speed
        self._next_report = 0.0

    def estimate(self, total: int, cached: int, read: int, seconds: float) -> str | None:
        """Record the progress of this prompt, and estimate the rest.

        Args:
            total: tokens of the prompt.
            cached: how many of them were in the prefix cache.
            read: how many have been read so far, the cached ones included.

        Returns:
            A sentence for the log: when the speed is known and the remaining time is at least
            ``MIN_REPORTED_SECONDS``, and then every ``REPORT_SECONDS``. Otherwise None.
        """
        self._speed.record(read - cached, seconds)
        speed, left = self._speed.tokens_per_second, total - read
        if seconds < self._next_report or speed is None or left / speed < MIN_REPORTED_SECONDS:
            return None
        self._next_report = seconds + REPORT_SECONDS
        return (
            f"{left} of {total} prompt tokens have to be read: about {left / speed:.0f} s until the first word, "
            f"at the measured {speed:.0f} tokens/s"
        )


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

    async def prepare(self, ticket: Ticket) -> int:
        """Prepare the slot of a ticket that was granted, and give back the slots that were lent to it.

        Returns:
            How many tokens of the prompt the slot has now.
        """
        try:
            await self._park(ticket)
            packed_ids, found = ticket.claim.packed_ids, ticket.found
            # Until the prompt is compared with it, a restored state has all its tokens.
            room = self._admission.room_for(ticket)
            if self.parked is not None:
                found = await self.parked.restore(ticket.slot, packed_ids, found, room)
            if self.prefixes is not None:
                found = await self.prefixes.restore(ticket.slot, packed_ids, found, room)
            return found
        finally:
            self._admission.settle(ticket)

    async def _park(self, ticket: Ticket) -> None:
        if self.prefixes is not None:
            for held in ticket.displaced:
                await self.prefixes.displaced(held, ticket.claim.packed_ids)
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
