"""Prompts as JSON, whose text is mostly known from earlier prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from singletree.lru import LruCache, find_bytes

_BLOCKS = (8192, 1024)
"""The lengths of blocks, in tokens: few long ones are looked up, and what is behind the last short one is short."""

_ID_BYTES = 4

_token_texts: LruCache[tuple[Any, ...], tuple[bytes, bytes]] = LruCache(32 * 2**20)
"""The key of a block -> its ids, and their JSON without brackets, which depends on nothing else.

A megabyte has the text of a hundred thousand tokens. The limit is that of ``Config.request_memory`` by default, as far
as it is for prompts."""


def limit_texts(size: int) -> None:
    """Set how many bytes the texts may take that are kept for later prompts."""
    _token_texts.resize(size)


def encode_token_ids(token_ids: Sequence[int]) -> msgspec.Raw:
    """Return the JSON list of ``token_ids``.

    To make a number of each id takes most of the time, and a look-up of a block of them little of it.
    """
    if not isinstance(token_ids, array) or token_ids.typecode != "I" or token_ids.itemsize != _ID_BYTES:
        return msgspec.Raw(msgspec.json.encode(list(token_ids)))
    whole = token_ids.tobytes()
    pieces, at = [b"["], 0
    for length in _BLOCKS:
        size = length * _ID_BYTES
        while len(whole) - at >= size:
            pieces += (_block_text(whole[at : at + size]), b",")
            at += size
    if at < len(whole):
        pieces += (_text(whole[at:]), b",")
    pieces[max(1, len(pieces) - 1) :] = (b"]",)
    return msgspec.Raw(b"".join(pieces))


def _block_text(block: bytes) -> bytes:
    key, known = find_bytes(_token_texts, "block", block)
    if known is None:
        known = block, _text(block)
        _token_texts.put(key, known, len(block) + len(known[1]))
    return known[1]


def _text(token_ids: bytes) -> bytes:
    return msgspec.json.encode(memoryview(token_ids).cast("I").tolist())[1:-1]
