"""An engine in a replica of Ray Serve, which may publish its KV events for the router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ray

from singletree.engines.engine import Chunk, EngineInfo, GenerationJob, KvPublisher, count_picture_tokens
from singletree.engines.progress import no_progress
from singletree.errors import SingletreeError
from singletree.pictures import PromptPicture
from singletree.server.models.chat_format import load_chat_format
from singletree.server.models.model_source import find_model_source
from singletree.server.settings.config import Config

_FLAG = "--kv-events-config"
_NOT_WITH = frozenset((_FLAG, "--data-parallel-size", "-dp", "--dp-size", "--dp"))
"""Arguments of engines that are left alone: those with settings of their own for KV events, and those with several
ranks, each of which has a cache and publishes at a port of its own.
"""
_ENABLED: Mapping[str, Mapping[str, Any]] = {
    "vllm": {"enable_kv_cache_events": True, "publisher": "zmq", "topic": ""},
    "sglang": {"publisher": "zmq", "topic": ""},
}
"""For each engine that publishes KV events: its settings but for the endpoints."""


def can_publish(config: Config) -> bool:
    """Return whether the engine of the model publishes KV events with the settings made here."""
    given = {word.partition("=")[0].replace("_", "-") for word in config.engine_arguments}
    return config.engine in _ENABLED and not given & _NOT_WITH


def publish_kv_events(config: Config, address: str) -> tuple[Config, KvPublisher]:
    """Return the settings with which the engine publishes its KV events, and where it does so.

    The ports are free now. If another program takes one before the engine does, the engine does not start, and Ray
    starts another replica, which chooses other ports.

    Args:
        config: the settings of the model; ``can_publish`` is true for it.
        address: the address of this node in the cluster.
    """
    events, replays = _free_ports(2)
    settings = {
        **_ENABLED[config.engine],
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replays}",
    }
    words = (*config.engine_arguments, _FLAG, json.dumps(settings))
    host = f"[{address}]" if ":" in address else address
    publisher = KvPublisher(f"tcp://{host}:{events}", f"tcp://{host}:{replays}")
    return replace(config, engine_arguments=words), publisher


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [int(each.getsockname()[1]) for each in sockets]


Delivery = Sequence[Chunk] | SingletreeError
"""What is sent at once: the chunks that are ready, or the error that ends the generation."""


class EngineReplica:
    """Run the engine of a model, and generate for the server replicas.

    Args:
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
        info = self._engine.info()
        return info if self._kv_publisher is None else replace(info, kv_publisher=self._kv_publisher)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
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
