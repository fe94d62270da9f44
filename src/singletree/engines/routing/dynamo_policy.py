"""NVIDIA Dynamo's router, in this process, as a policy: ``SelectionService`` of the package ``ai-dynamo-runtime``.

It needs no etcd and no NATS. It follows the engines' KV events by itself and keeps its own account of their load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from importlib import import_module
from itertools import count
from typing import Any

from singletree.engines.engine import Chunk, GenerationJob
from singletree.engines.routing.block_chain import MIN_UNIT
from singletree.engines.routing.policy import Choice
from singletree.engines.routing.worker import Worker
from singletree.errors import BadConfiguration, EngineFailed

_LOG = logging.getLogger(__name__)

_CLOSE_SECONDS = 1.0
_MOST_UNSENT = 64
"""So many choices may wait to be sent; older ones were given up, and their load is taken back."""


class DynamoPolicy:
    """Choose as Dynamo's KV router does. See ``RoutingPolicy``.

    Args:
        model: the model's name.
        kv_events, kv_replay: ZMQ endpoints, in the order of the engines; the router needs the events of all of them.
        cache_tokens: size of each engine's cache; None if unknown.
        affinity_seconds: how long a session stays with its engine; None for no affinity.
        service: replaces the ``SelectionService`` in tests.

    Attributes:
        service: the ``SelectionService``.
    """

    def __init__(
        self,
        model: str = "",
        *,
        kv_events: Sequence[str] = (),
        kv_replay: Sequence[str] = (),
        cache_tokens: int | None = None,
        affinity_seconds: float | None = None,
        service: Any = None,
    ) -> None:
        self._model, self._cache_tokens = model or "model", cache_tokens
        self._endpoints, self._replays = tuple(kv_events), tuple(kv_replay)
        self.service = service or _selection_service(affinity_seconds)
        self._workers: dict[int, Worker] = {}
        self._numbers: dict[Worker, int] = {}
        self._names = count()
        self._unsent: dict[int, tuple[Choice, str]] = {}
        self._reservations: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def unfinished(self) -> int:
        """How many reports to the service are on their way."""
        return len(self._tasks)

    async def start(self, workers: Sequence[Worker]) -> None:
        """Register the engines.

        Raises:
            BadConfiguration: an engine has no endpoint for KV events, or the service refuses it.
        """
        if len(self._endpoints) != len(workers) or not all(self._endpoints):
            raise BadConfiguration(
                f"--router-mode dynamo needs the KV events of all {len(workers)} engines: give --kv-events an endpoint "
                "for each, in their order"
            )
        for number, worker in enumerate(workers):
            details = worker.engine.info().details or {}
            size = details.get("kv_block_size") or MIN_UNIT
            tokens = self._cache_tokens or details.get("kv_cache_tokens")
            record = {
                "worker_id": number,
                "model_name": self._model,
                "endpoint": worker.name,
                "block_size": size,
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
                "max_num_batched_tokens": 8192,
                "kv_events_endpoints": {0: self._endpoints[number]},
            }
            if tokens:
                record["total_kv_blocks"] = tokens // size
            if self._replays and self._replays[number]:
                record["replay_endpoint"] = self._replays[number]
            try:
                await self.service.upsert_worker(record)
            except Exception as error:  # whatever the foreign service raises
                raise BadConfiguration(
                    f"Dynamo's router refuses the engine {worker.name}: {error}; correct --kv-events"
                ) from None
            self._workers[number], self._numbers[worker] = worker, number

    async def close(self) -> None:
        """Stop the service."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=_CLOSE_SECONDS)
        self.service.shutdown()

    async def choose(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice:
        """Return the engine that the service selects, and book the load.

        Raises:
            EngineFailed: the service selects none.
        """
        while len(self._unsent) >= _MOST_UNSENT:
            self._later(self.service.free_reservation(self._unsent.pop(next(iter(self._unsent)))[1]))
        name = f"singletree-{next(self._names)}"
        request: dict[str, Any] = {
            "model_name": self._model,
            "token_ids": list(job.prompt_token_ids),
            "selection_id": name,
            "allowed_worker_ids": [self._numbers[worker] for worker in workers],
        }
        if job.expected_tokens is not None:
            request["expected_output_tokens"] = job.expected_tokens
        if job.session:
            request["session_id"] = job.session
        try:
            answer = await self.service.select_and_reserve(request)
            worker = self._workers[answer["worker_id"]]
            cached = min(answer["overlap"]["gpu"], len(job.prompt_token_ids))  # tokens, not blocks
        except Exception as error:  # whatever the foreign service raises
            raise EngineFailed(f"Dynamo's router selects no engine: {error}") from error
        choice = Choice(worker, cached, f"Dynamo: {cached} of {len(job.prompt_token_ids)} tokens cached")
        self._unsent[id(choice)] = choice, name
        return choice

    def sent(self, job: GenerationJob, choice: Choice) -> None:
        """Keep the booking."""
        if (unsent := self._unsent.pop(id(choice), None)) is not None:
            self._reservations[id(choice)] = unsent[1]

    def prompt_read(self, job: GenerationJob, choice: Choice, chunk: Chunk) -> None:
        """Move the load from prefill to decoding."""
        if (name := self._reservations.get(id(choice))) is not None:
            self._later(self.service.prefill_complete(name))

    def ended(self, job: GenerationJob, choice: Choice, generated: Sequence[int]) -> None:
        """Take back the load."""
        if (name := self._reservations.pop(id(choice), None)) is not None:
            self._later(self.service.free_reservation(name))

    def worker_lost(self, worker: Worker) -> None:
        """Do nothing: the service follows the engine's events."""

    def _later(self, result: Awaitable[Any]) -> None:
        """Have the service finish what it has begun."""

        async def finish() -> None:
            try:
                await result
            except Exception as error:  # a booking that has expired: the account corrects itself
                _LOG.debug("Dynamo's router: %s", error)

        task = asyncio.create_task(finish())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _selection_service(affinity_seconds: float | None) -> Any:
    try:
        core = import_module("dynamo._core")
    except ImportError:
        raise BadConfiguration(
            "--router-mode dynamo needs Dynamo's router: pip install ai-dynamo-runtime, or choose --router-mode kv"
        ) from None
    options = {} if affinity_seconds is None else {"session_affinity_ttl_secs": affinity_seconds}
    return core.SelectionService(**options)
