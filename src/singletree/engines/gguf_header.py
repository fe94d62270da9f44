"""What an engine must know of a GGUF file before it loads it: how long its window is, and what a token costs.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Vocabularies are skipped, so that this takes
milliseconds; the tokenizer is read in ``prompts``, which engines may not import.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from singletree.errors import WeightsUnavailable

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MOST_KEYS = 1 << 16
_LONGEST_KEPT = 1 << 12  # items of an array that are read rather than skipped; lists of layers are shorter
_LONGEST_STRING = 1 << 24  # bytes; chat templates are the longest
_HALF_BYTES = 2  # of one number in the KV cache (f16)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata of one file.

    Attributes:
        architecture: ``llama``, ``qwen2`` …
        name: ``general.name``, empty when the file has none.
        context_window: the length the model was trained for, in tokens; None when the file does not say.
        kv_bytes_per_token: what one token takes in an f16 KV cache, in bytes; None when it cannot be told.
    """

    architecture: str
    name: str
    context_window: int | None
    kv_bytes_per_token: int | None


def read_header(path: Path) -> GgufHeader:
    """The header of the GGUF file at ``path``.

    Raises WeightsUnavailable when the file cannot be read, is cut short, or is no GGUF file.
    """
    try:
        with path.open("rb") as file:
            values = _read_values(file, path)
    except OSError as error:
        raise WeightsUnavailable(f"{path} cannot be read: {error.strerror}; check the path") from error
    except (struct.error, ValueError, OverflowError) as error:
        raise WeightsUnavailable(f"{path} is damaged or cut short ({error}); fetch it again") from error
    architecture = str(values.get("general.architecture", ""))
    window = values.get(f"{architecture}.context_length")
    return GgufHeader(
        architecture,
        str(values.get("general.name", "")),
        window if isinstance(window, int) and window > 0 else None,
        _kv_bytes(values, architecture),
    )


def _kv_bytes(values: Mapping[str, Any], architecture: str) -> int | None:
    def of(key: str) -> list[int]:
        """One number for all layers, or one for each; none if it is not there."""
        value = values.get(f"{architecture}.{key}")
        numbers: list[Any] = value if isinstance(value, list) else [value]
        return numbers if all(type(number) is int for number in numbers) else []

    layers, embedding, heads = of("block_count"), of("embedding_length"), of("attention.head_count")
    kv_heads = of("attention.head_count_kv") or heads
    if not layers or not kv_heads:
        return None
    in_all = sum(kv_heads) if len(kv_heads) > 1 else kv_heads[0] * layers[0]
    size = embedding[0] // max(heads) if embedding and heads and max(heads) > 0 else 0
    key, value = of("attention.key_length") or [size], of("attention.value_length") or [size]
    return (in_all * (max(key) + max(value)) * _HALF_BYTES) or None


def _read_values(file: BinaryIO, path: Path) -> dict[str, Any]:
    magic, version, _, count = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF" or version not in (2, 3):
        raise WeightsUnavailable(f"{path} is no GGUF file (version 2 or 3); give one, or a model's name")
    if count > _MOST_KEYS:
        raise ValueError(f"{count} metadata keys")
    values = {}
    for _ in range(count):
        key = _string(file)
        values[key] = _value(file, _number(file, "<I"))
    return values


def _number(file: BinaryIO, layout: str) -> Any:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]


def _string(file: BinaryIO) -> str:
    length = _number(file, "<Q")
    if length > _LONGEST_STRING:
        raise ValueError(f"a string of {length} bytes")
    data = file.read(length)
    if len(data) < length:
        raise ValueError("it ends inside a string")
    return data.decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind in _SCALARS:
        return _number(file, _SCALARS[kind])
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        raise ValueError(f"value type {kind} is unknown")
    element, count = _number(file, "<I"), _number(file, "<Q")
    if element == _ARRAY:
        raise ValueError("an array of arrays")
    if count <= _LONGEST_KEPT:
        return [_value(file, element) for _ in range(count)]
    if element == _STRING:
        for _ in range(count):
            file.seek(_number(file, "<Q"), 1)
    elif element in _SCALARS:
        file.seek(count * struct.calcsize(_SCALARS[element]), 1)
    else:
        raise ValueError(f"an array of {count} values of type {element}")
    return None
