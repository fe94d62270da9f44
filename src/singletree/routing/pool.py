"""Several engines of one model used as one: a turn whose engine fails goes on on another, or on the same one again.

The tokens that the client has already received are appended to the prompt, and the next engine continues after them.
The client sees a pause, bridged by keep-alive events, instead of an error that would cost the turn and, with most
harnesses, the prefix of the next one.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial

from msgspec import structs

from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, EngineInfo, GenerationJob, PictureSupport, count_picture_tokens
from singletree.engines.lifetime import Revivable
from singletree.engines.sharing import EngineQueue, Queued
from singletree.engines.workers import MatcherSource, RoutingOptions, TurnMatcher, Worker
from singletree.errors import (
    BadConfiguration,
    EngineFailed,
    EngineUnfit,
    EngineUnreachable,
    Overloaded,
    Rejected,
    SingletreeError,
)
from singletree.pictures import PromptPicture
from singletree.routing.dispatch import Dispatcher, PooledTurn
from singletree.routing.health import WorkerHealth
from singletree.routing.policy import LOAD_POLICIES, RoundRobinPolicy, RoutingPolicy

_LOG = logging.getLogger(__name__)

MIGRATION_LIMIT = 3
"""How many engine failures in a row a turn survives. After more it ends: the turn itself may make engines fail."""

PROGRESS_TOKENS = 16
"""A failure after this many further tokens restarts the count: this turn is not what breaks engines."""


class EnginePool(Queued):
    """Use several engines of one model as one: each turn goes to the engine that the policy chooses.

    A turn that an engine fails continues on another one, or on the same if there is no other: it may have restarted
    its process or stand behind a load balancer. While all engines are full or down, turns wait in a queue.

    A failure is passed on, and the turn ends, after ``migration_limit`` others; when an engine that restarts by itself
    had yielded no tokens since it was asked and there is no other (the client can repeat the request and loses
    nothing); when a constraint cannot be followed (``matchers``); and for a lasting cause (``EngineUnfit``) unless
    there is another engine.

    Args:
        policy: chooses the engine of each generation; by turns if None.
        hold_seconds: how long a generation may wait while all engines are full or down.
        migration_limit: how many failures in a row a turn survives.
        matchers: follows the grammar of a constraint over the tokens generated so far; None: a constrained turn cannot
            continue after its first token.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        policy: RoutingPolicy | None = None,
        *,
        hold_seconds: float = 0.0,
        migration_limit: int = MIGRATION_LIMIT,
        matchers: MatcherSource | None = None,
    ) -> None:
        self.workers = tuple(workers)
        self._policy = policy or RoundRobinPolicy()
        self._health = WorkerHealth(self.workers, self._policy)
        self._dispatcher = Dispatcher(self.workers, self._policy, self._health)
        self._queue = EngineQueue(hold_seconds)
        self._migration_limit = migration_limit
        self._matchers = matchers
        self._turns: set[PooledTurn] = set()
        self._begun = self._closed = False

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    async def start(self) -> None:
        """Start every engine. One that can be revived may fail, if another starts.

        Raises:
            BadConfiguration: an engine does not fit the others, or the policy does not fit the engines.
            SingletreeError: what ``Engine.start`` raises.
        """
        results = await asyncio.gather(
            *(each.engine.start() for each in self.workers), return_exceptions=True
        )
        failed = [error for error in results if error is not None]
        for worker, error in zip(self.workers, results, strict=True):
            if error is None:
                continue
            lasting = isinstance(error, BadConfiguration) or not isinstance(error, SingletreeError)
            if lasting or len(failed) == len(self.workers) or not isinstance(worker.engine, Revivable):
                await self.close()
                raise error
            worker.state = "down"
        await self.begin()

    async def begin(self) -> None:
        """Begin to route, where the engines have been started; try those anew that are down.

        Raises:
            BadConfiguration: the policy does not fit the engines.
        """
        if self._begun:
            return
        self._begun = True
        await self._policy.start(self.workers)
        self._health.start()
        for worker in self.workers:
            if worker.state == "down":
                self._health.failed(worker, "it did not start")

    async def close(self) -> None:
        self._closed = True
        self._dispatcher.close()
        await self._health.close()
        await self._policy.close()
        for worker in self.workers:
            await worker.engine.close()

    def info(self) -> EngineInfo:
        """Return what all engines support, their slots together, and the smallest window."""
        if len(self.workers) == 1:
            return self.workers[0].engine.info()
        infos = [info for worker in self.workers if (info := worker.engine.info()).context_window]
        if not infos:
            return self.workers[0].engine.info()
        first, others = infos[0], infos[1:]
        pictures = _common_pictures([info.pictures for info in infos])
        blind = next(
            (info.blindness for info in infos if info.blindness),
            "the engines take pictures in different ways",
        )
        return replace(
            first,
            context_window=min(info.context_window for info in infos),
            slots=sum(info.slots for info in infos),
            details={**(first.details or {}), "engines": {each.name: each.state for each in self.workers}},
            constraints=tuple(
                kind for kind in first.constraints if all(kind in info.constraints for info in others)
            ),
            returns_prompt_logprobs=all(info.returns_prompt_logprobs for info in infos),
            resumable=all(info.resumable for info in infos),
            salts=all(info.salts for info in infos),
            started_at=max(info.started_at for info in infos),
            optional_sampling=first.optional_sampling.intersection(
                *(info.optional_sampling for info in others)
            ),
            pictures=pictures,
            blindness="" if pictures else blind,
        )

    async def abort(self, request_id: str) -> None:
        for turn in tuple(self._turns):
            if turn.request_id == request_id:
                turn.aborted = True
                if turn.worker is not None:
                    await turn.worker.engine.abort(request_id)

    async def count_picture_tokens(self, picture: PromptPicture) -> int:
        """Return what the first engine counts that takes pictures and is up."""
        able = self._health.available() or list(self.workers)
        worker = next((each for each in able if each.engine.info().pictures is not None), able[0])
        return await count_picture_tokens(worker.engine, picture)

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """Generate, with the same contract as ``Engine.generate``.

        ``cached_tokens`` and what is known of the prompt come from the first engine that reports them before the first
        token: the prompts of the later ones contain generated tokens. Of a turn that several engines generated, the
        weights are known from the last engine on, and the routed experts are not.
        """
        if self._closed or not self._begun:
            raise EngineFailed("the engines are closed" if self._closed else "the engines are not started")
        turn = PooledTurn(job.request_id)
        self._turns.add(turn)
        generated = array("I")
        failure: EngineFailed | None = None
        matcher: TurnMatcher | None = None
        is_known = False  # whether an engine has reported what it knows of the prompt
        try:
            while True:
                if generated and (last := ended_turn(generated, job)):
                    yield last
                    return
                before, hides_prompt = len(generated), is_known
                if before and job.constraint is not None:
                    matcher = matcher or await self._follow(job, generated)
                    if matcher is None and failure is not None:
                        raise failure
                chunks = self._attempt(job, generated, turn, matcher)
                try:
                    async for chunk in chunks:
                        is_known = is_known or bool(chunk.token_ids) or chunk.cached_tokens is not None
                        if before:
                            chunk = _continued(chunk, before)
                        if hides_prompt:
                            chunk = _unknown_prompt(chunk)
                            if not (chunk.token_ids or chunk.finish is not None or chunk.route):
                                continue
                        yield chunk
                    return
                except (Overloaded, Rejected) as error:
                    if failure is not None and generated:
                        # A refusal of the extended prompt would not make sense to the client: it sent another one.
                        raise failure from None
                    # The queue raises its own error, from the one that made it wait.
                    cause = error.__cause__
                    raise (cause if isinstance(cause, Overloaded) else error) from None
                except EngineFailed as error:
                    failure = failure or error
                    if self._gives_up(turn, error, job, generated, len(generated) - before):
                        raise failure from error
                    _LOG.warning(
                        "a turn continues after an engine failure at token %d: %s",
                        len(generated),
                        error.message,
                    )
                finally:
                    await chunks.aclose()
        finally:
            self._turns.discard(turn)

    def _attempt(
        self, job: GenerationJob, generated: array[int], turn: PooledTurn, matcher: TurnMatcher | None
    ) -> AsyncGenerator[Chunk, None]:
        if matcher is None:
            return self._once(remaining_job(job, generated), turn, generated)

        def ask(changed: GenerationJob) -> AsyncGenerator[Chunk, None]:
            return self._once(remaining_job(changed, generated), turn, array("I"))

        job = structs.replace(job, deliver=None)  # The matcher has to see every token.
        return matcher.go_on(job, generated, ask, self.info())

    async def _once(
        self, job: GenerationJob, turn: PooledTurn, generated: array[int]
    ) -> AsyncGenerator[Chunk, None]:
        """Generate on one engine, after waiting for a place if necessary. ``generated`` takes the tokens."""
        run, wait = await self._queue.admit(job, partial(self._dispatcher.begin, job, turn, generated))
        first = Chunk((), "cancelled") if run is None else run.first
        error: EngineFailed | None = None
        try:
            if first is not None:
                yield first if wait is None else wait.on(first)
            if run is not None:
                async for chunk in run.chunks:
                    yield run.take(chunk)
        except EngineFailed as failure:
            error = failure
            raise
        finally:
            try:
                if run is not None:
                    await run.close(error)
            finally:
                self._queue.wake()

    async def _follow(self, job: GenerationJob, generated: Sequence[int]) -> TurnMatcher | None:
        if self._matchers is None or job.constraint is None:
            return None
        return await self._matchers.follow(job.constraint, generated)

    def _gives_up(
        self,
        turn: PooledTurn,
        error: EngineFailed,
        job: GenerationJob,
        generated: Sequence[int],
        progress: int,
    ) -> bool:
        """Return whether a failure after ``progress`` further tokens is the end of the turn."""
        if progress >= PROGRESS_TOKENS:
            turn.row = 0
        turn.row += not isinstance(error, EngineUnreachable)
        if self._closed or turn.row > self._migration_limit:
            return True
        has_other = self._dispatcher.has_alternative(turn)
        if isinstance(error, EngineUnfit) and not has_other:
            return True
        if generated and not self.info().resumable:
            return True
        if generated and job.constraint is not None and self._matchers is None:
            return True
        comes_back = any(isinstance(worker.engine, Revivable) for worker in self.workers)
        return not (progress or has_other or comes_back)


