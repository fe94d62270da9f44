"""What an engine's prefix cache holds, by the engine's own KV events, whose gaps are noticed and repaired. No I/O.

A message of vLLM or SGLang has three frames: topic, sequence number (8 bytes, big-endian) and a batch in msgpack,
``[time, events, data-parallel rank]``. An event is a map with its type (vLLM 0.12 and SGLang 0.5.9 or newer), or in
older versions an array in the order of the fields:
https://docs.vllm.ai/en/latest/examples/online_serving/kv_events_subscriber.html
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from singletree.routing.block_chain import TOKEN_BYTES, CacheScope, next_hash, unit_of
from singletree.routing.predicted_cache import PrefixIndex

BlockHash: TypeAlias = int | bytes
"""An engine's name for a block: SHA-256 bytes, or 64 bits of a hash."""

END_OF_REPLAY = -1
"""The sequence number after the last repeated batch."""


class _Event(msgspec.Struct, tag=True, gc=False):
    pass


class BlockStored(_Event):
    """Blocks were computed: ``block_hashes`` one after another, the first behind ``parent_block_hash``.

    ``token_ids`` are those of all blocks. ``extra_keys`` has for each block what else its hash depends on: LoRA's name,
    pictures as (identity, offset), the salt. ``cache_salt`` is SGLang's; vLLM publishes it in the first extra key.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None


class BlockRemoved(_Event):
    """Blocks were evicted from one medium."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """The cache was emptied."""


class _PositionalStored(BlockStored, tag="BlockStored", array_like=True, gc=False):
    # Behind ``group_idx`` an array has other things than the map, which count for nothing.
    kv_cache_spec_kind: Any = None
    cache_salt: Any = None

    def __post_init__(self) -> None:
        self.kv_cache_spec_kind = self.cache_salt = None


class _PositionalRemoved(BlockRemoved, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _PositionalCleared(AllBlocksCleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
_PositionalEvent: TypeAlias = _PositionalStored | _PositionalRemoved | _PositionalCleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    time: float
    events: list[KvEvent]
    rank: int | None = None


class _PositionalBatch(msgspec.Struct, array_like=True, gc=False):
    time: float
    events: list[_PositionalEvent]
    rank: int | None = None


_DECODER = msgspec.msgpack.Decoder(_Batch)
_POSITIONAL = msgspec.msgpack.Decoder(_PositionalBatch)


def decode_batch(payload: bytes) -> list[KvEvent]:
    """Return the events of a batch.

    Raises:
        ValueError: it has neither form.
    """
    try:
        return _DECODER.decode(payload).events
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        first = error
    try:
        return [*_POSITIONAL.decode(payload).events]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise ValueError(f"not a batch of KV events: {first}") from None


def read_frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return the sequence number and the batch of a message, live or repeated.

    Raises:
        ValueError: it has another form.
    """
    if len(frames) < 3 or len(frames[-2]) != 8:
        raise ValueError(f"a message with frames of {[len(frame) for frame in frames]} bytes is no KV event")
    number = int.from_bytes(frames[-2], "big", signed=True)
    if number < END_OF_REPLAY:
        raise ValueError(f"a message has the number {number}; they are counted from 0")
    return number, frames[-1]


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
        return sum(map(len, self._media.values()))

    def apply(self, event: KvEvent) -> None:
        if isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, BlockRemoved):
            self._remove(event)
        elif isinstance(event, AllBlocksCleared):
            self.clear()

    def clear(self) -> None:
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
        step, whole = size * TOKEN_BYTES, unit * TOKEN_BYTES
        added: dict[int, int] = {}  # one place for each name, which may come twice
        keys = event.extra_keys
        # A name that comes again with other tokens leaves the place that it had.
        before = (places.get(_key(name)) for name in event.block_hashes)
        self._index.discard(self._holder, [place for place in before if isinstance(place, int)])
        for at, name in enumerate(event.block_hashes):
            key = _key(name)
            pending += tokens[at * step : (at + 1) * step]
            if len(pending) < whole:
                places[key] = parent, pending
                added.pop(key, None)
                continue
            pictures = _pictures(keys[at]) if keys and at < len(keys) and keys[at] else ()
            parent, pending = next_hash(parent, pending, pictures), b""
            places[key] = added[key] = parent
        self._index.add(self._holder, added.values())

    def _remove(self, event: BlockRemoved) -> None:
        if event.group_idx is not None and self._group is not None and event.group_idx != self._group:
            return
        places = self._media.get(event.medium or "GPU", {})
        gone = []
        for key in map(_key, event.block_hashes):
            place = places.pop(key, None)
            if isinstance(place, int) and all(each.get(key) != place for each in self._media.values()):
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
    return tuple(
        key[0] for key in keys or () if isinstance(key, list) and len(key) > 1 and isinstance(key[0], str)
    )


