"""The modes of routing, as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from singletree.engines.routing.dynamo_policy import DynamoPolicy
from singletree.engines.routing.kv_policy import KvAwarePolicy
from singletree.engines.routing.load_policies import (
    LeastLoadedPolicy,
    PowerOfTwoPolicy,
    RandomPolicy,
    RoundRobinPolicy,
)
from singletree.engines.routing.policy import RoutingPolicy
from singletree.engines.routing.residency import DEFAULT_PATIENCE, Patience

RouterMode = Literal["kv", "round-robin", "random", "least-loaded", "power-of-two", "dynamo"]

DEFAULT_MODE: RouterMode = "kv"


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """The options of all modes.

    Attributes:
        model: the model's name, part of every cache key.
        kv_events: for each engine, in the order of the workers, the ZMQ endpoint of its KV events (``tcp://HOST:PORT``,
            ``ipc://PATH``); empty for one whose cache is predicted. No entries: every cache is predicted.
        kv_replay: for each engine the ZMQ endpoint that repeats missed events; empty for none.
        patience: for how long sessions wait for each other, where the caches are too small for all.
        cache_tokens: size of each engine's KV cache in tokens; None for what the engine reports.
        random: source of random choices.
    """

    model: str = ""
    kv_events: tuple[str, ...] = ()
    kv_replay: tuple[str, ...] = ()
    cache_tokens: int | None = None
    patience: Patience = DEFAULT_PATIENCE
    random: Random | None = None

    def source_of_chance(self) -> Random:
        """Return ``random``, or a new source."""
        return self.random or Random()


_POLICIES: Mapping[RouterMode, Callable[[RoutingOptions], RoutingPolicy]] = {
    "round-robin": lambda options: RoundRobinPolicy(),
    "random": lambda options: RandomPolicy(options.source_of_chance()),
    "least-loaded": lambda options: LeastLoadedPolicy(options.source_of_chance()),
    "power-of-two": lambda options: PowerOfTwoPolicy(options.source_of_chance()),
    "kv": lambda options: KvAwarePolicy(
        options.model,
        kv_events=options.kv_events,
        kv_replay=options.kv_replay,
        cache_tokens=options.cache_tokens,
        patience=options.patience,
    ),
    "dynamo": lambda options: DynamoPolicy(
        options.model,
        kv_events=options.kv_events,
        kv_replay=options.kv_replay,
        cache_tokens=options.cache_tokens,
    ),
}


def make_policy(mode: RouterMode, options: RoutingOptions = RoutingOptions()) -> RoutingPolicy:
    """Return the policy of ``mode``.

    Raises:
        BadConfiguration: a package that the mode needs is not installed.
    """
    return _POLICIES[mode](options)


assert set(_POLICIES) == set(get_args(RouterMode))