def _common_pictures(supports: Sequence[PictureSupport | None]) -> PictureSupport | None:
    known = [support for support in supports if support is not None]
    if len(known) < len(supports) or len({support.place for support in known}) != 1:
        return None
    types = known[0].media_types.intersection(*(support.media_types for support in known))
    return replace(known[0], media_types=types) if types else None


def _continued(chunk: Chunk, generated: int) -> Chunk:
    """Return a chunk of an engine that continued a turn after ``generated`` tokens, as one of the whole turn."""
    versions = [
        replace(each, start=each.start + generated, end=each.end + generated)
        for each in chunk.weight_versions
    ]
    return replace(chunk, weight_versions=versions, routed_experts=None)


def _unknown_prompt(chunk: Chunk) -> Chunk:
    return replace(chunk, cached_tokens=None, prompt_tokens=None, picture_tokens=None, prompt_logprobs=None)


def ended_turn(generated: Sequence[int], job: GenerationJob) -> Chunk | None:
    """Return the last chunk of a turn that was complete when its engine failed; None if it was not complete."""
    if generated[-1] in job.stop_token_ids and not job.sampling.ignore_eos:
        return Chunk((), "stop")
    max_tokens = job.sampling.max_tokens
    if max_tokens is not None and 0 < max_tokens <= len(generated):
        return Chunk((), "length")
    return None


