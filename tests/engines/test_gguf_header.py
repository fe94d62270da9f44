"""What is read of a GGUF file before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from singletree.gguf import read_header
from tiny_gguf import tiny_gguf

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.block_count": 30,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "tokenizer.ggml.tokens": [f"token {i}" for i in range(5000)],
    "tokenizer.ggml.token_type": list(range(5000)),
    "after.the.arrays": 1,
}


def write(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def test_window_and_cost(tmp_path: Path) -> None:
    header = read_header(write(tmp_path, tiny_gguf(LLAMA)))
    assert (header.name, header.context_window) == ("Tiny", 8192)
    assert header.kv_bytes_per_token == 30 * 3 * (64 + 64) * 2


def test_heads_of_another_size_and_layers_of_their_own(tmp_path: Path) -> None:
    own = {"llama.attention.key_length": 128, "llama.attention.value_length": 96}
    header = read_header(write(tmp_path, tiny_gguf({**LLAMA, **own})))
    assert header.kv_bytes_per_token == 30 * 3 * (128 + 96) * 2
    layers: dict[str, Any] = {**LLAMA, "llama.attention.head_count_kv": [2, 0, 1]}
    assert read_header(write(tmp_path, tiny_gguf(layers))).kv_bytes_per_token == 3 * 128 * 2


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    header = read_header(write(tmp_path, tiny_gguf({"general.architecture": "mamba"})))
    assert (header.context_window, header.kv_bytes_per_token) == (None, None)
