"""Tell the readers of the event stream what changed. A slow reader gets the newest state, never a backlog."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple

_INTERVAL_SECONDS = 0.2
"""A turn that is written is reported at most this often."""


class Changed(NamedTuple):
    """What changed since the last report: ids of turns, and of sessions that are no longer kept."""

    turns: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class _Reader:
    """One reader, of an owner's sessions or of all: what it has not been told yet. It holds each id once."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.turns: dict[str, None] = {}
        self.gone: dict[str, None] = {}
        self.filled = asyncio.Event()

    def take(self) -> Changed:
        changed = Changed(tuple(self.turns), tuple(self.gone))
        self.turns, self.gone = {}, {}
        self.filled.clear()
        return changed


class LiveChanges:
    """The readers of the event stream of one process."""

    def __init__(self) -> None:
        self._readers: set[_Reader] = set()

    def __bool__(self) -> bool:
        return bool(self._readers)

    def turn(self, id: str) -> None:
        for reader in self._readers:
            reader.turns[id] = None
            reader.filled.set()

    def gone(self, session: str, owner: str = "") -> None:
        for reader in self._readers:
            if reader.owner in ("", owner):
                reader.gone[session] = None
                reader.filled.set()

    async def read(
        self, silence_seconds: float, interval_seconds: float = _INTERVAL_SECONDS, *, owner: str = ""
    ) -> AsyncIterator[Changed]:
        """Yield what changed, as it happens; an empty change after each ``silence_seconds`` without one.

        ``owner`` is whose sessions are reported when they are gone, empty for those of all. Turns are those of all.
        """
        reader = _Reader(owner)
        self._readers.add(reader)
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(silence_seconds):
                        await reader.filled.wait()
                yield reader.take()
                await asyncio.sleep(interval_seconds)
        finally:
            self._readers.discard(reader)
