"""What an engine's prefix cache holds, by the engine's own KV events."""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias

from singletree.engines.routing.block_chain import (
    TOKEN_BYTES,
    CacheScope,
    next_hash,
    unit_of,
)
from singletree.engines.routing.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KvEvent,
)
from singletree.engines.routing.prefix_index import PrefixIndex

_PARTIAL_KINDS = frozenset(
    (
        "sliding_window",
        "sliding_window_mla",
        "chunked_local_attention",
        "mamba",
        "encoder_only_attention",
        "cross_attention",
    )
)
"""Kinds of KV cache whose blocks do not reach back to the beginning of the prompt."""

_NAME_MASK = (1 << 60) - 1
"""Sixty bits of an engine's name for a block: CPython keeps such a number in 32 bytes, not 48."""

_Place: TypeAlias = int | tuple[int, bytes]
"""A block's hash in the index; or, for one inside a unit, the unit before it and the unit's tokens so far."""


class EventCache:
    """One engine's cache.

    Of the cache groups of a hybrid model, the one with full attention is followed: a prefix that it lacks is nowhere.

    Args:
        index: takes the blocks.
        holder: the engine's number there.
        model: the model's name, part of each hash.

    Attributes:
        unit: how many tokens one hash covers; None until the first event.
        salted: whether the engine publishes the salts of its blocks.
        orphans: how many blocks came behind one that is unknown, and could not be placed.
    """

    def __init__(self, index: PrefixIndex, holder: int, model: str = "") -> None:
        self._index, self._holder, self._model = index, holder, model
        self._media: dict[str, dict[int, _Place]] = {}
        self._group: int | None = None
        self._partial_group = True
        self.unit: int | None = None
        self.salted = False
        self.orphans = 0

    @property
    def blocks(self) -> int:
        """The number of the engine's blocks, on all media."""
        return sum(map(len, self._media.values()))

    def apply(self, event: KvEvent) -> None:
        """Take over one event."""
        if isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, BlockRemoved):
            self._remove(event)
        elif isinstance(event, AllBlocksCleared):
            self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        for places in self._media.values():
            self._index.discard(self._holder, (place for place in places.values() if isinstance(place, int)))
        self._media.clear()

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        if size < 1 or len(event.token_ids) != size * len(event.block_hashes) or not self._follows(event):
            return
        unit = unit_of(size)
        if unit != self.unit:
            self.clear()
            self.unit = unit
        places = self._media.setdefault(event.medium or "GPU", {})
        if event.parent_block_hash is None:
            place: _Place | None = self._scope(event).seed(unit)
        else:
            place = self._find(event.parent_block_hash)
        if place is None:
            self.orphans += len(event.block_hashes)
            return
        parent, pending = place if isinstance(place, tuple) else (place, b"")
        try:
            tokens = array("I", event.token_ids).tobytes()
        except OverflowError:
            return
        step, whole, added = size * TOKEN_BYTES, unit * TOKEN_BYTES, []
        keys = event.extra_keys
        for at, name in enumerate(event.block_hashes):
            pending += tokens[at * step : (at + 1) * step]
            if len(pending) < whole:
                places[_key(name)] = parent, pending
                continue
            pictures = _pictures(keys[at]) if keys and at < len(keys) and keys[at] else ()
            parent, pending = next_hash(parent, pending, pictures), b""
            places[_key(name)] = parent
            added.append(parent)
        self._index.add(self._holder, added)

    def _remove(self, event: BlockRemoved) -> None:
        if event.group_idx is not None and self._group is not None and event.group_idx != self._group:
            return
        places = self._media.get(event.medium or "GPU", {})
        gone = []
        for name in event.block_hashes:
            place = places.pop(_key(name), None)
            if isinstance(place, int) and (len(self._media) == 1 or self._find(name) is None):
                gone.append(place)
        self._index.discard(self._holder, gone)

    def _find(self, name: BlockHash) -> _Place | None:
        key = _key(name)
        for places in self._media.values():
            if (place := places.get(key)) is not None:
                return place
        return None

    def _follows(self, event: BlockStored) -> bool:
        """Tell whether the event is of the cache group that is followed; choose that group."""
        if event.group_idx is None or event.group_idx == self._group:
            return True
        partial = event.kv_cache_spec_kind in _PARTIAL_KINDS
        if self._group is None or (self._partial_group and not partial):
            if self._group is not None:
                self.clear()
            self._group, self._partial_group = event.group_idx, partial
            return True
        return False

    def _scope(self, event: BlockStored) -> CacheScope:
        first = (event.extra_keys or [None])[0] or []
        names = [key for key in first if isinstance(key, str)]
        lora = event.lora_name or ""
        if lora and lora in names:
            names.remove(lora)
        salt = event.cache_salt or (names[0] if names else "")
        self.salted = self.salted or bool(salt)
        return CacheScope(self._model, lora, salt)


def _key(name: BlockHash) -> int:
    """Return an engine's name for a block as a number of 60 bits."""
    return (name if isinstance(name, int) else int.from_bytes(name[-8:], "big")) & _NAME_MASK


def _pictures(keys: list[Any] | None) -> tuple[str, ...]:
    """Return the identities of the pictures that a block is a part of."""
    return tuple(
        key[0] for key in keys or () if isinstance(key, list) and len(key) > 1 and isinstance(key[0], str)
    )
