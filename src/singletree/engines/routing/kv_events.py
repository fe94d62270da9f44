"""The KV events of vLLM and SGLang, decoded: which blocks an engine's cache got and lost.

A message has three frames: topic, sequence number (8 bytes, big-endian) and a batch in msgpack, ``[time, events,
data-parallel rank]``. An event is a map with its type (vLLM 0.12 and SGLang 0.5.9 or newer), or in older versions an
array in the order of the fields: https://docs.vllm.ai/en/latest/examples/online_serving/kv_events_subscriber.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

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


class _PositionalStored(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class _PositionalRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _PositionalCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
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
    except msgspec.DecodeError as error:
        first = error
    try:
        return [_named(event) for event in _POSITIONAL.decode(payload).events]
    except msgspec.DecodeError:
        raise ValueError(f"not a batch of KV events: {first}") from None


def _named(event: _PositionalEvent) -> KvEvent:
    if isinstance(event, _PositionalStored):
        return BlockStored(**msgspec.structs.asdict(event))
    if isinstance(event, _PositionalRemoved):
        return BlockRemoved(**msgspec.structs.asdict(event))
    return AllBlocksCleared()


def read_frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return the sequence number and the batch of a message, live or repeated.

    Raises:
        ValueError: it has another form.
    """
    if len(frames) < 3 or len(frames[-2]) != 8:
        raise ValueError(f"a message with frames of {[len(frame) for frame in frames]} bytes is no KV event")
    return int.from_bytes(frames[-2], "big", signed=True), frames[-1]
