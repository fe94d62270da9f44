"""An engine that is full: its requests are held in line for a while before they are refused.

A refusal is dear. Harnesses try again after a moment, OpenClaw with another prompt, qwen-code after a minute; a
request that waits keeps its place, its prompt and, by the stream's signs of life, its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from itertools import count

from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, Engine, EngineInfo
from singletree.errors import Overloaded

LONGEST_LINE = 1024
"""How many requests are held before more are refused at once, while the refusal is still an HTTP status."""

PAUSE_SECONDS = 0.25
"""How long the first in line waits between two tries when no generation ends meanwhile."""


class HoldingEngine:
    """Another engine, with a line in front of it: first come, first served.

    Only what the engine itself refuses with Overloaded is held; engines that queue by themselves are left to it.

    Args:
        seconds: longest wait; then, and when the line is full, a request is refused with Overloaded. 0: no line.
    """

    def __init__(self, engine: Engine, seconds: float, *, longest_line: int = LONGEST_LINE) -> None:
        self._engine = engine
        self._seconds = seconds
        self._longest_line = longest_line
        self._arrivals = count()
        self._waiting: dict[int, asyncio.Event] = {}

    async def start(self) -> None:
        """See Engine."""
        await self._engine.start()

    async def close(self) -> None:
        """See Engine."""
        await self._engine.close()

    def info(self) -> EngineInfo:
        """See Engine."""
        return self._engine.info()

    async def abort(self, request_id: str) -> None:
        """See Engine."""
        await self._engine.abort(request_id)

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return len(self._waiting)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        *,
        stop_token_ids: Sequence[int] = (),
        constraint: Constraint | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Chunk, None]:
        """See Engine."""
        mine, until = next(self._arrivals), asyncio.get_running_loop().time() + self._seconds
        refusal: Overloaded | None = None
        while True:
            if refusal or self._waiting:
                await self._wait(mine, until, refusal)
            chunks = self._engine.generate(
                prompt_token_ids,
                sampling,
                request_id,
                stop_token_ids=stop_token_ids,
                constraint=constraint,
                priority=priority,
            )
            async with aclosing(chunks):
                try:
                    first = await anext(chunks, None)
                except Overloaded as error:
                    refusal = error
                    continue
                try:
                    if first is not None:
                        yield first
                    async for chunk in chunks:
                        yield chunk
                finally:
                    self._wake()
                return

    async def _wait(self, mine: int, until: float, refusal: Overloaded | None) -> None:
        """Until another try is worth it: nobody who came before waits, and a generation ended or a moment passed.

        Raises Overloaded when that takes too long, or when too many wait already.
        """
        if len(self._waiting) >= self._longest_line:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already; try again in a moment")
        turn = self._waiting[mine] = asyncio.Event()
        try:
            async with asyncio.timeout_at(until):
                while min(self._waiting) != mine:
                    await turn.wait()
                    turn.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(turn.wait(), PAUSE_SECONDS)
        except TimeoutError:
            told = f"no room came free in {self._seconds:g} seconds; try again in a moment"
            raise Overloaded(told) from refusal
        finally:
            del self._waiting[mine]
            self._wake()

    def _wake(self) -> None:
        if self._waiting:
            self._waiting[min(self._waiting)].set()
