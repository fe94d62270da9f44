"""Remember what was made of the items of a request, for the next one, which continues them.

Every request contains the whole conversation, and the items that it had before are the same objects as before
(``wire.decode_each``). So what is known of a request is found by identity, at the cost of its new items.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Generic, NamedTuple, TypeVar

from singletree.lru import LruCache

Made = TypeVar("Made")

_ITEM_BYTES = 24
"""Memory of an item's place in a prefix, and in what was made of it."""


class KnownPrefix(NamedTuple, Generic[Made]):
    """The first items of a request, what was made of them, and the size of all that in bytes."""

    items: Sequence[object]
    made: Made
    size: int


class KnownPrefixes(Generic[Made]):
    """Prefixes of conversations, and what was made of them. Safe to use from several threads.

    Args:
        limit: maximum size in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._known: LruCache[tuple[int, int], KnownPrefix[Made]] = LruCache(limit)

    def longest(self, items: Sequence[object]) -> KnownPrefix[Made] | None:
        """Return the longest prefix of ``items`` that is known; None if there is none."""
        for length in range(len(items), 0, -1):
            # While the prefix is kept, no other object has the id of its last item.
            known = self._known.peek((length, id(items[length - 1])))
            if known is not None and all(map(is_, known.items, items)):
                return self._known.get(_key(known.items))
        return None

    def keep(self, known: KnownPrefix[Made], continued: KnownPrefix[Made] | None = None) -> None:
        """Keep ``known``, in place of the prefix ``continued``: a conversation goes on from its end."""
        if continued is not None:
            self._known.pop(_key(continued.items))
        if known.items:
            self._known.put(_key(known.items), known, known.size + _ITEM_BYTES * len(known.items))


def _key(items: Sequence[object]) -> tuple[int, int]:
    return len(items), id(items[-1])
