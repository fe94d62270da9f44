"""Queues requests for an engine that is full, for a limited time, before they are refused.

A refusal is expensive: harnesses try again after a moment, OpenClaw with another prompt, qwen-code after a minute. A
request that waits keeps its place, its prompt and, thanks to the keep-alive events of the stream, its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from itertools import count

from singletree.engines.engine import (
    Chunk,
    Engine,
    EngineInfo,
    GenerationJob,
    count_picture_tokens,
)
from singletree.errors import Overloaded
from singletree.pictures import PromptPicture

MAX_QUEUE_LENGTH = 1024
"""How many requests may wait; more are refused at once, while the refusal can still be an HTTP status."""

PAUSE_SECONDS = 0.25
"""How long the first request of the queue waits between two tries when no generation ends meanwhile."""


class QueueingEngine:
    """Put a queue in front of another engine: first come, first served.

    Only requests that the engine refuses with Overloaded are queued. Engines with a queue of their own keep using it.

    Args:
        engine: the engine that serves the requests.
        seconds: longest wait. After it, and when the queue is full, a request is refused with Overloaded. 0: no queue.
        max_queue_length: how many requests may wait.
    """

    def __init__(self, engine: Engine, seconds: float, *, max_queue_length: int = MAX_QUEUE_LENGTH) -> None:
        self._engine = engine
        self._seconds = seconds
        self._max_queue_length = max_queue_length
        self._arrivals = count()
        self._waiting: dict[int, asyncio.Event] = {}

    async def start(self) -> None:
        """Start the engine. Raises what ``Engine.start`` raises."""
        await self._engine.start()

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()

    def info(self) -> EngineInfo:
        """Return what the engine reports."""
        return self._engine.info()

    async def abort(self, request_id: str) -> None:
        """End that generation on the engine."""
        await self._engine.abort(request_id)

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        """Return what the engine counts."""
        return await count_picture_tokens(self._engine, picture)

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """Generate, with the same contract as ``Engine.generate``; wait before the first chunk if necessary."""
        arrival, until = next(self._arrivals), asyncio.get_running_loop().time() + self._seconds
        refusal: Overloaded | None = None
        while True:
            if refusal or self._waiting:
                await self._wait(arrival, until, refusal)
            chunks = self._engine.generate(job)
            async with aclosing(chunks):
                try:
                    first = await anext(chunks, None)
                except Overloaded as error:
                    refusal = error
                    continue
                self._wake()  # There may be room for the next one, too.
                try:
                    if first is not None:
                        yield first
                    async for chunk in chunks:
                        yield chunk
                finally:
                    self._wake()
                return

    async def _wait(self, arrival: int, until: float, refusal: Overloaded | None) -> None:
        """Wait until it is this request's turn to try (again).

        That is when no earlier request waits, and a generation has ended or ``PAUSE_SECONDS`` have passed. Raises
        Overloaded at the loop time ``until``, or at once when the queue is full.
        """
        if len(self._waiting) >= self._max_queue_length:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already; try again in a moment")
        wake = self._waiting[arrival] = asyncio.Event()
        try:
            async with asyncio.timeout_at(until):
                while min(self._waiting) != arrival:
                    await wake.wait()
                    wake.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(wake.wait(), PAUSE_SECONDS)
        except TimeoutError:
            message = f"the engine was full for {self._seconds:g} seconds; try again in a moment"
            raise Overloaded(message) from refusal
        finally:
            del self._waiting[arrival]
            self._wake()

    def _wake(self) -> None:
        if self._waiting:
            self._waiting[min(self._waiting)].set()
