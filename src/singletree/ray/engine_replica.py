"""An engine in a replica of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace

import ray

from singletree.engines.engine import Chunk, EngineInfo, GenerationJob, count_picture_tokens
from singletree.engines.weights.progress import no_progress
from singletree.errors import SingletreeError
from singletree.pictures import PromptPicture
from singletree.ray.kv_publishing import publish_kv_events
from singletree.server.models.catalog import load_chat_format
from singletree.server.models.config import Config
from singletree.server.models.loaders import find_model_source

Delivery = Sequence[Chunk] | SingletreeError
"""What is sent at once: the chunks that are ready, or the error that ends the generation."""


class EngineReplica:
    """Run the engine of a model, and generate for the server replicas.

    Args:
        config: the settings of the model.
        publishes_kv_events: whether the engine publishes its KV events on this node.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: Config, publishes_kv_events: bool = False
    ) -> None:
        self._kv_publisher = None
        if publishes_kv_events:
            config, self._kv_publisher = publish_kv_events(config, ray.util.get_node_ip_address())
        source = await find_model_source(config, no_progress)
        tokenizer = await asyncio.to_thread(source.load_tokenizer)
        chat_format = await asyncio.to_thread(load_chat_format, config, tokenizer)
        [worker] = await source.start_workers(chat_format.tokenizer)
        self._engine = worker.engine

    async def info(self) -> EngineInfo:
        """Return what the engine reports."""
        info = self._engine.info()
        return info if self._kv_publisher is None else replace(info, kv_publisher=self._kv_publisher)

    async def abort(self, request_id: str) -> None:
        """End that generation."""
        await self._engine.abort(request_id)

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        """Return what the engine counts. Raises what it raises."""
        return await count_picture_tokens(self._engine, picture)

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Delivery, None]:
        """Generate, in deliveries.

        The first one is empty, and comes at once: the caller then knows that the replica lives. Chunks that are ready
        together are sent together, because each delivery costs Ray more than a token costs the engine.
        """
        yield ()
        async with _ready_chunks(self._engine.generate(job)) as chunks:
            async for delivery in chunks:
                yield delivery

    async def __del__(self) -> None:
        """Close the engine: Ray Serve awaits this when the replica stops."""
        if hasattr(self, "_engine"):
            await self._engine.close()


@contextlib.asynccontextmanager
async def _ready_chunks(chunks: AsyncGenerator[Chunk, None]) -> AsyncIterator[AsyncIterator[Delivery]]:
    """Read ``chunks`` in a task of their own, and yield an iterator over what is ready; free the engine at the end."""
    ready: list[Chunk] = []
    wake = asyncio.Event()
    failure: SingletreeError | None = None
    done = False

    async def read() -> None:
        nonlocal failure, done
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    ready.append(chunk)
                    wake.set()
        except SingletreeError as error:
            failure = error
        finally:
            done = True
            wake.set()

    async def deliveries() -> AsyncIterator[Delivery]:
        while True:
            await wake.wait()
            wake.clear()
            ended, delivery = done, tuple(ready)
            ready.clear()
            if delivery:
                yield delivery
            if ended:
                if failure is not None:
                    yield failure
                return

    reading = asyncio.create_task(read())
    try:
        yield deliveries()
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
