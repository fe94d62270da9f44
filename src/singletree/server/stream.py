"""A streamed answer: the generation on one side, the outbox on the other, the protocol's encoder between
them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from singletree.errors import EngineFailed, SingletreeError, Superseded
from singletree.events import Finished, FinishReason
from singletree.server import choices
from singletree.server.choices import Choices
from singletree.server.dispatch import Wanted, dispatching
from singletree.server.outbox import Outbox
from singletree.server.pipeline import Generation
from singletree.server.protocol import Encoder, WireProtocol
from singletree.server.tracing import Trace

LOG = logging.getLogger(__name__)

STALLED_SECONDS = 300.0
"""A client that reads nothing for so long counts as gone."""


class Stream:
    """Fills ``outbox`` with the bytes of one answer. ``opened`` is done once the first of them are there."""

    def __init__(
        self,
        protocol: WireProtocol,
        generation: Generation | Choices,
        trace: Trace,
        *,
        id: str,
        created: int,
        dispatch: Wanted = Wanted(),  # noqa: B008 (frozen)
        keep: Callable[[bytes], None] | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        self._protocol = protocol
        self._generation = generation
        self._trace = trace
        self._id, self._created = id, created
        self._dispatch = dispatch
        self._keep = keep
        self._encoder: Encoder | None = None
        self._producing: asyncio.Task[Any] | None = None
        self._taken_over = False
        self._cancelled = False
        self.outbox = Outbox() if outbox is None else outbox
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def open(self) -> Encoder:
        """Begin the stream with what is known now; nothing when it has begun."""
        if self._encoder is None:
            self._encoder = self._make_encoder()
            self.outbox.put(self._encoder.start())
            self.opened.set_result(None)
        return self._encoder

    def _make_encoder(self) -> Encoder:
        generation, new_id = self._generation, self._trace.new_id
        if isinstance(generation, Choices):
            return generation.encoder(
                id=self._id, created=self._created, new_id=new_id, dispatch=self._dispatch
            )
        request, make = generation.request, self._protocol.Encoder
        usage, seal = generation.usage, generation.seal
        encoder = make(request, id=self._id, created=self._created, usage=usage, new_id=new_id, seal=seal)
        return dispatching(encoder, request, self._dispatch)

    async def produce(self) -> None:
        """Generate to the end. What fails is an event once the stream is open, and raised before."""
        self._producing = asyncio.current_task()
        try:
            if self._taken_over:
                raise Superseded
            if self._cancelled:
                raise asyncio.CancelledError
            await self._generate()
        except asyncio.CancelledError:
            if self._cancelled:
                self._put_end(self.open().close(Finished("cancelled", self._generation.usage)))
            elif self._taken_over:
                self._end(Superseded(), "cancelled")
            else:
                raise
        except Exception as error:
            self._end(error, "error")
        finally:
            self.outbox.close()

    def give_way(self) -> None:
        """Another request takes the place of this one."""
        self._taken_over = True
        if self._producing is not None:
            self._producing.cancel()

    def cancel(self) -> None:
        """The client wants no more of it, and to be told so."""
        self._cancelled = True
        if self._producing is not None:
            self._producing.cancel()

    def _end(self, error: Exception, reason: FinishReason) -> None:
        """Raises ``error`` while it can still be a status."""
        if self._encoder is None:
            raise error
        known = told(error)
        self._trace.failed(known)
        self._trace.generated(Finished(reason, self._generation.usage))
        self._put_end(self._encoder.fail(known))

    def _put_end(self, data: bytes) -> None:
        if self._keep is not None:
            self._keep(data)
        self.outbox.put(data)

    async def _generate(self) -> None:
        outbox = self.outbox
        async with aclosing(choices.generate(self._generation, self._trace.request_id)) as batches:
            async for batch in batches:
                encoder = self._encoder or self.open()
                if isinstance(batch, Finished):
                    self._trace.generated(batch)
                    self._put_end(encoder.close(batch))
                elif batch:
                    self._trace.first_event()
                    outbox.put(
                        encoder.feed(batch[0]) if len(batch) == 1 else b"".join(map(encoder.feed, batch))
                    )
                    if outbox.is_full:
                        await outbox.room()

    async def beat(self, seconds: float, answering: asyncio.Task[Any]) -> None:
        """Every ``seconds``: a sign of life if there was none. Nobody reads: ``answering`` is cancelled."""
        while True:
            await asyncio.sleep(seconds)
            if self._encoder is not None:
                self.outbox.beat(self._encoder.keep_alive)
            if self.outbox.stuck_beats * seconds > STALLED_SECONDS:
                answering.cancel()


def told(error: Exception) -> SingletreeError:
    """What a client is told of ``error``; what nobody raised on purpose goes to the log."""
    if isinstance(error, SingletreeError):
        return error
    LOG.error("a request failed inside the server", exc_info=error)
    return EngineFailed("the server failed inside; its log says more")
