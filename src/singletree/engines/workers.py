"""The engines of one model, and the interface of what uses several of them as one (the package ``routing``)."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, Protocol

from singletree.engines.engine import Chunk, Constraint, Engine, EngineInfo, GenerationJob

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
    """One engine of a model.

    Attributes:
        name: its name in logs, metrics and reports: the URL of a server, else its number.
        state: ``up``: takes new generations. ``draining``: only finishes those that it has. ``down``: it failed.
        load: what it has to do now.
    """

    name: str
    engine: Engine
    state: WorkerState = "up"
    load: Load = field(default_factory=Load)


RouterMode = Literal["kv", "round-robin", "random", "least-loaded", "power-of-two"]

DEFAULT_MODE: RouterMode = "kv"


Ask = Callable[[GenerationJob], AsyncGenerator[Chunk, None]]
"""Generates a job behind the tokens that the turn has so far."""


class TurnMatcher(Protocol):
    """Follows a grammar over the tokens of one turn."""

    def go_on(
        self, job: GenerationJob, generated: array[int], ask: Ask, info: EngineInfo
    ) -> AsyncGenerator[Chunk, None]:
        """Generate the rest of the turn under the constraint of ``job``, with the contract of ``Engine.generate``.

        Args:
            generated: the tokens of it so far, which the matcher has gone over; those that are yielded are added.

        Raises:
            EngineFailed: an engine fails; or no allowed token can be generated.
        """


class MatcherSource(Protocol):
    """Makes matchers for the constraints of a model."""

    async def follow(self, constraint: Constraint, token_ids: Sequence[int]) -> TurnMatcher | None:
        """Return a matcher that has gone over ``token_ids``; None if the grammar cannot be followed."""


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """The options of a pool.

    Attributes:
        mode: how it chooses an engine.
        model: the model's name, part of every cache key.
        kv_events: for each engine, in the order of the workers, the ZMQ endpoint of its KV events (``tcp://HOST:PORT``,
            ``ipc://PATH``); empty for one whose cache is predicted. No entries: every cache is predicted.
        kv_replay: for each engine the ZMQ endpoint that repeats missed events; empty for none.
        cache_tokens: size of each engine's KV cache in tokens; None for what the engine reports.
        hold_seconds: for how long a generation may wait while all engines are full or down, and a session for another,
            where the caches are too small for all; None for the default of each.
        migration_limit: how many engine failures in a row a turn survives; None for the default.
    """

    mode: RouterMode = "round-robin"
    model: str = ""
    kv_events: tuple[str, ...] = ()
    kv_replay: tuple[str, ...] = ()
    cache_tokens: int | None = None
    hold_seconds: float | None = None
    migration_limit: int | None = None
    random: Random | None = None

    def source_of_chance(self) -> Random:
        return self.random or Random()


class Pool(Engine, Protocol):
    """Several engines of one model, used as one."""

    async def begin(self) -> None:
        """Begin to route, where the engines have been started. Raises BadConfiguration: the mode does not fit them."""


MakePool = Callable[[Sequence[Worker], RoutingOptions, MatcherSource | None], Pool]
"""Makes a pool of engines that have been started. Raises BadConfiguration: an option does not fit."""