_LOG = logging.getLogger(__name__)

_MOST_WAITING = 100_000


class KvEventStream:
    """Feed the messages of a publisher into an ``EventCache``.

    A missing message is asked for again: while ``replay_from`` is set, ask the publisher for all messages from that
    number on and pass them to ``replayed``; live ones, still passed to ``feed``, wait. If the publisher cannot repeat
    a message, what the cache holds is unknown: it is emptied, and fills with the next events.

    Args:
        name: of the engine, for the log.

    Attributes:
        replay_from: the number of the first message to ask for; None if none is missing.
        losses: how often messages were lost for good.
    """

    def __init__(self, cache: EventCache, name: str = "", *, can_replay: bool = False) -> None:
        self._cache, self._name, self._can_replay = cache, name, can_replay
        self._waiting: deque[tuple[int, bytes]] = deque()
        self.losses = 0
        self.restart()

    @property
    def synced(self) -> bool:
        """Whether the cache is known completely: every event since it was empty has come."""
        return self._complete and self._seen

    def restart(self) -> None:
        """Begin again: the engine was restarted, its cache is empty and its messages are counted from 0."""
        self._cache.clear()
        self._waiting.clear()
        self._next = 0
        self._complete, self._seen = True, False
        self.replay_from: int | None = 0 if self._can_replay else None

    def feed(self, frames: Sequence[bytes]) -> None:
        try:
            number, payload = read_frames(frames)
            if number == END_OF_REPLAY:
                raise ValueError("a live message is marked as the end of a repetition")
        except ValueError as error:
            _LOG.warning("KV events of %s: %s", self._name, error)
            return
        if self.replay_from is not None:
            self._waiting.append((number, payload))
            if len(self._waiting) > _MOST_WAITING:
                self.replay_failed()
            return
        if number < self._next:
            self.restart()
            self.feed(frames)
        elif number > self._next and self._can_replay:
            self.replay_from = self._next
            self._waiting.append((number, payload))
        else:
            self._apply(number, payload)

    def replayed(self, frames: Sequence[bytes]) -> bool:
        """Take a repeated message; return whether it was the last one."""
        try:
            number, payload = read_frames(frames)
        except ValueError:
            return False
        if number == END_OF_REPLAY:
            self._seen = True
            self._go_on()
            return True
        if number >= self._next:
            self._apply(number, payload)
        return False

    def replay_failed(self) -> None:
        """Note that the publisher does not answer: go on without what is missing."""
        self._go_on()

    def _go_on(self) -> None:
        self.replay_from = None
        waiting, self._waiting = self._waiting, deque()
        last = -1
        for number, payload in waiting:
            if number <= last:
                self.restart()
                self.replay_from = None
            if number >= self._next:  # the others came with the replay
                self._apply(number, payload)
            last = number

    def _apply(self, number: int, payload: bytes) -> None:
        if number > self._next:
            self.losses += self._seen
            self._complete = False
            self._cache.clear()
        self._next, self._seen = number + 1, True
        try:
            events = decode_batch(payload)
        except ValueError as error:
            _LOG.warning("KV events of %s: message %d: %s", self._name, number, error)
            self._complete = False
            self._cache.clear()
            return
        for event in events:
            self._cache.apply(event)
            self._complete = self._complete or isinstance(event, AllBlocksCleared)
