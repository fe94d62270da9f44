"""An engine that says what the test tells it, when the test tells it, and remembers how it was left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, EngineInfo, GenerationJob
from singletree.testing.byte_model import CONTEXT_WINDOW


class EngineByHand:
    """``say`` gives the next chunk; an exception in place of a chunk is raised.

    Attributes:
        emitted: chunks that were taken.
        freed: how often a generation was left before its end.
        waiting: set while the generation waits for the test.
    """

    def __init__(self) -> None:
        self._chunks: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()
        self.emitted = 0
        self.freed = 0
        self.waiting = asyncio.Event()
        self.constraint: Constraint | None = None
        self.sampling = Sampling()
        self.prompt: tuple[int, ...] = ()

    def emit(self, *chunks: Chunk | Exception | None) -> None:
        """The next chunks; None ends the generation without a last chunk."""
        self.waiting.clear()
        for chunk in chunks:
            self._chunks.put_nowait(chunk)

    async def start(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    def info(self) -> EngineInfo:
        """Roomy."""
        return EngineInfo(
            "by hand", CONTEXT_WINDOW, constraints=("lark",), optional_sampling=frozenset({"min_tokens"})
        )

    async def abort(self, request_id: str) -> None:
        """Never called: the generator is closed."""
        raise AssertionError

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """See ``Engine``."""
        self.prompt, self.sampling, self.constraint = (
            tuple(job.prompt_token_ids),
            job.sampling,
            job.constraint,
        )
        ended = False
        try:
            while not ended:
                self.waiting.set()
                chunk = await self._chunks.get()
                if chunk is None or isinstance(chunk, Exception):
                    ended = True
                    if chunk is not None:
                        raise chunk
                    return
                self.emitted += 1
                ended = chunk.finish is not None
                yield chunk
        finally:
            self.freed += not ended
