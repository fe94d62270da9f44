"""Buffer the frames for one client between the generation, which fills the buffer, and the writer of the socket.

All frames that arrive during one write are sent in the next one, so a busy server writes less often. When a client does
not read, the buffer fills and the generation waits.

Where the transport can write without waiting, no task is woken for a token: it is written in the call that puts it.
Tokens that came from the engine together are put together, and are one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from singletree.protocols.answer import Frame

WriteThrough = Callable[[list[Frame]], bool]
"""Writes frames at once. Returns whether it did: false while the transport has to be waited for."""

FULL_BYTES = 256 * 1024
"""Size of the data from which the generation waits."""


class SendBuffer:
    """A buffer of frames for one consumer, on the same event loop as its producers.

    Args:
        full_bytes: size of the data from which a producer should wait.

    Attributes:
        is_over: whether all frames were taken and none follow.
        stuck_beats: how many beats in a row the same write was in progress.
        write_through: writes the frames of ``put_through`` while the consumer waits; None if the consumer writes all.
    """

    __slots__ = (
        "_closed",
        "_filled",
        "_frames",
        "_full_bytes",
        "_quiet",
        "_room",
        "_size",
        "_writes",
        "_writes_at_beat",
        "is_over",
        "stuck_beats",
        "write_through",
    )

    def __init__(self, *, full_bytes: int = FULL_BYTES) -> None:
        self._frames: list[Frame] = []
        self._size = 0
        self._full_bytes = full_bytes
        self._filled: asyncio.Future[None] | None = None
        self._room: asyncio.Event | None = None
        self._closed = False
        self._quiet = False
        self._writes = 0
        self._writes_at_beat = 0
        self.is_over = False
        self.stuck_beats = 0
        self.write_through: WriteThrough | None = None

    @property
    def is_full(self) -> bool:
        """Tell whether a producer should wait in ``room``."""
        return self._size >= self._full_bytes

    def put(self, frames: list[Frame]) -> None:
        """Append ``frames``; an empty list has no effect."""
        if frames:
            self._frames += frames
            for _, data in frames:
                self._size += len(data)
            self._quiet = False
            _wake(self._filled)

    def put_through(self, frames: list[Frame]) -> bool:
        """Write ``frames`` at once if the consumer waits and the transport takes them; else append them.

        Return whether the producer may go on; it should wait in ``room`` where not.
        """
        waiting = self._filled
        if self.write_through is not None and waiting is not None and not waiting.done():
            if not frames:
                return True
            if self.write_through(frames):
                self._quiet = False
                return True
        self.put(frames)
        return not self.is_full

    def close(self) -> None:
        """End the data: nothing follows."""
        self._closed = True
        _wake(self._filled)

    async def room(self) -> None:
        """Wait until the consumer has taken the frames."""
        if self._room is None:
            self._room = asyncio.Event()
        self._room.clear()
        await self._room.wait()

    async def take(self) -> list[Frame]:
        """Wait for frames and return all of them; return none at the end. The next call confirms that the last ones
        were written.
        """
        self._writes += 1
        while not self._frames and not self._closed:
            self._filled = asyncio.get_running_loop().create_future()
            try:
                await self._filled
            finally:
                self._filled = None
        frames, self._frames = self._frames, []
        self._size = 0
        self.is_over = self._closed
        if self._room is not None:
            self._room.set()
        return frames

    def beat(self, keep_alive: Callable[[], list[Frame]]) -> None:
        """Append ``keep_alive()`` when nothing was put since the last beat; to be called at equal intervals."""
        writing = self._filled is None
        self.stuck_beats = self.stuck_beats + 1 if writing and self._writes == self._writes_at_beat else 0
        self._writes_at_beat = self._writes
        if self._quiet and not writing and not self._closed:
            self.put(keep_alive())
        self._quiet = True


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
