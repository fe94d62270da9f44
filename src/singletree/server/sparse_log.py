"""Log what goes wrong with every request once a minute: a full disk must not be filled further by lines about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

QUIET_SECONDS = 60.0


class OncePerMinute:
    """Decides which of many equal log lines is written. It may be used from several threads."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next = float("-inf")
        self._held_back = 0
        self._lock = Lock()

    def take(self) -> str | None:
        """Return what to write behind a line: how many were held back since the last one. None holds this line back."""
        with self._lock:
            now = self._now()
            if now < self._next:
                self._held_back += 1
                return None
            held_back, self._held_back = self._held_back, 0
            self._next = now + QUIET_SECONDS
        return f" ({held_back} more since the last such line)" if held_back else ""
