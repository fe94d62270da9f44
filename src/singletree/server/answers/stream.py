"""A streamed answer: the encoders of its choices between the generations and the send buffer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from singletree.errors import EngineFailed, SingletreeError, Superseded
from singletree.events import Event, Finished, FinishReason
from singletree.protocols.answer import EventEncoder, Frame
from singletree.server.answers.choices import Choices, run_together
from singletree.server.answers.send_buffer import SendBuffer
from singletree.server.answers.tool_dispatch import DispatchOptions
from singletree.server.answers.tracing import Trace

LOG = logging.getLogger(__name__)

STALLED_SECONDS = 300.0
"""A client that reads nothing for this time is treated as disconnected."""


class Stream:
    """Fills ``buffer`` with the frames of one answer.

    Args:
        choices: the generations that answer the request, and their encoders.
        trace: the request's log line and metrics.
        dispatch: the side events of the stream.
        buffer: a new one by default.
    """

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
        """Tell whether the first frames were put into ``buffer``."""
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
        """End the answer as cancelled, at the client's request."""
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
        """Feed the choice number ``index`` to its encoder."""
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
                    await self._choices.stored()
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
        """Send a keep-alive every ``seconds`` without data, until ``rest``; call ``give_up`` when the client does not
        read.
        """
        loop = asyncio.get_running_loop()
        self._next_beat = loop.call_later(seconds, self._beat, seconds, give_up)

    def rest(self) -> None:
        """Send no more keep-alives."""
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
