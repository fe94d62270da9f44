"""When an engine is started again: one that keeps dying, after pauses; a server that was lost; one that was stopped
because nobody used it, on demand.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Protocol, runtime_checkable

from singletree.engines.engine import (
    Chunk,
    Engine,
    EngineInfo,
    GenerationJob,
    WeightStep,
    change_weights,
    count_picture_tokens,
)
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


@runtime_checkable
class Revivable(Protocol):
    """An engine that does not come back by itself when it has failed."""

    async def revive(self) -> None:
        """Make it usable again. Raises SingletreeError if it is still unusable; generations in flight go on."""


class ReconnectingEngine:
    """Use an engine that ``connect`` makes, and make another one when it has failed.

    Each connection finds out again what answers: a server that was started anew may have another window, other
    abilities, and an empty cache. An engine that was replaced is closed when its last generation has ended.

    Args:
        name: the address, for messages.
        connect: makes a started engine. Raises SingletreeError.
    """

    def __init__(self, name: str, connect: Callable[[], Awaitable[Engine]]) -> None:
        self._name = name
        self._connect = connect
        self._engine: Engine | None = None
        self._info = EngineInfo(name, 0)
        self._users: dict[Engine, int] = {}
        self._closed = False

    async def start(self) -> None:
        await self.revive()

    async def revive(self) -> None:
        engine = await self._connect()
        if self._closed:
            await engine.close()
            raise EngineFailed(f"{self._name} is closed")
        old, self._engine = self._engine, engine
        self._users[engine] = 0
        if old is not None:
            await self._close_unused(old)

    async def close(self) -> None:
        self._closed = True
        self._engine = None
        engines, self._users = tuple(self._users), {}
        for engine in engines:
            await engine.close()

    def info(self) -> EngineInfo:
        """Return what the engine reports; the last report while there is none."""
        if self._engine is not None:
            self._info = self._engine.info()
        return self._info

    async def abort(self, request_id: str) -> None:
        for engine in tuple(self._users):
            await engine.abort(request_id)

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        engine = self._connected()
        self._users[engine] += 1
        chunks = engine.generate(job)
        try:
            try:
                async for chunk in chunks:
                    yield chunk
            finally:
                await chunks.aclose()
        finally:
            if engine in self._users:
                self._users[engine] -= 1
                await self._close_unused(engine)

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        return await count_picture_tokens(self._connected(), picture)

    async def change_weights(self, step: WeightStep, version: str = "") -> None:
        await change_weights(self._connected(), step, version)

    def _connected(self) -> Engine:
        if self._engine is None:
            raise EngineFailed(f"{self._name} is not connected")
        return self._engine

    async def _close_unused(self, engine: Engine) -> None:
        """Close an engine that was replaced, unless a generation still runs on it."""
        if engine is not self._engine and self._users.get(engine) == 0:
            del self._users[engine]
            await engine.close()