def remaining_job(job: GenerationJob, generated: Sequence[int]) -> GenerationJob:
    """Return the job that continues after the tokens generated so far."""
    if not generated:
        return job
    prompt = [*job.prompt_token_ids, *generated]
    sampling = _remaining_sampling(job.sampling, len(generated))
    return structs.replace(job, prompt_token_ids=prompt, sampling=sampling)


def _remaining_sampling(sampling: Sampling, generated: int) -> Sampling:
    max_tokens = None if sampling.max_tokens is None else sampling.max_tokens - generated
    min_tokens = max(0, sampling.min_tokens - generated)
    return replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=None)


def make_pool(
    workers: Sequence[Worker], options: RoutingOptions, matchers: MatcherSource | None
) -> EnginePool:
    """Return the engines ``workers`` as one, under a mode that looks at no cache."""
    return pool_with(LOAD_POLICIES[options.mode](options), workers, options, matchers)


def pool_with(
    policy: RoutingPolicy, workers: Sequence[Worker], options: RoutingOptions, matchers: MatcherSource | None
) -> EnginePool:
    """Return the engines ``workers`` as one, under ``policy``."""
    limit = MIGRATION_LIMIT if options.migration_limit is None else options.migration_limit
    seconds = options.hold_seconds or 0.0
    return EnginePool(workers, policy, hold_seconds=seconds, migration_limit=limit, matchers=matchers)
