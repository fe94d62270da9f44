"""Small GGUF models with made-up weights, one for each shape of state that llama.cpp keeps."""

from __future__ import annotations

import importlib.util
import random
import struct
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import cycle, islice
from math import prod
from pathlib import Path
from typing import Any

import pytest

from engines.small_model import small_model
from singletree.gguf import read_metadata
from tiny_gguf import string_value, tiny_gguf

WIDTH, HEADS, KV_HEADS, INNER, VOCABULARY, WINDOW = 64, 4, 2, 128, 256, 32
_HEAD = WIDTH // HEADS
_ALIGNMENT = 32
_PRIME = 10_007  # of the values that repeat, so that no two rows of a matrix are alike
_CONSTANTS = {"_norm.": 1.0, "ssm_a": -0.5}
_Tensors = Iterator[tuple[str, tuple[int, ...]]]

SHAPES = ("dense", "hybrid", "recurrent", "sliding")
"""Of state, those of the models with words that mean nothing ("worded" has the default model's vocabulary):
attention; attention and short convolutions; Mamba alone; attention over a window of 32 tokens, but in one layer."""


_FOLDER = tempfile.TemporaryDirectory(prefix="tiny-shapes-")


@cache
def tiny_model(shape: str, seed: int = 0) -> Path:
    """Return the model's file; skips the test where llama.cpp is not installed."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed")
    path = Path(_FOLDER.name) / (f"{shape}-{seed}.gguf" if seed else f"{shape}.gguf")
    if shape == "worded":
        write_model(path, "dense", _words(small_model()), {"context_length": 16_384}, seed)
    else:
        write_model(path, shape, _vocabulary(), {}, seed)
    return path


def write_model(
    path: Path, shape: str, vocabulary: Mapping[str, Any], more: Mapping[str, Any], seed: int = 0
) -> None:
    """Write a model of ``shape``. ``vocabulary`` is the metadata of its tokenizer; ``more`` replaces fields of the
    architecture.
    """
    architecture, fields, tensors = _MODELS[shape]
    numbers = random.Random(seed)
    values = [numbers.gauss(0, 0.2) for _ in range(_PRIME)]
    infos, data, count = b"", bytearray(), 0
    for name, dimensions in tensors(len(vocabulary["tokenizer.ggml.tokens"])):
        size = prod(dimensions)
        made_up = islice(cycle(values), count * 131, count * 131 + size)
        constant = _CONSTANTS.get(name.partition("_norm.")[1] or name.rpartition(".")[2])
        floats = array("f", made_up if constant is None else [constant] * size)
        infos += string_value(name)
        infos += struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *reversed(dimensions), 0, len(data))
        data += floats.tobytes() + bytes(-size * 4 % _ALIGNMENT)
        count += 1
    metadata = {"general.architecture": architecture, **vocabulary}
    metadata |= {f"{architecture}.{key}": value for key, value in (dict(fields) | dict(more)).items()}
    head = bytearray(tiny_gguf(metadata))
    struct.pack_into("<Q", head, 8, count)
    head += infos
    path.write_bytes(head + bytes(-len(head) % _ALIGNMENT) + data)


def _words(model: Path) -> Mapping[str, Any]:
    """The vocabulary and the chat template of a real model."""
    found = {name: value for name, value in read_metadata(model).items() if name.startswith("tokenizer.")}
    return {name: list(value) if isinstance(value, array) else value for name, value in found.items()}


def _vocabulary() -> Mapping[str, Any]:
    tokens = ["<eos>", *(f"w{at}" for at in range(VOCABULARY - 1))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, *[1] * (VOCABULARY - 1)],
        "tokenizer.ggml.merges": ["w 0"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


_ATTENTION = {
    "context_length": 2048,
    "embedding_length": WIDTH,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def _ends(size: int, norm: str = "output_norm") -> _Tensors:
    yield "token_embd.weight", (size, WIDTH)
    yield f"{norm}.weight", (WIDTH,)
    yield "output.weight", (size, WIDTH)


def _attention(block: str) -> _Tensors:
    yield f"{block}attn_norm.weight", (WIDTH,)
    yield f"{block}attn_q.weight", (WIDTH, WIDTH)
    yield f"{block}attn_k.weight", (KV_HEADS * _HEAD, WIDTH)
    yield f"{block}attn_v.weight", (KV_HEADS * _HEAD, WIDTH)
    yield f"{block}attn_output.weight", (WIDTH, WIDTH)


def _feed_forward(block: str) -> _Tensors:
    yield f"{block}ffn_norm.weight", (WIDTH,)
    yield f"{block}ffn_gate.weight", (INNER, WIDTH)
    yield f"{block}ffn_up.weight", (INNER, WIDTH)
    yield f"{block}ffn_down.weight", (WIDTH, INNER)


def _dense(size: int) -> _Tensors:
    yield from _ends(size)
    for block in ("blk.0.", "blk.1."):
        yield from _attention(block)
        yield from _feed_forward(block)


def _hybrid(size: int) -> _Tensors:
    yield from _ends(size, "token_embd_norm")
    for at in range(4):
        block = f"blk.{at}."
        if at % 2:
            yield from _attention(block)
            yield f"{block}attn_q_norm.weight", (_HEAD,)
            yield f"{block}attn_k_norm.weight", (_HEAD,)
        else:
            yield f"{block}attn_norm.weight", (WIDTH,)
            yield f"{block}shortconv.conv.weight", (WIDTH, 3)
            yield f"{block}shortconv.in_proj.weight", (3 * WIDTH, WIDTH)
            yield f"{block}shortconv.out_proj.weight", (WIDTH, WIDTH)
        yield from _feed_forward(block)


def _recurrent(size: int) -> _Tensors:
    inner, state, rank = 2 * WIDTH, 16, 4
    yield from _ends(size)
    for block in ("blk.0.", "blk.1."):
        yield f"{block}attn_norm.weight", (WIDTH,)
        yield f"{block}ssm_in.weight", (2 * inner, WIDTH)
        yield f"{block}ssm_conv1d.weight", (inner, 4)
        yield f"{block}ssm_conv1d.bias", (inner,)
        yield f"{block}ssm_x.weight", (rank + 2 * state, inner)
        yield f"{block}ssm_dt.weight", (inner, rank)
        yield f"{block}ssm_dt.bias", (inner,)
        yield f"{block}ssm_a", (inner, state)
        yield f"{block}ssm_d", (inner,)
        yield f"{block}ssm_out.weight", (WIDTH, inner)


def _sliding(size: int) -> _Tensors:
    yield from _ends(size)
    for at in range(6):
        block = f"blk.{at}."
        yield from _attention(block)
        yield f"{block}attn_q_norm.weight", (_HEAD,)
        yield f"{block}attn_k_norm.weight", (_HEAD,)
        yield f"{block}post_attention_norm.weight", (WIDTH,)
        yield from _feed_forward(block)
        yield f"{block}post_ffw_norm.weight", (WIDTH,)


_MODELS: Mapping[str, tuple[str, Mapping[str, Any], Any]] = {
    "dense": ("llama", {**_ATTENTION, "block_count": 2, "rope.dimension_count": _HEAD}, _dense),
    "hybrid": (
        "lfm2",
        {
            **_ATTENTION,
            "block_count": 4,
            "attention.head_count_kv": [0, KV_HEADS] * 2,
            "shortconv.l_cache": 3,
        },
        _hybrid,
    ),
    "recurrent": (
        "mamba",
        {
            "context_length": 2048,
            "embedding_length": WIDTH,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "block_count": 2,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 2 * WIDTH,
            "ssm.state_size": 16,
            "ssm.time_step_rank": 4,
            "attention.layer_norm_rms_epsilon": 1e-5,
        },
        _recurrent,
    ),
    "sliding": (
        "gemma3",
        {
            **_ATTENTION,
            "block_count": 6,
            "attention.key_length": _HEAD,
            "attention.value_length": _HEAD,
            "attention.sliding_window": WINDOW,
        },
        _sliding,
    ),
}
