"""A cache that is bounded in bytes, in entries, or in both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from math import inf
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

ENTRY_BYTES = 200
"""Cost of an entry in bytes, in addition to its key and value: its places in the table and in the order."""


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
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        """Return the value of ``key`` and mark it as used now; None when it is not cached."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def peek(self, key: Key) -> Value | None:
        """Return the value of ``key`` without marking it as used; None when it is not cached."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def items(self) -> list[tuple[Key, Value]]:
        """Return all keys and values, the most recently used first, without marking them as used."""
        with self._lock:
            return [(key, value) for key, (value, _) in reversed(self._entries.items())]

    def keys(self) -> list[Key]:
        """Return all keys, the most recently used first, without marking them as used."""
        with self._lock:
            return list(reversed(self._entries))

    def values(self) -> list[Value]:
        """Return all values, the most recently used first, without marking them as used."""
        with self._lock:
            return [value for value, _ in reversed(self._entries.values())]

    def put(self, key: Key, value: Value, size: int = 0) -> None:
        """Cache ``value`` for ``key`` in place of its last value; key and value together take ``size`` bytes.

        An entry that is over the limit by itself is not cached.
        """
        cost = size + ENTRY_BYTES
        with self._lock:
            self._remove(key)
            if cost > self._limit:
                return
            self._entries[key] = value, cost
            self.bytes += cost
            while self.bytes > self._limit or len(self._entries) > self._most_entries:
                self._remove(next(iter(self._entries)))

    def resize(self, limit: float) -> None:
        """Set the maximum size in bytes of all entries, and evict what is over it."""
        with self._lock:
            self._limit = limit
            while self.bytes > limit:
                self._remove(next(iter(self._entries)))

    def pop(self, key: Key) -> Value | None:
        """Remove ``key`` and return its value; None when it is not cached."""
        with self._lock:
            return self._remove(key)

    def _remove(self, key: Key) -> Value | None:
        value, cost = self._entries.pop(key, (None, 0))
        self.bytes -= cost
        return value
