"""When an engine is stopped and started again: one that keeps dying, after pauses; one that nobody uses, on demand."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

from singletree.engines.engine import Chunk, Engine, EngineInfo, GenerationJob, count_picture_tokens
from singletree.errors import EngineFailed, Overloaded, SingletreeError
from singletree.pictures import PromptPicture

EARLY_DEATH_SECONDS = 60.0
"""A process that dies within this time of its start has failed early; such deaths are counted."""

MAX_PAUSE_SECONDS = 60.0


class RestartBackoff:
    """Decide when one process may be started again.

    Args:
        clock: returns monotonic time in seconds.
        max_pause: the longest pause, in seconds.

    Attributes:
        started_at: when the process was started last, in unix seconds; 0 before that.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, max_pause: float = MAX_PAUSE_SECONDS
    ) -> None:
        self._clock = clock
        self._max_pause = max_pause
        self._started = clock()
        self.started_at = 0.0
        self._early_deaths = 0
        self._not_before = 0.0

    def record_start(self) -> None:
        self._started, self.started_at = self._clock(), time.time()

    def record_death(self) -> None:
        """Record a death; call it once for each. The first restart needs no pause, then the pauses double."""
        now = self._clock()
        self._early_deaths = self._early_deaths + 1 if now - self._started < EARLY_DEATH_SECONDS else 0
        pause = min(2.0 ** (self._early_deaths - 2), self._max_pause) if self._early_deaths > 1 else 0.0
        self._not_before = now + pause

    def check(self) -> None:
        """Raise Overloaded while the process may not be started yet."""
        remaining = self._not_before - self._clock()
        if remaining > 0:
            raise Overloaded(
                f"the engine died {self._early_deaths} times and will be started again in {remaining:.0f} seconds; "
                "try again then",
                retry_after=remaining,
            )


_LOG = logging.getLogger(__name__)


class UnloadingEngine:
    """Stop another engine after a time without generations, so that its memory is free; start it for the next one.

    Only the engine goes: the tokenizer, the remembered turns and the sessions of its model stay, so that the next
    prompt is the same as if the engine had run all the time. Its prefix cache is lost.

    Args:
        seconds: how long no generation may run before the engine is stopped.
    """

    def __init__(self, engine: Engine, start: Callable[[], Awaitable[Engine]], seconds: float) -> None:
        self._engine: Engine | None = engine
        self._info = engine.info()
        self._start = start
        self._seconds = seconds
        self._running = 0
        self._closed = False
        self._changing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._rest()

    @property
    def is_loaded(self) -> bool:
        return self._engine is not None

    async def start(self) -> None:
        """Start the engine, if it is stopped. Raises EngineFailed."""
        await self._loaded()

    async def close(self) -> None:
        self._closed = True
        self._rest()
        if self._unloading is not None:
            await self._unloading
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    def info(self) -> EngineInfo:
        return self._info

    async def abort(self, request_id: str) -> None:
        if self._engine is not None:
            await self._engine.abort(request_id)

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """Generate, with the same contract as ``Engine.generate``; start the engine first if it is stopped."""
        async with self._in_use() as engine, aclosing(engine.generate(job)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        """Return what the engine counts for the picture; start the engine first if it is stopped."""
        async with self._in_use() as engine:
            return await count_picture_tokens(engine, picture)

    @asynccontextmanager
    async def _in_use(self) -> AsyncIterator[Engine]:
        """Return the engine, started, which is not stopped until the context ends."""
        self._running += 1
        self._rest()
        try:
            yield await self._loaded()
        finally:
            self._running -= 1
            self._rest()

    async def _loaded(self) -> Engine:
        async with self._changing:
            if self._closed:
                raise EngineFailed("the engine is closed; start the server again")
            if self._engine is None:
                try:
                    engine = await self._start()
                except SingletreeError as error:
                    raise EngineFailed(
                        f"the engine was stopped and did not start again: {error.message}"
                    ) from error
                if self._closed:  # Closed while it started.
                    await engine.close()
                    raise EngineFailed("the engine is closed; start the server again")
                self._engine, self._info = engine, engine.info()
            return self._engine

    def _rest(self) -> None:
        """Wait anew for the time to stop, if no generation runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._running and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._begin_unloading)

    def _begin_unloading(self) -> None:
        self._unloading = asyncio.create_task(self._unload())

    async def _unload(self) -> None:
        async with self._changing:
            if self._running or self._engine is None:
                return
            engine, self._engine = self._engine, None
            await engine.close()
            _LOG.info("the engine of %s is stopped: unused for %g s", self._info.name, self._seconds)
