"""Small tokenizers made on the spot: byte-level and SentencePiece-like, as a directory and as a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tiny_gguf import tiny_gguf

CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the dog sleeps in the sun",
    "def render(self, text: str) -> str:\n    return text.strip()\n",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
    "der schnelle Fuchs läuft über die Straße; 2026-11-21 and 12345",
    "日本語 한국어 中文 emoji 👍🏽 café naïve",
) * 3

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ORDINARY = ("<think>", "</think>", "<tool_call>", "</tool_call>")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@cache
def byte_level() -> tokenizers.Tokenizer:
    """A byte-level tokenizer in Qwen's manner: special turn markers, ordinary tool and thinking markers."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(QWEN_PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_added(tokenizer)


@cache
def sentencepiece(scheme: str) -> tokenizers.Tokenizer:
    """A tokenizer with ``▁`` for a space and bytes to fall back on.

    ``scheme``: ``always`` prepends a space to every segment (Llama 2), ``first`` to the text's first
    (Mistral), ``never`` to none (Gemma).
    """
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *pieces], show_progress=False, limit_alphabet=60
    )
    trained.train_from_iterator(CORPUS, trainer)
    definition = json.loads(trained.to_str())
    definition["added_tokens"] = []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    if scheme == "first":
        definition["normalizer"] = None
        definition["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "first",
            "split": False,
        }
    else:
        stages = [prepend, replace] if scheme == "always" else [replace]
        definition["normalizer"] = {"type": "Sequence", "normalizers": stages}
        definition["pre_tokenizer"] = None
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(definition))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _with_added(tokenizer)


def _with_added(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in ORDINARY])
    return tokenizer


def write_directory(folder: Path, tokenizer: tokenizers.Tokenizer, **files: Any) -> Path:
    """A checkpoint's directory; ``files`` are JSON files by their stem."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_gguf(path: Path, metadata: Mapping[str, Any]) -> Path:
    """A GGUF file without tensors. Lists hold strings, integers or floats."""
    path.write_bytes(tiny_gguf(metadata))
    return path


def gguf_metadata(tokenizer: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """What a converter would write for a byte-level tokenizer."""
    definition = json.loads(tokenizer.to_str())
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    tokens = [tokenizer.id_to_token(id) or "" for id in range(size)]
    kinds = dict.fromkeys(SPECIAL, CONTROL) | dict.fromkeys(ORDINARY, USER_DEFINED)
    return {
        "general.architecture": "qwen2",
        "qwen2.context_length": 4096,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in definition["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
