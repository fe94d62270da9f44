"""GGUF files that hold metadata and nothing else."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

Value = int | str | Sequence[int] | Sequence[str]


def tiny_gguf(values: Mapping[str, Value], version: int = 3) -> bytes:
    """The file as bytes. Whole numbers are written as 32 bits."""
    entries = b"".join(_string(key) + _typed(value) for key, value in values.items())
    return struct.pack("<4sIQQ", b"GGUF", version, 0, len(values)) + entries


def _typed(value: Value) -> bytes:
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    text = bool(value) and isinstance(value[0], str)
    head = struct.pack("<IIQ", 9, 8 if text else 4, len(value))
    return head + b"".join(_string(str(v)) if text else struct.pack("<I", int(v)) for v in value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
