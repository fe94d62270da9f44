"""How an engine of a pool is chosen for a generation, and the modes that look at no cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Protocol

from singletree.engines.engine import Chunk, GenerationJob
from singletree.engines.workers import RouterMode, RoutingOptions, Worker


def tokens_to_prefill(job: GenerationJob, cached_tokens: int | None) -> int:
    """Return how many tokens of the prompt an engine has to read, by the prediction: its ``Load.prefill_tokens``."""
    return max(0, len(job.prompt_token_ids) - (cached_tokens or 0))


def tokens_to_hold(job: GenerationJob) -> int:
    """Return how many tokens a generation needs in the KV cache, by the client's estimate: ``Load.decode_tokens``.

    A client's estimate that is beyond the limit of the generation counts as the limit.
    """
    limit, expected = job.sampling.max_tokens, job.expected_tokens or 0
    return len(job.prompt_token_ids) + (expected if limit is None else min(expected, limit))


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine for a generation.

    Attributes:
        predicted_cached_tokens: how many tokens of the prompt are expected in its prefix cache; None if the policy
            does not predict.
        reason: why this engine, in a few words.
    """

    worker: Worker
    predicted_cached_tokens: int | None = None
    reason: str = ""


class RoutingPolicy(Protocol):
    """Chooses engines. It is used by one event loop, and its methods do not block.

    For each generation the pool calls ``choose``, ``sent``, then ``prompt_read`` unless the engine fails before, and
    in any case ``ended``. A generation that goes on on another engine is a new one, whose prompt is longer. A policy
    that follows no cache leaves out all but ``choose``.
    """

    async def start(self, workers: Sequence[Worker]) -> None:
        """Begin to follow the engines' caches. The engines have been started.

        Args:
            workers: all engines of the pool, whatever their state; the same objects for the life of the policy.

        Raises:
            BadConfiguration: an option of the policy does not fit the engines.
        """
        return

    async def close(self) -> None:
        """Free everything. Safe to call twice."""
        return

    async def choose(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice:
        """Return the engine for ``job``.

        Args:
            workers: the engines that take new generations; at least one.
        """

    def sent(self, job: GenerationJob, choice: Choice) -> None:
        """Note that ``job`` goes to the chosen engine."""
        return

    def prompt_read(self, job: GenerationJob, choice: Choice, chunk: Chunk) -> None:
        """Note that the engine has read the prompt.

        Args:
            chunk: the first with tokens or ``cached_tokens``. The method is called once more for the first chunk with
                ``cached_tokens`` or ``picture_tokens`` if that comes later, as from vLLM.
        """
        return

    def ended(self, job: GenerationJob, choice: Choice, generated: Sequence[int]) -> None:
        """Note that the generation has ended, finished or not, after the tokens ``generated``."""
        return

    def worker_lost(self, worker: Worker) -> None:
        """Note that the engine's cache is lost: it went down or was restarted."""
        return


class RoundRobinPolicy(RoutingPolicy):
    """Choose the engines by turns."""

    def __init__(self) -> None:
        self._turns = count()

    async def choose(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice:
        return Choice(workers[next(self._turns) % len(workers)], reason="its turn")


class RandomPolicy(RoutingPolicy):
    """Choose engines at random."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def choose(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice:
        return Choice(self._random.choice(workers), reason="at random")


class LeastLoadedPolicy(RandomPolicy):
    """Choose the engine with the least to do; equal ones at random."""

    async def choose(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice:
        least = min(map(load_rank, workers))
        worker = self._random.choice([each for each in workers if load_rank(each) == least])
        return Choice(worker, reason=f"the least loaded: {worker.load.generations} generations")


class PowerOfTwoPolicy(RandomPolicy):
    """Choose the less loaded of two engines taken at random: many front ends without shared state spread well so."""

    async def choose(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice:
        two = self._random.sample(workers, min(2, len(workers)))
        worker = min(two, key=load_rank)
        return Choice(worker, reason=f"the less loaded of two: {worker.load.generations} generations")


def load_rank(worker: Worker) -> tuple[int, int, int]:
    """Return a key by which engines are ordered, the least loaded first."""
    load = worker.load
    return load.generations, load.prefill_tokens, load.decode_tokens


MakePolicy = Callable[[RoutingOptions], RoutingPolicy]

LOAD_POLICIES: Mapping[RouterMode, MakePolicy] = {
    "round-robin": lambda options: RoundRobinPolicy(),
    "random": lambda options: RandomPolicy(options.source_of_chance()),
    "least-loaded": lambda options: LeastLoadedPolicy(options.source_of_chance()),
    "power-of-two": lambda options: PowerOfTwoPolicy(options.source_of_chance()),
}
"""The modes that look at no cache."""
