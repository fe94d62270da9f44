"""Reads the metadata at the head of a GGUF file: the window of a model, and the cost of a token.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The weights behind it are not read.
The ``gguf`` package reads the same, but it needs numpy, requests and PyYAML (80 MB), and takes 8 s for a file with
49,000 tokens, where this module takes 0.1 s.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from singletree.errors import WeightsUnavailable

_STARTS = (b"GGUF\2\0\0\0", b"GGUF\3\0\0\0")
_HEAD = struct.Struct("<4sIQQ")
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


def read_metadata(path: Path, *, longest_array: int | None = None) -> dict[str, Any]:
    """Read the key-value pairs of a GGUF file. An array of numbers is an ``array``, one of strings a list.

    Arrays of more than ``longest_array`` items, such as vocabularies, are skipped; None reads them all.

    Raises:
        WeightsUnavailable: the file cannot be read, is damaged or incomplete, or is not a GGUF file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path.name, longest_array).read()
    except OSError as error:
        raise WeightsUnavailable(f"{path.name} cannot be read: {error.strerror}; check the path") from error
    except (ValueError, struct.error) as error:
        why = f"{path.name} is damaged or incomplete ({error}); download it again"
        raise WeightsUnavailable(why) from error


def trained_context(metadata: Mapping[str, Any]) -> int | None:
    """Return the context length in tokens that the model was trained for; None when the file does not have it."""
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return length if isinstance(length, int) and length > 0 else None


class _Reader:
    def __init__(self, data: mmap.mmap, name: str, longest_array: int | None) -> None:
        self._data = data
        self._name = name
        self._longest_array = len(data) if longest_array is None else longest_array
        self._position = _HEAD.size

    def read(self) -> dict[str, Any]:
        if self._data[:8] not in _STARTS:
            raise WeightsUnavailable(
                f"{self._name} is not a GGUF file of version 2 or 3 (it begins with {self._data[:8]!r}); give such a "
                "file, or the name of a model"
            )
        _, _, _, count = _HEAD.unpack_from(self._data)
        pairs = ((self._string(), self._value(self._number("<I"))) for _ in range(count))
        return {key: value for key, value in pairs if value is not None}

    def _number(self, format: str) -> Any:
        value = struct.unpack_from(format, self._data, self._position)[0]
        self._position += struct.calcsize(format)
        return value

    def _skip(self, size: int) -> int:
        begin, end = self._position, self._position + size
        if end > len(self._data):
            raise ValueError("a value reaches past the end of the file")
        self._position = end
        return begin

    def _take(self, size: int) -> bytes:
        begin = self._skip(size)
        return self._data[begin : self._position]

    def _string(self) -> str:
        return self._take(self._number("<Q")).decode()

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"value type {kind} is unknown")
        element, count = self._number("<I"), self._number("<Q")
        keeps = count <= self._longest_array
        if element == _STRING:
            return self._strings(count, keeps=keeps)
        if element not in _SCALARS:
            raise ValueError(f"arrays of value type {element} are unknown")
        return self._numbers(_SCALARS[element], count, keeps=keeps)

    def _numbers(self, format: str, count: int, *, keeps: bool) -> array[Any] | None:
        size = struct.calcsize(format) * count
        if not keeps:
            self._skip(size)
            return None
        code = format[1]
        return array("B" if code == "?" else code, self._take(size))

    def _strings(self, count: int, *, keeps: bool) -> list[str] | None:
        """Read ``count`` strings, in one loop without a call for each: a vocabulary has hundreds of thousands."""
        data, position, end = self._data, self._position, len(self._data)
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            begin = position + 8
            position = begin + unpack(data, position)[0]
            if position > end:
                raise ValueError("a value reaches past the end of the file")
            if keeps:
                strings.append(data[begin:position].decode("utf-8", "replace"))
        self._position = position
        return strings if keeps else None


_LONGEST_ARRAY = 1 << 12
"""Number of items. Vocabularies are longer; lists with one item for each layer are shorter."""

_HALF_BYTES = 2  # of one number in the KV cache (f16)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata of one file.

    Attributes:
        architecture: ``llama``, ``qwen2`` …
        name: ``general.name``, empty when the file has none.
        context_window: the length the model was trained for, in tokens; None when the file does not have it.
        kv_bytes_per_token: size of one token in an f16 KV cache, in bytes; None when the sizes are missing.
    """

    name: str
    context_window: int | None
    kv_bytes_per_token: int | None


def read_header(path: Path) -> GgufHeader:
    """Read the header of the GGUF file at ``path``.

    Raises WeightsUnavailable when the file cannot be read, is damaged or incomplete, or is not a GGUF file.
    """
    values = read_metadata(path, longest_array=_LONGEST_ARRAY)
    architecture = str(values.get("general.architecture", ""))
    return GgufHeader(
        str(values.get("general.name", "")),
        trained_context(values),
        _kv_bytes(values, architecture),
    )


def _kv_bytes(values: Mapping[str, Any], architecture: str) -> int | None:
    def of(key: str) -> Sequence[int]:
        """Return one number for all layers, or one for each layer; an empty list if the key is missing."""
        value = values.get(f"{architecture}.{key}")
        numbers: Sequence[Any] = value if isinstance(value, array) else [value]
        return numbers if all(type(number) is int for number in numbers) else []

    layers, embedding, heads = of("block_count"), of("embedding_length"), of("attention.head_count")
    kv_heads = of("attention.head_count_kv") or heads
    if not layers or not kv_heads:
        return None
    all_heads = sum(kv_heads) if len(kv_heads) > 1 else kv_heads[0] * layers[0]
    size = embedding[0] // max(heads) if embedding and heads and max(heads) > 0 else 0
    key, value = of("attention.key_length") or [size], of("attention.value_length") or [size]
    return (all_heads * (max(key) + max(value)) * _HALF_BYTES) or None
