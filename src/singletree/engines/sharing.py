"""Shares an engine: a queue for more requests than it has places for, and a view for each owner of its own.

A refusal is expensive: harnesses try again after a moment, OpenClaw with another prompt, qwen-code after a minute. A
request that waits keeps its place, its prompt and, thanks to the keep-alive events of the stream, its client.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

import msgspec

from singletree.engines.engine import Chunk, Engine, EngineInfo, GenerationJob, Route, count_picture_tokens
from singletree.errors import Overloaded
from singletree.owners import owned_id
from singletree.pictures import PromptPicture

MAX_QUEUE_LENGTH = 1024
"""How many requests may wait; more are refused at once, while the refusal can still be an HTTP status."""

PAUSE_SECONDS = 0.25
"""How long the first request of the queue waits between two tries when no generation ends meanwhile."""


Begun = TypeVar("Begun")
Place = tuple[int, float, int]
"""A request's place in the queue, the least first: its priority, its latency sensitivity negated, its arrival."""


@dataclass(frozen=True, slots=True)
class QueueWait:
    """How long a request waited, and behind how many others."""

    seconds: float
    ahead: int

    def on(self, first: Chunk) -> Chunk:
        """Return the first chunk of the request, with the wait in its route."""
        route = first.route or Route("")
        waited = f"waited {self.seconds:.1f} s for a place, behind {self.ahead} others"
        reason = f"{route.reason}; {waited}" if route.reason else waited
        return replace(first, route=replace(route, reason=reason, waited_seconds=self.seconds))


class EngineQueue:
    """A queue of requests: by priority, then by latency sensitivity, then first come, first served.

    Args:
        seconds: longest wait, whatever the priority. After it a request is refused with Overloaded. 0: no queue.
        max_queue_length: how many requests may wait. When one more comes, the last of them all is refused.
    """

    def __init__(self, seconds: float, *, max_queue_length: int = MAX_QUEUE_LENGTH) -> None:
        self._seconds = seconds
        self._max_queue_length = max_queue_length
        self._arrivals = count()
        self._waiting: dict[Place, asyncio.Event] = {}
        self._displaced: set[Place] = set()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def admit(
        self, job: GenerationJob, begin: Callable[[], Awaitable[Begun]]
    ) -> tuple[Begun, QueueWait | None]:
        """Return what ``begin`` returns, and how long the job waited before it, None if not at all.

        Args:
            begin: begins the generation, up to its first chunk; called again, in the job's turn, after Overloaded.
        """
        came = time.monotonic()
        place = (job.priority, -(job.latency_sensitivity or 0.0), next(self._arrivals))
        ahead: int | None = None
        refusal: Overloaded | None = None
        while True:
            if refusal or self._waiting:
                ahead = sum(other < place for other in self._waiting) if ahead is None else ahead
                await self._wait(place, came + self._seconds, refusal)
            try:
                begun = await begin()
            except Overloaded as error:
                refusal = error
                continue
            self.wake()  # There may be room for the next one, too.
            return begun, None if ahead is None else QueueWait(time.monotonic() - came, ahead)

    async def _wait(self, place: Place, until: float, refusal: Overloaded | None) -> None:
        """Wait until it is this request's turn to try (again).

        That is when no request waits before it, and a generation has ended or ``PAUSE_SECONDS`` have passed. Raises
        Overloaded at the time ``until`` of ``time.monotonic``, or at once when the queue is full of requests that go
        before it.
        """
        if len(self._waiting) >= self._max_queue_length:
            last = max(self._waiting, default=place)
            if last <= place:
                raise Overloaded(f"{len(self._waiting)} requests are waiting already; try again in a moment")
            self._displaced.add(last)
            self._waiting.pop(last).set()
        wake = self._waiting[place] = asyncio.Event()
        try:
            async with asyncio.timeout(until - time.monotonic()):
                while place not in self._displaced:
                    while place in self._waiting and min(self._waiting) != place:
                        await wake.wait()
                        wake.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(wake.wait(), PAUSE_SECONDS)
                    wake.clear()
                    if place in self._waiting and min(self._waiting) == place:
                        return
            raise Overloaded(
                "requests of higher priority took all places in the queue; try again in a moment"
            )
        except TimeoutError:
            message = f"the engine was full for {self._seconds:g} seconds; try again in a moment"
            retry_after = {} if refusal is None else {"retry_after": refusal.retry_after}
            raise Overloaded(message, **retry_after) from refusal
        finally:
            self._waiting.pop(place, None)
            self._displaced.discard(place)
            self.wake()

    def wake(self) -> None:
        """Let the first of the queue try: there may be room for it."""
        if self._waiting:
            self._waiting[min(self._waiting)].set()


class Queued(ABC):
    """An engine with a queue before it."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Return how many generations wait for a place on the engine, as far as it is known."""


class EngineView(Queued):
    """An engine as others see it: all that a view does not change."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def start(self) -> None:
        await self._engine.start()

    async def close(self) -> None:
        await self._engine.close()

    @property
    def waiting(self) -> int:
        return getattr(self._engine, "waiting", 0)

    def info(self) -> EngineInfo:
        return self._engine.info()

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        return await count_picture_tokens(self._engine, picture)


class QueueingEngine(EngineView):
    """Put a queue in front of another engine (``EngineQueue``).

    Only requests that the engine refuses with Overloaded are queued. Engines with a queue of their own keep using it.
    The first chunk of a request that waited says so in its ``route``.

    Args:
        engine: the engine that serves the requests.
        seconds, max_queue_length: as for ``EngineQueue``.
    """

    def __init__(self, engine: Engine, seconds: float, *, max_queue_length: int = MAX_QUEUE_LENGTH) -> None:
        super().__init__(engine)
        self._queue = EngineQueue(seconds, max_queue_length=max_queue_length)

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        async def begin() -> tuple[Chunk | None, AsyncGenerator[Chunk, None]]:
            chunks = self._engine.generate(job)
            return await anext(chunks, None), chunks

        (first, chunks), wait = await self._queue.admit(job, begin)
        try:
            if first is not None:
                yield first if wait is None else wait.on(first)
            async for chunk in chunks:
                yield chunk
        finally:
            try:
                await chunks.aclose()
            finally:
                self._queue.wake()


class OwnedEngine(EngineView):
    """Passes the jobs of one owner on, with a salt and names of sessions of its own.

    Args:
        engine: shared with other owners, who start and close it.
    """

    def __init__(self, engine: Engine, owner: str) -> None:
        super().__init__(engine)
        self._owner = owner

    async def start(self) -> None:
        """Do nothing: the engine belongs to all owners."""

    async def close(self) -> None:
        """Do nothing: the engine belongs to all owners."""

    def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        owner = self._owner
        own = msgspec.structs.replace(
            job,
            cache_salt=owned_id(owner, job.cache_salt) if job.cache_salt else owner,
            session=owned_id(owner, job.session) if job.session else "",
        )
        return self._engine.generate(own)
