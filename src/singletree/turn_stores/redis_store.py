"""Turns in Redis or Valkey, for the processes of many machines (``--turn-memory-url``).

Each key is a sorted set of the names of its turns, by the time at which they were stored; each turn is a string. Both
expire a week after they were last needed. How much is kept is the server's own setting (``maxmemory`` with the policy
``allkeys-lru``): what it evicts is found in the capsules that clients carry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from singletree.errors import BadConfiguration, without_passwords
from singletree.turn_stores.store import NAME_BYTES, RIVALS, StoredTurn, StoreUnavailable

if TYPE_CHECKING:
    from redis.client import Pipeline

T = TypeVar("T")

KEPT_SECONDS = 7 * 24 * 3600
"""How long a turn is kept that nobody needs: a week."""

_WAIT_SECONDS = 0.25
"""How long one access may take, and the connection before it."""

_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What the package raises for an answer of another type than that of the command."""

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
                f"--turn-memory-url {without_passwords(url)!r}: {without_passwords(str(error))}; give one such as redis://127.0.0.1:6379/0"
            ) from None

    def add(self, turn: StoredTurn) -> None:
        now = time.time()

        def fill(pipeline: Pipeline) -> None:
            pipeline.set(_TURN + turn.name, turn.conversation + turn.sealed, ex=KEPT_SECONDS)
            for key in turn.keys:
                pipeline.zadd(_KEY + key, {turn.name: now})
                pipeline.zremrangebyrank(_KEY + key, 0, -RIVALS - 1)
                pipeline.expire(_KEY + key, KEPT_SECONDS)

        self._run(fill, None, atomic=True)

    def names(self, keys: Sequence[bytes]) -> list[list[bytes]]:

        def fill(pipeline: Pipeline) -> None:
            for key in keys:
                pipeline.zrange(_KEY + key, 0, -1)

        found = self._run(fill, len(keys)) if keys else []
        for names in found:
            if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
                raise _unfit(names)
        return found

    def turns(self, names: Sequence[bytes]) -> dict[bytes, StoredTurn]:

        def fill(pipeline: Pipeline) -> None:
            for name in names:
                pipeline.getex(_TURN + name, ex=KEPT_SECONDS)

        found = self._run(fill, len(names)) if names else []
        for value in found:
            if value is not None and (not isinstance(value, bytes) or len(value) < NAME_BYTES):
                raise _unfit(value)
        return {
            name: StoredTurn(name, value[:NAME_BYTES], value[NAME_BYTES:])
            for name, value in zip(names, found, strict=True)
            if value is not None
        }

    def close(self) -> None:
        self._client.close()

    def _run(
        self, fill: Callable[[Pipeline], None], expected: int | None, *, atomic: bool = False
    ) -> list[Any]:
        """Send the commands that ``fill`` adds in one round trip; return the answers, as many as ``expected``."""
        try:
            with self._client.pipeline(transaction=atomic) as pipeline:
                fill(pipeline)
                answers: object = pipeline.execute()
        except (self._error, OSError) as error:
            raise StoreUnavailable(str(error)) from None
        except _UNREADABLE as error:
            raise StoreUnavailable(f"its answer cannot be read ({type(error).__name__})") from None
        if not isinstance(answers, list) or expected not in (None, len(answers)):
            raise _unfit(answers)
        return answers


def _unfit(answer: object) -> StoreUnavailable:
    shown = repr(answer)[:80]
    return StoreUnavailable(f"it answers {shown}, which is no turn; check --turn-memory-url")
