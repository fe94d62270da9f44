"""Sends one generation to one engine of a pool, and keeps account of what each engine has to do."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from singletree.engines.engine import Chunk, Deliver, EngineInfo, GenerationJob, Route
from singletree.engines.workers import Worker
from singletree.errors import EngineFailed, Overloaded
from singletree.routing.health import WorkerHealth
from singletree.routing.policy import Choice, RoutingPolicy, tokens_to_hold, tokens_to_prefill


@dataclass(slots=True, eq=False)
class PooledTurn:
    """A turn that one engine after the other may generate.

    Attributes:
        failures: how often an engine failed it.
        row: how often in a row, with little progress between.
        worker: the engine that generates it now; None if none does.
        aborted: whether it was ended by its id.
    """

    request_id: str
    failed: set[Worker] = field(default_factory=set)
    failures: int = 0
    row: int = 0
    worker: Worker | None = None
    aborted: bool = False


class EngineRun:
    """One generation on the only engine of a pool: nothing is chosen, and no engine is compared with another.

    Args:
        health: gets to know of a failure.
        turn: the turn that it belongs to.
        generated: takes the tokens, those that are delivered included.

    Attributes:
        chunks: the chunks of the engine; each goes through ``take``.
        first: the first chunk, which has gone through it; None if there is none.
    """

    def __init__(
        self,
        worker: Worker,
        health: WorkerHealth,
        job: GenerationJob,
        turn: PooledTurn,
        generated: array[int],
    ) -> None:
        self._worker, self._health, self._turn, self._generated = worker, health, turn, generated
        self.first: Chunk | None = None
        worker.load.generations += 1
        turn.worker = worker
        if job.deliver is not None:
            job = structs.replace(job, deliver=self._delivery(job.deliver))
        self.chunks = worker.engine.generate(job)

    def _delivery(self, deliver: Deliver) -> Deliver:
        """Return ``deliver`` with the account of the tokens; it is called for each."""
        keep = self._generated.extend

        def delivered(token_ids: Sequence[int]) -> bool:
            keep(token_ids)
            return deliver(token_ids)

        return delivered

    async def begin(self) -> None:
        """Wait for the first chunk. Raises what ``Engine.generate`` raises; the run is closed then."""
        try:
            first = await anext(self.chunks, None)
            self.first = None if first is None else self.take(first)
        except BaseException as error:
            await self.close(error)
            raise

    def take(self, chunk: Chunk) -> Chunk:
        """Account for a chunk, and return what to pass on. Raises EngineFailed for an engine that hung."""
        self._generated.extend(chunk.token_ids)
        return chunk

    async def close(self, error: BaseException | None = None) -> None:
        """End the generation and its account. ``error`` is why, if it failed."""
        turn, worker = self._turn, self._worker
        try:
            await self.chunks.aclose()
        finally:
            if isinstance(error, EngineFailed):
                turn.failures += 1
                turn.failed.add(worker)
                self._health.failed(worker, error.message)
            turn.worker = None
            worker.load.generations -= 1


class RoutedRun(EngineRun):
    """One generation on one of several engines, with an account for its health, its load and the policy."""

    def __init__(
        self,
        choice: Choice,
        policy: RoutingPolicy,
        health: WorkerHealth,
        job: GenerationJob,
        turn: PooledTurn,
        generated: array[int],
    ) -> None:
        worker, load = choice.worker, choice.worker.load
        self._job, self._choice, self._policy = job, choice, policy
        self._start = len(generated)
        self._prefill = tokens_to_prefill(job, choice.predicted_cached_tokens)
        self._held = tokens_to_hold(job)
        self._is_read = self._knows_cached = False
        load.prefill_tokens += self._prefill
        load.decode_tokens += self._held
        policy.sent(job, choice)
        self._running = health.began(worker, job.request_id, len(job.prompt_token_ids))
        self._route: Route | None = Route(
            worker.name, choice.predicted_cached_tokens, choice.reason, turn.failures
        )
        super().__init__(worker, health, job, turn, generated)

    def _delivery(self, deliver: Deliver) -> Deliver:
        keep, health, running = self._generated.extend, self._health, self._running

        def delivered(token_ids: Sequence[int]) -> bool:
            keep(token_ids)
            health.progressed(running, len(token_ids))
            return deliver(token_ids)

        return delivered

    def take(self, chunk: Chunk) -> Chunk:
        """Account for a chunk, and return what to pass on. Raises EngineFailed for an engine that hung."""
        job, choice, load = self._job, self._choice, self._choice.worker.load
        self._health.progressed(self._running, len(chunk.token_ids))
        if self._running.stalled and chunk.finish == "cancelled" and not self._turn.aborted:
            raise EngineFailed(f"engine {choice.worker.name} generated nothing for too long")
        if not self._is_read and (chunk.token_ids or chunk.cached_tokens is not None):
            load.prefill_tokens -= self._prefill
            self._is_read, self._prefill = True, 0
            self._knows_cached = chunk.cached_tokens is not None
            self._policy.prompt_read(job, choice, chunk)
        elif chunk.cached_tokens is not None and not self._knows_cached:
            # vLLM counts them at the end of a generation.
            self._knows_cached = True
            self._policy.prompt_read(job, choice, chunk)
        chunk = super().take(chunk)
        if self._route is not None:
            chunk, self._route = replace(chunk, route=self._route), None
        return chunk

    async def close(self, error: BaseException | None = None) -> None:
        """End the generation and its account. ``error`` is why, if it failed."""
        choice, load = self._choice, self._choice.worker.load
        try:
            await super().close(error)
        finally:
            self._health.ended(self._running)
            load.prefill_tokens -= self._prefill
            load.decode_tokens -= self._held
            self._policy.ended(self._job, choice, self._generated[self._start :])


class Dispatcher:
    """Begin each generation on the engine that the policy chooses; on the only one without asking it.

    An engine that is full is passed over; Overloaded is raised if all are full or down.

    Args:
        health: knows which of them take new generations.
    """

    def __init__(self, workers: Sequence[Worker], policy: RoutingPolicy, health: WorkerHealth) -> None:
        self._workers = tuple(workers)
        self._policy = policy
        self._health = health
        self._closed = False

    def close(self) -> None:
        self._closed = True

    async def begin(self, job: GenerationJob, turn: PooledTurn, generated: array[int]) -> EngineRun | None:
        """Begin a generation on one engine, up to its first chunk; return None if the turn was aborted.

        Args:
            turn: the turn that the job belongs to.

        Raises what ``Engine.generate`` raises.
        """
        if self._closed:
            raise EngineFailed("the engines are closed")
        if len(self._workers) > 1:
            return await self._begin_routed(job, turn, generated)
        [worker] = self._workers
        if worker.state == "down":
            raise self._refusal(())
        if turn.aborted:
            return None
        run = EngineRun(worker, self._health, job, turn, generated)
        await run.begin()
        return run

    async def _begin_routed(
        self, job: GenerationJob, turn: PooledTurn, generated: array[int]
    ) -> EngineRun | None:
        refusals: dict[Worker, Overloaded] = {}
        while True:
            if self._closed:
                raise EngineFailed("the engines are closed")
            candidates = [each for each in self._candidates(job, turn) if each not in refusals]
            if not candidates:
                raise self._refusal(tuple(refusals.values()))
            choice = await self._policy.choose(job, candidates)
            if turn.aborted:
                return None
            run = RoutedRun(choice, self._policy, self._health, job, turn, generated)
            try:
                await run.begin()
            except Overloaded as refusal:
                refusals[choice.worker] = refusal
            else:
                return run

    def _candidates(self, job: GenerationJob, turn: PooledTurn) -> list[Worker]:
        """Return the engines that can serve the job, without those that failed the turn if there are others."""
        up = self._health.available()
        able = [each for each in up if _can_serve(each.engine.info(), job)] or up
        return [each for each in able if each not in turn.failed] or able

    def has_alternative(self, turn: PooledTurn) -> bool:
        """Return whether an engine is up that has not failed the turn."""
        return any(worker not in turn.failed for worker in self._health.available())

    def _refusal(self, refusals: Sequence[Overloaded]) -> Overloaded:
        if refusals:
            soonest = min(refusal.retry_after for refusal in refusals)
            return Overloaded(f"all engines are full: {refusals[0].message}", retry_after=soonest)
        return Overloaded(
            "no engine of this model answers; try again in a moment",
            retry_after=self._health.seconds_to_retry(),
        )


def _can_serve(info: EngineInfo, job: GenerationJob) -> bool:
    if len(job.prompt_token_ids) >= info.context_window:
        return False
    if job.constraint is not None and job.constraint.kind not in info.constraints:
        return False
    return info.pictures is not None or not job.pictures
