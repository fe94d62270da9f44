"""The interface by which a pool chooses the engine for a generation, and reports how it went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from singletree.engines.engine import Chunk, GenerationJob
from singletree.engines.routing.worker import Worker


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine for a generation.

    Attributes:
        worker: the engine.
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
    in any case ``ended``. A generation that goes on on another engine is a new one, whose prompt is longer.
    """

    async def start(self, workers: Sequence[Worker]) -> None:
        """Begin to follow the engines' caches. The engines have been started.

        Args:
            workers: all engines of the pool, whatever their state; the same objects for the life of the policy.

        Raises:
            BadConfiguration: an option of the policy does not fit the engines.
        """

    async def close(self) -> None:
        """Free everything. Safe to call twice."""

    async def choose(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice:
        """Return the engine for ``job``.

        Args:
            workers: the engines that take new generations; at least one.
        """
        ...

    def sent(self, job: GenerationJob, choice: Choice) -> None:
        """Note that ``job`` goes to the chosen engine."""

    def prompt_read(self, job: GenerationJob, choice: Choice, chunk: Chunk) -> None:
        """Note that the engine has read the prompt.

        Args:
            chunk: the first with tokens or ``cached_tokens``. The method is called once more for the first chunk with
                ``cached_tokens`` or ``picture_tokens`` if that comes later, as from vLLM.
        """

    def ended(self, job: GenerationJob, choice: Choice, generated: Sequence[int]) -> None:
        """Note that the generation has ended, finished or not, after the tokens ``generated``."""

    def worker_lost(self, worker: Worker) -> None:
        """Note that the engine's cache is lost: it went down or was restarted."""
