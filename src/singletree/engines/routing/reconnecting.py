"""An engine that can be connected anew: the server behind it may be down, and come back as another process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol, runtime_checkable

from singletree.engines.engine import Chunk, Engine, EngineInfo, GenerationJob, count_picture_tokens
from singletree.errors import EngineFailed
from singletree.pictures import PromptPicture


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
        """Connect. Raises what ``connect`` raises."""
        await self.revive()

    async def revive(self) -> None:
        """Connect anew. Raises what ``connect`` raises."""
        engine = await self._connect()
        if self._closed:
            await engine.close()
            raise EngineFailed(f"{self._name} is closed")
        old, self._engine = self._engine, engine
        self._users[engine] = 0
        if old is not None:
            await self._close_unused(old)

    async def close(self) -> None:
        """Close the engine; generations in flight end with EngineFailed."""
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
        """End that generation."""
        for engine in tuple(self._users):
            await engine.abort(request_id)

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """Generate, with the contract of ``Engine.generate``."""
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
        """Return what the engine counts."""
        return await count_picture_tokens(self._connected(), picture)

    def _connected(self) -> Engine:
        if self._engine is None:
            raise EngineFailed(f"{self._name} is not connected")
        return self._engine

    async def _close_unused(self, engine: Engine) -> None:
        """Close an engine that was replaced, unless a generation still runs on it."""
        if engine is not self._engine and self._users.get(engine) == 0:
            del self._users[engine]
            await engine.close()
