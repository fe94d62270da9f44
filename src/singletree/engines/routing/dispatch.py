"""Sends one generation to one engine of a pool, and keeps account of what each engine has to do."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields, replace

from singletree.engines.engine import Chunk, EngineInfo, GenerationJob, Route
from singletree.engines.routing.health import RunningGeneration, WorkerHealth
from singletree.engines.routing.policy import Choice, RoutingPolicy
from singletree.engines.routing.worker import Worker, tokens_to_hold, tokens_to_prefill
from singletree.errors import EngineFailed, Overloaded

_JOB_FIELDS = tuple(each.name for each in fields(GenerationJob))


@dataclass(slots=True, eq=False)
class PooledTurn:
    """A turn that one engine after the other may generate.

    Attributes:
        request_id: its id.
        failed: the engines that failed it.
        failures: how often an engine failed it.
        row: how often in a row, with little progress between.
        running: its generation now, if it is on an engine.
        aborted: whether it was ended by its id.
        generated: its tokens that have reached the pool, from whichever engine.
    """

    request_id: str
    failed: set[Worker] = field(default_factory=set)
    failures: int = 0
    row: int = 0
    running: RunningGeneration | None = None
    aborted: bool = False
    generated: array[int] = field(default_factory=lambda: array("I"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledJob(GenerationJob):
    """A job with the turn that it belongs to."""

    turn: PooledTurn


def pooled_job(job: GenerationJob, turn: PooledTurn) -> PooledJob:
    """Return ``job`` as one of ``turn``."""
    return PooledJob(**{name: getattr(job, name) for name in _JOB_FIELDS}, turn=turn)


class Dispatcher:
    """Generate each job on the engine that the policy chooses; as an engine, so that a queue can stand before it.

    An engine that is full is passed over; Overloaded is raised if all are full or down.

    Args:
        workers: the engines.
        policy: chooses one.
        health: knows which of them take new generations.
    """

    def __init__(self, workers: Sequence[Worker], policy: RoutingPolicy, health: WorkerHealth) -> None:
        self._workers = tuple(workers)
        self._policy = policy
        self._health = health
        self._closed = False

    async def start(self) -> None:
        """Do nothing: the pool starts the engines."""

    async def close(self) -> None:
        """Refuse further generations."""
        self._closed = True

    def info(self) -> EngineInfo:
        """Return what the first engine reports."""
        return self._workers[0].engine.info()

    async def abort(self, request_id: str) -> None:
        """Do nothing: the pool knows which engine has the generation."""

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """Generate on one engine. Raises what ``Engine.generate`` raises."""
        turn = job.turn if isinstance(job, PooledJob) else PooledTurn(job.request_id)
        refusals: dict[Worker, Overloaded] = {}
        while True:
            if self._closed:
                raise EngineFailed("the engines are closed")
            candidates = [each for each in self._candidates(job, turn) if each not in refusals]
            if not candidates:
                raise self._refusal(tuple(refusals.values()))
            choice = await self._policy.choose(job, candidates)
            if turn.aborted:
                yield Chunk((), "cancelled")
                return
            begun = False
            try:
                async with aclosing(self._run(job, choice, turn)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except Overloaded as refusal:
                if begun:
                    raise
                refusals[choice.worker] = refusal

    def _candidates(self, job: GenerationJob, turn: PooledTurn) -> list[Worker]:
        """Return the engines that can serve the job, without those that failed the turn if there are others."""
        able = self._health.available()
        if len(self._workers) > 1:
            able = [each for each in able if _can_serve(each.engine.info(), job)] or able
        return [each for each in able if each not in turn.failed] or able

    def has_alternative(self, turn: PooledTurn) -> bool:
        """Return whether an engine is up that has not failed the turn."""
        return any(worker not in turn.failed for worker in self._health.available())

    def _refusal(self, refusals: Sequence[Overloaded]) -> Overloaded:
        if refusals:
            if len(self._workers) == 1:
                return refusals[0]
            soonest = min(refusal.retry_after for refusal in refusals)
            return Overloaded(f"all engines are full: {refusals[0].message}", retry_after=soonest)
        return Overloaded(
            "no engine of this model answers; try again in a moment",
            retry_after=self._health.seconds_to_retry(),
        )

    async def _run(self, job: GenerationJob, choice: Choice, turn: PooledTurn) -> AsyncGenerator[Chunk, None]:
        worker, load, policy = choice.worker, choice.worker.load, self._policy
        prefill, held = tokens_to_prefill(job, choice.predicted_cached_tokens), tokens_to_hold(job)
        load.generations += 1
        load.prefill_tokens += prefill
        load.decode_tokens += held
        policy.sent(job, choice)
        running = turn.running = self._health.began(worker, job.request_id, len(job.prompt_token_ids))
        generated = array("I")
        route = self._route(choice, turn)
        is_read = knows_cached = False
        compares = len(self._workers) > 1  # One engine alone is compared with no other.
        deliver, sent = job.deliver, job
        if deliver is not None:

            def noted(token_ids: Sequence[int]) -> bool:
                if compares:
                    self._health.progressed(running, len(token_ids))
                generated.extend(token_ids)
                turn.generated.extend(token_ids)
                return deliver(token_ids)

            sent = replace(job, deliver=noted)
        try:
            async with aclosing(worker.engine.generate(sent)) as chunks:
                async for chunk in chunks:
                    self._health.progressed(running, len(chunk.token_ids))
                    if running.stalled and chunk.finish == "cancelled" and not turn.aborted:
                        raise EngineFailed(f"engine {worker.name} generated nothing for too long")
                    if not is_read and (chunk.token_ids or chunk.cached_tokens is not None):
                        load.prefill_tokens -= prefill
                        is_read, prefill = True, 0
                        knows_cached = chunk.cached_tokens is not None
                        policy.prompt_read(job, choice, chunk)
                    elif chunk.cached_tokens is not None and not knows_cached:
                        # vLLM counts them at the end of a generation.
                        knows_cached = True
                        policy.prompt_read(job, choice, chunk)
                    generated.extend(chunk.token_ids)
                    if route is not None:
                        chunk, route = replace(chunk, route=route), None
                    yield chunk
        except EngineFailed as failure:
            turn.failures += 1
            turn.failed.add(worker)
            if not self._closed:
                self._health.failed(worker, failure.message)
            raise
        finally:
            turn.running = None
            self._health.ended(running)
            load.generations -= 1
            load.prefill_tokens -= prefill
            load.decode_tokens -= held
            policy.ended(job, choice, generated)

    def _route(self, choice: Choice, turn: PooledTurn) -> Route | None:
        if len(self._workers) == 1:
            return None
        return Route(choice.worker.name, choice.predicted_cached_tokens, choice.reason, turn.failures)


def _can_serve(info: EngineInfo, job: GenerationJob) -> bool:
    if len(job.prompt_token_ids) >= info.context_window:
        return False
    if job.constraint is not None and job.constraint.kind not in info.constraints:
        return False
    return info.pictures is not None or not job.pictures
