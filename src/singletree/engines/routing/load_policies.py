"""Policies that look at no cache: by turns, at random, or by load."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from random import Random

from singletree.engines.engine import Chunk, GenerationJob
from singletree.engines.routing.policy import Choice
from singletree.engines.routing.worker import Worker


class _Stateless:
    """The part of ``RoutingPolicy`` that has nothing to do where no cache is followed."""

    async def start(self, workers: Sequence[Worker]) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def sent(self, job: GenerationJob, choice: Choice) -> None:
        """Do nothing."""

    def prompt_read(self, job: GenerationJob, choice: Choice, chunk: Chunk) -> None:
        """Do nothing."""

    def ended(self, job: GenerationJob, choice: Choice, generated: Sequence[int]) -> None:
        """Do nothing."""

    def worker_lost(self, worker: Worker) -> None:
        """Do nothing."""


class RoundRobinPolicy(_Stateless):
    """Choose the engines by turns."""

    def __init__(self) -> None:
        self._turns = count()

    async def choose(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice:
        """Return the next engine."""
        return Choice(workers[next(self._turns) % len(workers)], reason="its turn")


class RandomPolicy(_Stateless):
    """Choose engines at random."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def choose(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice:
        """Return any engine."""
        return Choice(self._random.choice(workers), reason="at random")


class LeastLoadedPolicy(_Stateless):
    """Choose the engine with the least to do; equal ones at random."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def choose(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice:
        """Return the engine with the fewest generations and tokens to read."""
        least = min(map(load_rank, workers))
        worker = self._random.choice([each for each in workers if load_rank(each) == least])
        return Choice(worker, reason=f"the least loaded: {worker.load.generations} generations")


class PowerOfTwoPolicy(_Stateless):
    """Choose the less loaded of two engines taken at random: many front ends without shared state spread well so."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def choose(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice:
        """Return the less loaded of two engines."""
        two = self._random.sample(workers, min(2, len(workers)))
        worker = min(two, key=load_rank)
        return Choice(worker, reason=f"the less loaded of two: {worker.load.generations} generations")


def load_rank(worker: Worker) -> tuple[int, int, int]:
    """Return a key by which engines are ordered, the least loaded first."""
    load = worker.load
    return load.generations, load.prefill_tokens, load.decode_tokens
