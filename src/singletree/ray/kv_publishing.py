"""Lets an engine in a replica publish its KV events, and tells where."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from singletree.engines.engine import KvPublisher
from singletree.server.models.config import Config

_FLAG = "--kv-events-config"
_NOT_WITH = frozenset((_FLAG, "--data-parallel-size", "-dp", "--dp-size", "--dp"))
"""Arguments of engines that are left alone: those with settings of their own for KV events, and those with several
ranks, each of which has a cache and publishes at a port of its own.
"""
_ENABLED: Mapping[str, Mapping[str, Any]] = {
    "vllm": {"enable_kv_cache_events": True, "publisher": "zmq", "topic": ""},
    "sglang": {"publisher": "zmq", "topic": ""},
}
"""For each engine that publishes KV events: its settings but for the endpoints."""


def can_publish(config: Config) -> bool:
    """Return whether the engine of the model publishes KV events with the settings made here."""
    given = {word.partition("=")[0].replace("_", "-") for word in config.engine_arguments}
    return config.engine in _ENABLED and not given & _NOT_WITH


def publish_kv_events(config: Config, address: str) -> tuple[Config, KvPublisher]:
    """Return the settings with which the engine publishes its KV events, and where it does so.

    The ports are free now. If another program takes one before the engine does, the engine does not start, and Ray
    starts another replica, which chooses other ports.

    Args:
        config: the settings of the model; ``can_publish`` is true for it.
        address: the address of this node in the cluster.
    """
    events, replays = _free_ports(2)
    settings = {
        **_ENABLED[config.engine],
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replays}",
    }
    words = (*config.engine_arguments, _FLAG, json.dumps(settings))
    host = f"[{address}]" if ":" in address else address
    publisher = KvPublisher(f"tcp://{host}:{events}", f"tcp://{host}:{replays}")
    return replace(config, engine_arguments=words), publisher


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [int(each.getsockname()[1]) for each in sockets]
