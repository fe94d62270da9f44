"""Reads what the files of a model say of it: the window, and the cost of a token."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from singletree.gguf import read_metadata, trained_context

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

    architecture: str
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
        architecture,
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


def window_of(path: Path) -> int | None:
    """Return the context window of the model, None if unknown. Raises WeightsUnavailable for a bad GGUF file."""
    if path.is_file():
        return read_header(path).context_window
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    nested = config.get("text_config")  # of multimodal models
    for each in (config, nested if isinstance(nested, dict) else {}):
        window = each.get("max_position_embeddings")
        if isinstance(window, int) and window > 0:
            return window
    return None
