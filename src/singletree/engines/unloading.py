"""Stops an engine that nobody uses, so that its memory is free, and starts it again for the next request.

Only the engine goes: the tokenizer, the remembered turns and the sessions of its model stay, so that the next prompt
is the same as if the engine had run all the time. Its prefix cache is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

from singletree.engines.engine import Chunk, Engine, EngineInfo, GenerationJob, count_picture_tokens
from singletree.errors import EngineFailed, SingletreeError
from singletree.pictures import PromptPicture

_LOG = logging.getLogger(__name__)


class UnloadingEngine:
    """Stop another engine after a time without generations.

    Args:
        engine: the engine, started.
        start: starts an equal one.
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
        """Whether the engine runs."""
        return self._engine is not None

    async def start(self) -> None:
        """Start the engine, if it is stopped. Raises EngineFailed."""
        await self._loaded()

    async def close(self) -> None:
        """Stop the engine for good."""
        self._closed = True
        self._rest()
        if self._unloading is not None:
            await self._unloading
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    def info(self) -> EngineInfo:
        """Return what the engine reported when it was started first."""
        return self._info

    async def abort(self, request_id: str) -> None:
        """End that generation on the engine."""
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
                self._engine = engine
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
