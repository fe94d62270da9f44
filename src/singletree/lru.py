"""A cache that is bounded in bytes, in entries, or in both."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from math import inf
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

ENTRY_BYTES = 200
"""Cost of an entry in bytes, in addition to its key and value: its places in the table and in the order."""

_EDGE_BYTES = 64


class LruCache(Generic[Key, Value]):
    """A cache that evicts the least recently used entries. Safe to use from several threads.

    Args:
        limit: maximum size in bytes of all entries, ``ENTRY_BYTES`` for each included.
        entries: maximum number of entries.

    Attributes:
        bytes: size of all entries now.
    """

    def __init__(self, limit: float = inf, *, entries: float = inf) -> None:
        self._limit = limit
        self._most_entries = entries
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._costs: dict[Key, int] = {}
        self._lock = Lock()
        self.bytes = 0

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """Return the value of ``key`` and mark it as used now; None when it is not cached."""
        value = self._values.get(key)
        if value is not None:
            with self._lock:
                if key in self._values:  # It may have been evicted meanwhile.
                    self._values.move_to_end(key)
        return value

    def touch(self, keys: Iterable[Key]) -> bool:
        """Mark the entries of ``keys`` as used now, in this order; return whether all are cached."""
        with self._lock:
            try:
                deque(map(self._values.move_to_end, keys), maxlen=0)
            except KeyError:
                return False
        return True

    def peek(self, key: Key) -> Value | None:
        """Return the value of ``key`` without marking it as used; None when it is not cached."""
        return self._values.get(key)

    def items(self) -> list[tuple[Key, Value]]:
        """Return all keys and values, the most recently used first, without marking them as used."""
        with self._lock:
            return list(reversed(self._values.items()))

    def keys(self) -> list[Key]:
        """Return all keys, the most recently used first, without marking them as used."""
        with self._lock:
            return list(reversed(self._values))

    def values(self) -> list[Value]:
        """Return all values, the most recently used first, without marking them as used."""
        with self._lock:
            return list(reversed(self._values.values()))

    def put(self, key: Key, value: Value, size: int = 0) -> None:
        """Cache ``value`` for ``key`` in place of its last value; key and value together take ``size`` bytes.

        An entry that is over the limit by itself is not cached.
        """
        cost = size + ENTRY_BYTES
        with self._lock:
            if cost > self._limit:
                self._remove(key)
                return
            if key in self._values:
                self._remove(key)
            self._values[key] = value
            self._costs[key] = cost
            self.bytes += cost
            self._evict()

    def part(self, owner: str) -> LruCache[Key, Value]:
        """Return the entries of one owner, as a cache that shares the limits of this one; itself for an empty name.

        Through a part nothing else is found; through the whole, ``values`` and ``items`` return those of all parts.
        """
        return _Part(self, owner) if owner else self

    def resize(self, limit: float) -> None:
        """Set the maximum size in bytes of all entries, and evict what is over it."""
        with self._lock:
            self._limit = limit
            self._evict()

    def cost(self, keys: Iterable[Key]) -> int:
        return sum(self._costs.get(key, 0) for key in keys)

    def pop(self, key: Key) -> Value | None:
        with self._lock:
            return self._remove(key)

    def _evict(self) -> None:
        while self.bytes > self._limit or len(self._values) > self._most_entries:
            self._remove(next(iter(self._values)))

    def _remove(self, key: Key) -> Value | None:
        self.bytes -= self._costs.pop(key, 0)
        return self._values.pop(key, None)


class _Part(LruCache[Key, Value]):
    """The entries of ``owner`` in a cache. In the whole, their keys are (owner, key)."""

    def __init__(self, whole: LruCache[Any, Value], owner: str) -> None:
        # Without the fields of a cache of its own: a method that is missing here fails, and finds nothing of others.
        self._whole = whole
        self._owner = owner

    def __len__(self) -> int:
        return len(self.keys())

    @property
    def bytes(self) -> int:  # type: ignore[override]
        return self._whole.cost(self._own(each) for each in self.keys())

    def get(self, key: Key) -> Value | None:
        return self._whole.get(self._own(key))

    def peek(self, key: Key) -> Value | None:
        return self._whole.peek(self._own(key))

    def items(self) -> list[tuple[Key, Value]]:
        found = []
        for name, value in self._whole.items():
            if type(name) is _OwnKey and name.owner == self._owner:
                found.append((name.key, value))
        return found

    def keys(self) -> list[Key]:
        return [key for key, _ in self.items()]

    def values(self) -> list[Value]:
        return [value for _, value in self.items()]

    def put(self, key: Key, value: Value, size: int = 0) -> None:
        self._whole.put(self._own(key), value, size)

    def pop(self, key: Key) -> Value | None:
        return self._whole.pop(self._own(key))

    def _own(self, key: Key) -> _OwnKey:
        return _OwnKey(self._owner, key)


class _OwnKey(NamedTuple):
    owner: str
    key: Any


def find_bytes(
    cache: LruCache[tuple[Any, ...], tuple[bytes, Value]], kind: Hashable, data: bytes
) -> tuple[tuple[Any, ...], tuple[bytes, Value] | None]:
    """Look up what ``cache`` has for ``data``, by its length and edges, without a hash of all bytes.

    Comparing with one candidate takes a tenth of the time of a hash. Bytes that have the length and the edges of
    others, as turns that differ in the id of a call alone, are a key as a whole: they displace nothing.

    Args:
        kind: what the bytes are; other kinds are apart.

    Returns:
        The key, under which to put ``data`` and what is known of it; and what is there, or None.
    """
    key: tuple[Any, ...] = kind, len(data), data[:_EDGE_BYTES], data[-_EDGE_BYTES:]
    known = cache.get(key)
    if known is None or known[0] == data:
        return key, known
    key = kind, data
    return key, cache.get(key)
