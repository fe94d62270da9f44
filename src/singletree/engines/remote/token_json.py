"""Writes token ids as JSON. The prompt of a turn begins with that of the turn before, so most of its text is known."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from singletree.lru import LruCache

_BLOCKS = (8192, 1024)
"""The lengths of blocks, in tokens: few long ones are looked up, and what is behind the last short one is short."""

_ID_BYTES = 4

_texts: LruCache[bytes, bytes] = LruCache(32 * 2**20)
"""The ids of a block -> their JSON, without brackets. What a block is written as depends on nothing else.

A megabyte has the text of a hundred thousand tokens. The limit is that of ``Config.request_memory`` by default, as far
as it is for prompts.
"""


def limit_texts(size: int) -> None:
    """Set how many bytes the texts may take that are kept for later prompts."""
    _texts.resize(size)


def encode_token_ids(token_ids: Sequence[int]) -> msgspec.Raw:
    """Return the JSON list of ``token_ids``.

    To make a number of each id takes most of the time, and a look-up of a block of them a twentieth of it.
    """
    if not isinstance(token_ids, array) or token_ids.typecode != "I" or token_ids.itemsize != _ID_BYTES:
        return msgspec.Raw(msgspec.json.encode(list(token_ids)))
    pieces = []
    at = 0
    for length in _BLOCKS:
        while len(token_ids) - at >= length:
            pieces.append(_block_text(token_ids[at : at + length]))
            at += length
    if at < len(token_ids):
        pieces.append(_text(token_ids[at:]))
    return msgspec.Raw(b"[%b]" % b",".join(pieces))


def _block_text(block: array[int]) -> bytes:
    key = block.tobytes()
    text = _texts.get(key)
    if text is None:
        text = _text(block)
        _texts.put(key, text, len(key) + len(text))
    return text


def _text(token_ids: array[int]) -> bytes:
    return msgspec.json.encode(token_ids.tolist())[1:-1]
