"""Turns in Redis or Valkey, for the processes of many machines (``--turn-memory-url``).

Each key is a sorted set of the names of its turns, by the time at which they were stored; each turn is a string. Both
expire a week after they were last needed. How much is kept is the server's own setting (``maxmemory`` with the policy
``allkeys-lru``): what it evicts is found in the capsules that clients carry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from singletree.errors import BadConfiguration
from singletree.server.models.turn_store import NAME_BYTES, RIVALS, StoredTurn, StoreUnavailable

if TYPE_CHECKING:
    from redis.client import Pipeline

T = TypeVar("T")

KEPT_SECONDS = 7 * 24 * 3600
"""How long a turn is kept that nobody needs: a week."""

_WAIT_SECONDS = 0.25
"""How long one access may take, and the connection before it."""

_KEY, _TURN = b"singletree:key:", b"singletree:turn:"


class RedisTurnStore:
    """Turns on a Redis or Valkey server.

    Args:
        url: ``redis://``, ``rediss://`` (TLS) or ``unix://``.

    Raises:
        BadConfiguration: the URL is invalid, or the package ``redis`` is not installed.
    """

    is_remote = True

    def __init__(self, url: str) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise BadConfiguration(
                "--turn-memory-url needs the package redis: pip install 'singletree[redis]'"
            ) from None
        self._error = redis.RedisError
        try:
            self._client = redis.Redis.from_url(
                url,
                socket_timeout=_WAIT_SECONDS,
                socket_connect_timeout=_WAIT_SECONDS,
                # A connection that the server closed is opened again once; nothing else is tried twice.
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError as error:
            raise BadConfiguration(
                f"--turn-memory-url {url!r}: {error}; give one such as redis://127.0.0.1:6379/0"
            ) from None

    def add(self, turn: StoredTurn) -> None:
        """Store ``turn`` as the latest of each of its keys. Raises StoreUnavailable."""
        now = time.time()

        def fill(pipeline: Pipeline) -> None:
            pipeline.set(_TURN + turn.name, turn.conversation + turn.sealed, ex=KEPT_SECONDS)
            for key in turn.keys:
                pipeline.zadd(_KEY + key, {turn.name: now})
                pipeline.zremrangebyrank(_KEY + key, 0, -RIVALS - 1)
                pipeline.expire(_KEY + key, KEPT_SECONDS)

        self._run(fill, atomic=True)

    def names(self, keys: Sequence[bytes]) -> list[list[bytes]]:
        """Return for each key the names of its turns, the latest last. Raises StoreUnavailable."""

        def fill(pipeline: Pipeline) -> None:
            for key in keys:
                pipeline.zrange(_KEY + key, 0, -1)

        return self._run(fill) if keys else []

    def turns(self, names: Sequence[bytes]) -> dict[bytes, StoredTurn]:
        """Return the turns with ``names``, by name. Raises StoreUnavailable."""

        def fill(pipeline: Pipeline) -> None:
            for name in names:
                pipeline.getex(_TURN + name, ex=KEPT_SECONDS)

        found = self._run(fill) if names else []
        return {
            name: StoredTurn(name, value[:NAME_BYTES], value[NAME_BYTES:])
            for name, value in zip(names, found, strict=True)
            if value is not None
        }

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _run(self, fill: Callable[[Pipeline], None], *, atomic: bool = False) -> list[Any]:
        """Send the commands that ``fill`` adds in one round trip, and return the answers to them."""
        try:
            with self._client.pipeline(transaction=atomic) as pipeline:
                fill(pipeline)
                answers: list[Any] = pipeline.execute()
                return answers
        except (self._error, OSError) as error:
            raise StoreUnavailable(str(error)) from None
