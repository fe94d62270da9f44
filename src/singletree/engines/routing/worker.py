"""One of several engines of a model, with its load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from singletree.engines.engine import Engine, GenerationJob

WorkerState = Literal["up", "draining", "down"]


@dataclass(slots=True)
class Load:
    """What an engine has to do, as far as this process knows.

    Attributes:
        generations: how many generations run or wait there.
        prefill_tokens: prompt tokens that it was sent and has not read yet.
        decode_tokens: tokens in its KV cache that running generations need.
    """

    generations: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(slots=True, eq=False)
class Worker:
    """One engine of a pool.

    Attributes:
        name: its name in logs, metrics and reports: the URL of a server, else its number.
        engine: the engine.
        state: ``up``: takes new generations. ``draining``: only finishes those that it has. ``down``: it failed.
        load: what it has to do now.
    """

    name: str
    engine: Engine
    state: WorkerState = "up"
    load: Load = field(default_factory=Load)


def tokens_to_prefill(job: GenerationJob, cached_tokens: int | None) -> int:
    """Return how many tokens of the prompt an engine has to read, by the prediction: its ``Load.prefill_tokens``."""
    return max(0, len(job.prompt_token_ids) - (cached_tokens or 0))


def tokens_to_hold(job: GenerationJob) -> int:
    """Return how many tokens a generation needs in the KV cache, by the client's estimate: ``Load.decode_tokens``.

    A client's estimate that is beyond the limit of the generation counts as the limit.
    """
    limit, expected = job.sampling.max_tokens, job.expected_tokens or 0
    return len(job.prompt_token_ids) + (expected if limit is None else min(expected, limit))
