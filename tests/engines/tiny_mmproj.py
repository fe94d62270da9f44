"""A vision projector of 2 MB with made-up weights, for the smallest real model: its pictures take 16 tokens each."""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Iterator
from itertools import cycle, islice
from math import prod
from pathlib import Path
from typing import Any

from tiny_gguf import string_value

TOKENS = 16
"""How many tokens a picture takes: (64 / 16) ** 2 patches."""

_WIDTH, _INNER, _HEADS, _BLOCKS, _PATCH, _SIDE = 64, 128, 2, 2, 16, 64
_ALIGNMENT = 32
_SPREAD = 0.05
_PRIME = 1021  # of the values that repeat, so that no two rows of a matrix are alike


def write_mmproj(path: Path, embedding: int = 576) -> Path:
    """Write it for a model whose embeddings have the length ``embedding``, and return ``path``."""
    numbers = random.Random(0)
    values = [numbers.gauss(0, _SPREAD) for _ in range(_PRIME)]
    infos, data = b"", bytearray()
    tensors = list(_tensors(embedding))
    for name, shape, constant in tensors:
        size = prod(shape)
        floats = array("f", [constant] * size if constant is not None else islice(cycle(values), size))
        infos += string_value(name) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 0, len(data)
        )
        data += floats.tobytes() + bytes(-size * 4 % _ALIGNMENT)
    fields = list(_fields(embedding))
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields))
    head += b"".join(string_value(name) + value for name, value in fields) + infos
    path.write_bytes(head + bytes(-len(head) % _ALIGNMENT) + data)
    return path


def _fields(embedding: int) -> Iterator[tuple[str, bytes]]:
    def number(value: int) -> bytes:
        return struct.pack("<II", 4, value)

    def text(value: str) -> bytes:
        return struct.pack("<I", 8) + string_value(value)

    def floats(*found: float) -> bytes:
        return struct.pack(f"<IIQ{len(found)}f", 9, 6, len(found), *found)

    yield "general.architecture", text("clip")
    yield "general.file_type", number(0)
    yield "clip.has_vision_encoder", struct.pack("<IB", 7, 1)
    yield "clip.use_gelu", struct.pack("<IB", 7, 1)
    yield "clip.projector_type", text("mlp")
    numbers: dict[str, int] = {
        "image_size": _SIDE,
        "patch_size": _PATCH,
        "embedding_length": _WIDTH,
        "feed_forward_length": _INNER,
        "projection_dim": embedding,
        "attention.head_count": _HEADS,
        "block_count": _BLOCKS,
    }
    for name, value in numbers.items():
        yield f"clip.vision.{name}", number(value)
    yield "clip.vision.attention.layer_norm_epsilon", struct.pack("<If", 6, 1e-5)
    yield "clip.vision.image_mean", floats(0.5, 0.5, 0.5)
    yield "clip.vision.image_std", floats(0.5, 0.5, 0.5)


def _tensors(embedding: int) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Yield (name, shape, the one value of all its numbers, or None for made-up ones)."""
    yield "v.patch_embd.weight", (_WIDTH, 3, _PATCH, _PATCH), None
    yield "v.class_embd", (_WIDTH,), None
    yield "v.position_embd.weight", ((_SIDE // _PATCH) ** 2 + 1, _WIDTH), None
    yield "v.pre_ln.weight", (_WIDTH,), 1.0
    yield "v.pre_ln.bias", (_WIDTH,), 0.0
    for block in range(_BLOCKS):
        name = f"v.blk.{block}."
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield f"{name}{part}.weight", (_WIDTH, _WIDTH), None
            yield f"{name}{part}.bias", (_WIDTH,), 0.0
        for part in ("ln1", "ln2"):
            yield f"{name}{part}.weight", (_WIDTH,), 1.0
            yield f"{name}{part}.bias", (_WIDTH,), 0.0
        yield f"{name}ffn_up.weight", (_INNER, _WIDTH), None
        yield f"{name}ffn_up.bias", (_INNER,), 0.0
        yield f"{name}ffn_down.weight", (_WIDTH, _INNER), None
        yield f"{name}ffn_down.bias", (_WIDTH,), 0.0
    yield "mm.0.weight", (embedding, _WIDTH), None
    yield "mm.0.bias", (embedding,), 0.0
    yield "mm.2.weight", (embedding, embedding), None
    yield "mm.2.bias", (embedding,), 0.0
