"""Bytes on their way to one client: filled by the generation as tokens come, emptied by whoever writes the
socket.

Whatever gathers while one write is under way leaves in the next as one piece, so a server with much to do
writes less often. When a client does not read, the outbox fills and the generation waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

FULL_BYTES = 256 * 1024


class Outbox:
    """One producer, one consumer, both on one event loop.

    Attributes:
        stuck_beats: how many beats in a row one and the same write was under way.
    """

    __slots__ = (
        "_closed",
        "_filled",
        "_full_bytes",
        "_pieces",
        "_quiet",
        "_room",
        "_size",
        "_writes",
        "_writes_at_beat",
        "stuck_beats",
    )

    def __init__(self, *, full_bytes: int = FULL_BYTES) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._full_bytes = full_bytes
        self._filled: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._closed = False
        self._quiet = False
        self._writes = 0
        self._writes_at_beat = 0
        self.stuck_beats = 0

    @property
    def is_full(self) -> bool:
        """Whether the producer should wait in ``room``."""
        return self._size >= self._full_bytes

    def put(self, data: bytes) -> None:
        """Add bytes; an empty piece is nothing."""
        if data:
            self._pieces.append(data)
            self._size += len(data)
            self._quiet = False
            _wake(self._filled)

    def close(self) -> None:
        """Nothing more will be put."""
        self._closed = True
        _wake(self._filled)

    async def room(self) -> None:
        """Wait until the consumer has taken something."""
        self._room = asyncio.get_running_loop().create_future()
        try:
            await self._room
        finally:
            self._room = None

    async def take(self) -> bytes:
        """All that is there, as soon as there is something; empty at the end. To ask again says that it is
        written.
        """
        self._writes += 1
        while not self._pieces and not self._closed:
            self._filled = asyncio.get_running_loop().create_future()
            try:
                await self._filled
            finally:
                self._filled = None
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        _wake(self._room)
        return data

    def beat(self, keep_alive: Callable[[], bytes]) -> None:
        """Called at even intervals: puts a sign of life when nothing was put for a whole interval."""
        writing = self._filled is None
        self.stuck_beats = self.stuck_beats + 1 if writing and self._writes == self._writes_at_beat else 0
        self._writes_at_beat = self._writes
        if self._quiet and not writing and not self._closed:
            self.put(keep_alive())
        self._quiet = True


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
