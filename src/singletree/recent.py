"""What was made lately, kept as long as there is room for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")

ENTRY_BYTES = 200
"""What an entry costs beside its key and what was made of it: its places in the table and in the order."""


class Recent(Generic[Key, Made]):
    """Least recently used out first, bounded in bytes. Safe to use from several threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[Key, tuple[Made, int]] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0

    def get(self, key: Key) -> Made | None:
        """What was made of ``key`` if it is known."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Key, made: Made, size: int) -> None:
        """Remember what was made of ``key``, both of ``size`` bytes; what alone is over the limit is not kept."""
        cost = size + ENTRY_BYTES
        if cost > self._limit:
            return
        with self._lock:
            if key in self._entries:
                self.bytes -= self._entries[key][1]
            self._entries[key] = made, cost
            self.bytes += cost
            while self.bytes > self._limit:
                _, (_, freed) = self._entries.popitem(last=False)
                self.bytes -= freed
