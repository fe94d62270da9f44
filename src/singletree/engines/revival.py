"""When an engine's process that died may be started again: at once, and ever later if it keeps dying."""

from __future__ import annotations

import time
from collections.abc import Callable

from singletree.errors import Overloaded

SOON_SECONDS = 60.0
"""A process that lives for less died soon."""

LONGEST_PAUSE_SECONDS = 60.0


class Revival:
    """Counts the starts of one process. ``clock`` tells seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._soon = 0
        self._not_before = 0.0

    def started(self) -> None:
        """It was started now, or a start was tried."""
        self._started = self._clock()

    def died(self) -> None:
        """Call it once for each death: the first start after one is free, then the pauses double."""
        now = self._clock()
        self._soon = self._soon + 1 if now - self._started < SOON_SECONDS else 0
        pause = min(2.0 ** (self._soon - 2), LONGEST_PAUSE_SECONDS) if self._soon > 1 else 0.0
        self._not_before = now + pause

    def check(self) -> None:
        """Raises Overloaded while it may not be started yet."""
        left = self._not_before - self._clock()
        if left > 0:
            raise Overloaded(
                f"the engine died {self._soon} times and is started again in {left:.0f} seconds; try again then",
                retry_after=left,
            )
