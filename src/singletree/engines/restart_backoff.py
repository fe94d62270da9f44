"""Limits how often a process that keeps dying is started again: at once first, then after growing pauses."""

from __future__ import annotations

import time
from collections.abc import Callable

from singletree.errors import Overloaded

EARLY_DEATH_SECONDS = 60.0
"""A process that dies within this time of its start has failed early; such deaths are counted."""

MAX_PAUSE_SECONDS = 60.0


class RestartBackoff:
    """Decide when one process may be started again.

    Args:
        clock: returns monotonic time in seconds.
        max_pause: the longest pause, in seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, max_pause: float = MAX_PAUSE_SECONDS
    ) -> None:
        self._clock = clock
        self._max_pause = max_pause
        self._started = clock()
        self._early_deaths = 0
        self._not_before = 0.0

    def record_start(self) -> None:
        """Record that a start was attempted now."""
        self._started = self._clock()

    def record_death(self) -> None:
        """Record a death; call it once for each. The first restart needs no pause, then the pauses double."""
        now = self._clock()
        self._early_deaths = self._early_deaths + 1 if now - self._started < EARLY_DEATH_SECONDS else 0
        pause = min(2.0 ** (self._early_deaths - 2), self._max_pause) if self._early_deaths > 1 else 0.0
        self._not_before = now + pause

    def check(self) -> None:
        """Raise Overloaded while the process may not be started yet."""
        remaining = self._not_before - self._clock()
        if remaining > 0:
            raise Overloaded(
                f"the engine died {self._early_deaths} times and will be started again in {remaining:.0f} seconds; "
                "try again then",
                retry_after=remaining,
            )
