"""The HTTP server in a replica of Ray Serve, and engines in others, which it uses like engines in its process.

An engine may publish its KV events for the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from msgspec import structs
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from singletree.engines.engine import Chunk, EngineInfo, GenerationJob, KvPublisher, count_picture_tokens
from singletree.engines.progress import Progress, no_progress
from singletree.engines.workers import Worker
from singletree.errors import EngineFailed, SingletreeError
from singletree.pictures import PromptPicture
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.answers.observer import numbered_path
from singletree.server.http.app import App
from singletree.server.http.run import close_service, open_service
from singletree.server.models.chat_format import load_chat_format
from singletree.server.models.model_source import ModelSource, find_model_source
from singletree.server.settings.config import Config

_FLAG = "--kv-events-config"
_NOT_WITH = frozenset((_FLAG, "--data-parallel-size", "-dp", "--dp-size", "--dp"))
"""Arguments of engines that are left alone: those with settings of their own for KV events, and those with several
ranks, each of which has a cache and publishes at a port of its own."""
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


ACCEPT_SECONDS = 10.0
"""How long a replica may take to accept a generation. Ray itself waits for as long as it takes to start another."""

START_SECONDS = 3600.0
"""How long an engine may take to start, with its weights downloaded."""


class RayEngine:
    """Generate on the replica behind a handle.

    An engine whose replica dies fails its generations; ``revive`` waits for the replica that Ray starts in its place.

    Args:
        handle: of a deployment of ``EngineReplica`` with one replica.
    """

    def __init__(self, name: str, handle: DeploymentHandle) -> None:
        self._name = name
        self._handle = handle
        self._info = EngineInfo(name, 0)

    async def start(self) -> None:
        """Wait until the replica runs. Raises EngineFailed if it does not."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await self.revive()
        except TimeoutError:
            raise EngineFailed(f"{self._name} did not start within {START_SECONDS:g} seconds") from None

    async def revive(self) -> None:
        """Wait for a replica that answers. Raises EngineFailed if it dies meanwhile."""
        self._info = await self._call(self._handle.info.remote())

    async def close(self) -> None:
        """Do nothing: Ray stops the replica, which other server replicas use too."""

    def info(self) -> EngineInfo:
        return self._info

    async def abort(self, request_id: str) -> None:
        await self._call(self._handle.abort.remote(request_id))

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        return int(await self._call(self._handle.count_picture_tokens.remote(picture)))

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        deliveries = self._handle.options(stream=True).generate.remote(structs.replace(job, deliver=None))
        ended = False
        try:
            async with asyncio.timeout(ACCEPT_SECONDS):
                await anext(deliveries)
            async for delivery in deliveries:
                if isinstance(delivery, SingletreeError):
                    ended = True
                    raise delivery
                for chunk in delivery:
                    ended = ended or chunk.finish is not None
                    yield chunk
        except (RayError, RayServeException, StopAsyncIteration) as error:
            ended = True
            raise self._failure(error) from error
        except TimeoutError:
            raise EngineFailed(
                f"{self._name} accepted no generation within {ACCEPT_SECONDS:g} seconds; Ray replaces its replica"
            ) from None
        finally:
            if not ended:
                deliveries.cancel()

    async def _call(self, response: DeploymentResponse) -> Any:
        try:
            return await response
        except (RayError, RayServeException) as error:
            raise self._failure(error) from error
        except asyncio.CancelledError:
            response.cancel()
            raise

    def _failure(self, error: BaseException) -> SingletreeError:
        cause = error.cause if isinstance(error, RayTaskError) else None
        if isinstance(cause, SingletreeError):
            return cause
        return EngineFailed(f"the replica of {self._name} failed ({type(error).__name__}); Ray replaces it")


_LOG = logging.getLogger(__name__)


class ServerReplica:
    """Serve HTTP for the models of ``config``.

    Args:
        engines: for each model the handles of its engines; none for one whose engines run at URLs.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: Config, engines: Sequence[Sequence[DeploymentHandle]]
    ) -> None:
        if config.trace_path is not None:
            # Each replica has a file of its own, like each process of a server with several.
            name = serve.get_replica_context().replica_tag
            config = replace(config, trace_path=numbered_path(config.trace_path, name))
        by_model = dict(zip(config.each_model or (config,), engines, strict=True))
        self._service = await open_service(config, _LOG.info, find_source=partial(_find_source, by_model))

    def __serve_build_asgi_app__(self) -> App:
        """Return the application: Ray Serve asks for it when the replica has been made."""
        return App(self._service)

    async def __del__(self) -> None:
        """Free everything: Ray Serve awaits this when the replica stops, after its last request."""
        if hasattr(self, "_service"):
            await close_service(self._service)


async def _find_source(
    engines: dict[Config, Sequence[DeploymentHandle]], config: Config, progress: Progress
) -> ModelSource:
    """Return the source of a model whose engines run in replicas; the usual one if they run at URLs."""
    source = await find_model_source(config, progress)
    handles = engines[config]
    if not handles:
        return source

    async def start_workers(tokenizer: Tokenizer) -> tuple[Worker, ...]:
        workers = tuple(
            Worker(each.deployment_name, RayEngine(each.deployment_name, each)) for each in handles
        )
        await asyncio.gather(*(each.engine.start() for each in workers))
        return workers

    return replace(
        source, start_workers=start_workers, engine=f"{source.engine} in {len(handles)} replicas of Ray"
    )
