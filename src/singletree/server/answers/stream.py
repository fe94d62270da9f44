"""A streamed answer: the encoders of its choices between the generations and the buffer that its writer empties.

All frames that arrive during one write are sent in the next one, so a busy server writes less often. When a client does
not read, the buffer fills and the generation waits. Where the transport can write without waiting, no task is woken for
a token: it is written in the call that puts it. Tokens that came from the engine together are one write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from singletree.errors import EngineFailed, SingletreeError, Superseded
from singletree.events import Event, Finished, FinishReason
from singletree.protocols.answer import EventEncoder, Frame
from singletree.server.answers.choices import Choices, DispatchOptions, run_together
from singletree.server.telemetry import Trace

WriteThrough = Callable[[list[Frame]], bool]
"""Writes frames at once. Returns whether it did: false while the transport has to be waited for."""

FULL_BYTES = 256 * 1024
"""Size of the data from which the generation waits."""
LOG = logging.getLogger(__name__)
STALLED_SECONDS = 300.0
"""A client that reads nothing for this time is treated as disconnected."""


class SendBuffer:
    """A buffer of frames for one consumer, on the same event loop as its producers.

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
        self._closed = True
        _wake(self._filled)

    async def room(self) -> None:
        if self._room is None:
            self._room = asyncio.Event()
        self._room.clear()
        await self._room.wait()

    async def take(self) -> list[Frame]:
        """Wait for frames and return all, none at the end. The next call confirms that the last were written."""
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


class Stream:
    """Fills ``buffer`` with the frames of one answer."""

    def __init__(
        self,
        choices: Choices,
        trace: Trace,
        *,
        dispatch: DispatchOptions = DispatchOptions(),  # noqa: B008 (frozen)
        buffer: SendBuffer | None = None,
    ) -> None:
        self._choices = choices
        self._trace = trace
        self._dispatch = dispatch
        self._encoders: list[EventEncoder] = []
        self._ends: dict[int, Finished] = {}
        self._has_sent = False
        self._producing: asyncio.Task[Any] | None = None
        self._superseded = False
        self._cancelled = False
        self._is_ended = False
        self.buffer = SendBuffer() if buffer is None else buffer
        self._next_beat: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return bool(self._encoders)

    def begin(self) -> None:
        """Put the first frames into the buffer, unless the generation has ended."""
        if not self._is_ended:
            self.open()

    def open(self) -> list[EventEncoder]:
        """Put the first frames into the buffer if that has not been done, and return the encoders of the choices."""
        if not self._encoders:
            self._encoders = self._choices.encoders(self._dispatch)
            self.buffer.put([frame for encoder in self._encoders for frame in encoder.start()])
        return self._encoders

    async def produce(self) -> None:
        """Generate to the end. An error becomes an event once the stream is open, and is raised before that."""
        self._producing = asyncio.current_task()
        try:
            if self._superseded:
                raise Superseded
            if self._cancelled:
                raise asyncio.CancelledError
            await self._generate()
        except asyncio.CancelledError:
            if self._cancelled:
                self._end_as_cancelled()
            elif self._superseded:
                self._end(Superseded(), "cancelled")
            else:
                raise
        except Exception as error:
            self._end(error, "error")
        finally:
            self._is_ended = True
            self.buffer.close()
            self._producing = None  # It refers to this stream.
            for generation in self._choices.generations:
                generation.deliver = None  # It refers to this stream.

    def supersede(self) -> None:
        """End the answer with an error: another request repeats this one."""
        self._superseded = True
        if self._producing is not None:
            self._producing.cancel()

    def cancel(self) -> None:
        self._cancelled = True
        if self._producing is not None:
            self._producing.cancel()

    def _end(self, error: Exception, reason: FinishReason) -> None:
        """End the stream with ``error``; raise it where the stream is not open, so that it becomes an HTTP status."""
        if not self._encoders:
            raise error
        known = client_error(error)
        self._trace.failed(known)
        self._trace.generated(Finished(reason, self._choices.usage))
        self.buffer.put(self._encoders[0].fail(known))

    def _end_as_cancelled(self) -> None:
        usage = self._choices.usage
        for index, encoder in enumerate(self.open()):
            if index not in self._ends:
                self.buffer.put(encoder.end(Finished("cancelled", usage)))
        self.buffer.put(self._encoders[0].tail(usage))

    async def _generate(self) -> None:
        count = len(self._choices.generations)
        if count == 1:
            await self._feed(0)
        else:
            await run_together([self._feed(index) for index in range(count)], lambda: self._has_sent)
        usage = self._choices.usage
        self._trace.generated(Finished(self._ends[0].reason, usage))
        self.buffer.put(self._encoders[0].tail(usage))

    async def _feed(self, index: int) -> None:
        buffer, encoder = self.buffer, None
        generation = self._choices.generations[index]
        if generation.runner is None:
            generation.deliver = partial(self._deliver, index)
        batches = self._choices.batches(index, self._trace.request_id)
        try:
            async for batch in batches:
                if encoder is None:
                    encoder = self.open()[index]
                if isinstance(batch, Finished):
                    self._ends[index] = batch
                    self._has_sent = True
                    frames = encoder.end(batch)
                    await self._choices.stored((index, batch))
                    buffer.put(frames)
                else:
                    if batch:
                        self._note_sent()
                        buffer.put(_frames(encoder, batch))
                    if buffer.is_full:
                        await buffer.room()
        finally:
            await batches.aclose()

    def _deliver(self, index: int, batch: list[Event]) -> bool:
        """Send a batch that was not yielded. ``_feed`` has opened the stream, with the first one."""
        if not self._has_sent:
            self._note_sent()
        encoder = self._encoders[index]
        frames = encoder.feed(batch[0]) if len(batch) == 1 else _frames(encoder, batch)
        return self.buffer.put_through(frames)

    def _note_sent(self) -> None:
        if not self._has_sent:
            self._has_sent = True
            self._trace.first_event()

    def keep_alive(self, seconds: float, give_up: Callable[[], object]) -> None:
        """Send a keep-alive every ``seconds`` without data, until ``rest``; call ``give_up`` if nobody reads."""
        loop = asyncio.get_running_loop()
        self._next_beat = loop.call_later(seconds, self._beat, seconds, give_up)

    def rest(self) -> None:
        if self._next_beat is not None:
            self._next_beat.cancel()

    def _beat(self, seconds: float, give_up: Callable[[], object]) -> None:
        self.keep_alive(seconds, give_up)
        if self._encoders:
            self.buffer.beat(self._encoders[0].keep_alive)
        if self.buffer.stuck_beats * seconds > STALLED_SECONDS:
            give_up()


def _frames(encoder: EventEncoder, batch: list[Event]) -> list[Frame]:
    return [frame for event in batch for frame in encoder.feed(event)]


def client_error(error: Exception) -> SingletreeError:
    """Return the error to send to a client for ``error``. An unexpected error is logged and its text is not sent."""
    if isinstance(error, SingletreeError):
        return error
    LOG.error("a request failed with an unexpected error", exc_info=error)
    return EngineFailed("internal server error; see the server's log")
