"""Responses that are made whether or not anybody waits for them, and streams that can be read again.

https://platform.openai.com/docs/guides/background. Such a response is produced into a log of its events, whose
``sequence_number`` is their place in it; whoever asks reads from where he left.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

import msgspec
from msgspec import Raw, Struct

from singletree.events import Finished
from singletree.protocols.responses_state import response_of
from singletree.server.identity import new_id
from singletree.server.outbox import Outbox
from singletree.server.pipeline import Generation
from singletree.server.protocol import RESPONSES
from singletree.server.stored import Keep
from singletree.server.stream import Stream
from singletree.server.tracing import Trace, Tracing

_FINISHED_JOBS = 64
"""How many finished ones can still be streamed again; all of them are in the store."""

_ROUTE = "/v1/responses (background)"


class _Started(Struct):
    response: Raw


class Log(Outbox):
    """An outbox that keeps what was put, event by event, for any number of readers. Nobody is waited for."""

    __slots__ = ("_ended", "_grown", "events")

    def __init__(self) -> None:
        super().__init__()
        self.events: list[bytes] = []
        self._grown = asyncio.Event()
        self._ended = False

    @property
    def is_full(self) -> bool:
        """Never: nobody has to read it."""
        return False

    def put(self, data: bytes) -> None:
        """Add one or more whole events."""
        self.events += (event + b"\n\n" for event in data.split(b"\n\n") if event)
        self._wake()

    def close(self) -> None:
        """Nothing more will be put."""
        self._ended = True
        self._wake()

    async def read(self, start: int) -> AsyncIterator[bytes]:
        """The events from number ``start`` on, as they come, to the end."""
        while True:
            grown = self._grown
            if start < len(self.events):
                yield b"".join(self.events[start:])
                start = len(self.events)
            elif self._ended:
                return
            else:
                await grown.wait()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


class Job:
    """One response in the making."""

    def __init__(
        self, generation: Generation, tracing: Tracing, keep: Keep, follow: Callable[[], object]
    ) -> None:
        self.id = new_id(RESPONSES.ID_PREFIX)
        self.log = Log()
        self.is_streamed = generation.request.stream
        self._end = b""
        self._keep = keep
        self._follow = follow
        self._generation = generation
        self._trace = Trace(tracing, "POST", _ROUTE, new_id("req_"))
        self._trace.route = _ROUTE
        self._stream = Stream(
            RESPONSES,
            generation,
            self._trace,
            id=self.id,
            created=int(time.time()),
            keep=self._ended,
            outbox=self.log,
        )
        # Opened at once, so that every failure is the end of the response and not of this call.
        self._stream.open()
        self._task = asyncio.create_task(self._run())

    @property
    def is_over(self) -> bool:
        """Whether the response has its end."""
        return bool(self._end)

    def body(self) -> bytes:
        """The response object as it is now."""
        if self._end:
            return self._end
        first = self.log.events[0]
        return bytes(msgspec.json.decode(first[first.index(b"data: ") + 6 :], type=_Started).response)

    async def cancel(self) -> bytes:
        """End it, if it is not over; the response object then."""
        if not self._end:
            self._stream.cancel()
            await asyncio.wait({self._task})
        return self.body()

    async def closed(self) -> None:
        """Wait for its end."""
        await asyncio.wait({self._task})

    def _ended(self, end: bytes) -> None:
        self._end = response_of(end)
        self._keep(self._end)

    async def _run(self) -> None:
        prompt = self._generation.prompt
        self._trace.status = 200
        self._trace.generating(self._generation.model.name, prompt.rules, prompt.replayed)
        try:
            await self._stream.produce()
        finally:
            self._trace.generated(Finished("cancelled", self._generation.usage))
            self._follow()
            self._trace.close()


class Jobs:
    """The responses in the making, and the last that were."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def add(self, job: Job) -> None:
        """One more; old ones that are over are dropped."""
        over = [id for id, known in self._jobs.items() if known.is_over]
        for id in over[: max(0, len(over) - _FINISHED_JOBS + 1)]:
            del self._jobs[id]
        self._jobs[job.id] = job

    def get(self, id: str) -> Job | None:
        """The one of that id, unless it was dropped."""
        return self._jobs.get(id)

    def drop(self, id: str) -> None:
        """Forget one that is over."""
        if (job := self._jobs.get(id)) is not None and job.is_over:
            del self._jobs[id]

    async def close(self) -> None:
        """Cancel those that are not over."""
        await asyncio.gather(*(job.cancel() for job in self._jobs.values()))
