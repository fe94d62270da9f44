"""GGUF files that hold metadata and nothing else."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

_KINDS: dict[type, tuple[int, str]] = {int: (5, "i"), float: (6, "f"), bool: (7, "?"), str: (8, "")}


def tiny_gguf(values: Mapping[str, Any], version: int = 3) -> bytes:
    """The file as bytes. Values are texts, truth values, numbers (of 32 bits) and lists of one of these."""
    entries = b"".join(string_value(key) + _typed(value) for key, value in values.items())
    return struct.pack("<4sIQQ", b"GGUF", version, 0, len(values)) + entries


def _typed(value: Any) -> bytes:
    if isinstance(value, list):
        kind = _KINDS[type(value[0])][0]
        return struct.pack("<IIQ", 9, kind, len(value)) + _packed(value)
    if type(value) is int and value >= 0:
        return struct.pack("<II", 4, value)  # llama.cpp reads sizes without a sign only
    return struct.pack("<I", _KINDS[type(value)][0]) + _packed([value])


def _packed(values: Sequence[Any]) -> bytes:
    if isinstance(values[0], str):
        return b"".join(map(string_value, values))
    return struct.pack(f"<{len(values)}{_KINDS[type(values[0])][1]}", *values)


def string_value(text: str) -> bytes:
    """Return a string as GGUF writes it."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
