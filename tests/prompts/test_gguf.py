"""A GGUF file's tokenizer: llama.cpp's own ids, and clear words for what cannot be read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from prompts.tiny_vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    ORDINARY,
    SPECIAL,
    UNKNOWN,
    byte_level,
    gguf_metadata,
    write_directory,
    write_gguf,
)
from singletree.errors import BadConfiguration
from singletree.prompts.tokenizer.tokenizer import load_tokenizer

GOLDEN = Path(__file__).parent / "golden"
MODELS = {"smollm2": "SmolLM2-135M-Instruct", "qwen2_5_coder": "Qwen2.5-Coder-1.5B-Instruct"}
TEXTS = (
    "".join(SPECIAL) + "".join(ORDINARY),
    "the quick brown fox's 12345 tokens\n\n  def f(x):\r\n\treturn 1",
    "日本語 한국어 👍🏽 e\u0301 \u00a0 \x00",
    " <|im_start|> <|im_start <think>x</think> ",
)


def _cached_model(name: str) -> Path:
    cache = Path(os.environ.get("SINGLETREE_CACHE") or Path.home() / ".cache" / "singletree")
    wanted = name.lower().replace("-", "").replace(".", "")
    for file in sorted([*cache.glob("*.gguf"), *cache.glob("models/*.gguf")]):
        if wanted in file.name.lower().replace("-", "").replace(".", ""):
            return file
    pytest.skip(f"{name} is not in the model cache; `singletree serve` fetches it")


@pytest.mark.parametrize("golden", MODELS)
def test_ids_are_those_of_llama_cpp(golden: str) -> None:
    tokenizer = load_tokenizer(_cached_model(MODELS[golden]))
    records = json.loads((GOLDEN / f"{golden}.json").read_text(encoding="utf-8"))
    assert len(records) > 30
    for text, ids in records:
        assert tokenizer.encode(text) == ids, text
        if "\x00" not in text:  # SmolLM2's vocabulary lacks some control bytes
            assert tokenizer.decode(ids) == text


def test_the_golden_ids_cover_special_tokens() -> None:
    for golden in MODELS:
        records = dict(json.loads((GOLDEN / f"{golden}.json").read_text(encoding="utf-8")))
        assert len(records["<|im_start|><|im_end|><|endoftext|>"]) == 3


def test_same_ids_as_the_directory_it_was_made_of(tmp_path: Path) -> None:
    directory = load_tokenizer(write_directory(tmp_path / "hf", byte_level()))
    file = load_tokenizer(write_gguf(tmp_path / "m.gguf", gguf_metadata(byte_level(), "qwen2")))
    for text in TEXTS:
        assert file.encode(text) == directory.encode(text)
        assert file.decode(file.encode(text)) == text
    assert file.special_tokens == directory.special_tokens
    assert file.added_tokens == directory.added_tokens
    assert file.eos_token == "<|im_end|>"
    assert file.stop_token_ids == {file.added_tokens["<|im_end|>"], file.added_tokens["<|endoftext|>"]}
    assert file.context_window == 4096
    assert file.chat_template == "{{ messages }}"
    assert file.vocabulary_size == directory.vocabulary_size


def test_digits_stand_apart_where_the_pre_tokenizer_says_so(tmp_path: Path) -> None:
    metadata = gguf_metadata(byte_level(), "smollm")
    metadata["tokenizer.ggml.tokens"] += ["12"]
    metadata["tokenizer.ggml.token_type"] += [NORMAL]
    metadata["tokenizer.ggml.merges"] += ["1 2"]
    apart = load_tokenizer(write_gguf(tmp_path / "s.gguf", metadata))
    together = load_tokenizer(write_gguf(tmp_path / "g.gguf", metadata | {"tokenizer.ggml.pre": "gpt-2"}))
    assert len(apart.encode("1212")) == 4
    assert len(together.encode("1212")) == 2


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scored = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "bc": -5.0, "ab": -6.0, "▁a": -7.0, "▁ab": -8.0}
    kinds = [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256), *([NORMAL] * len(scored))]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*pieces, *scored],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * len(pieces) + list(scored.values()),
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata))
    tokens = [*pieces, *scored]
    assert [tokens[id] for id in tokenizer.encode("abc")] == ["▁a", "bc"]
    assert [tokens[id] for id in tokenizer.encode("ab</s>ab é")] == [
        *("▁ab", "</s>", "▁ab", "▁"),
        *("<0xC3>", "<0xA9>"),
    ]
    assert tokenizer.decode(tokenizer.encode("ab</s>ab é")) == "ab</s>ab é"


def test_phi_3_eats_white_space_after_its_tokens(tmp_path: Path) -> None:
    metadata = gguf_metadata(byte_level(), "qwen2") | {"general.name": "Phi-3 mini"}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata))
    assert tokenizer.encode("<|im_end|> \n dog") == tokenizer.encode("<|im_end|>dog")
    assert tokenizer.encode("<|endoftext|> dog") != tokenizer.encode("<|endoftext|>dog")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer.ggml.pre": "brand-new"}, "pre-tokenizer 'brand-new' is not supported"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer kind 'bert' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, change: dict[str, str], says: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_metadata(byte_level(), "qwen2") | change)
    with pytest.raises(BadConfiguration, match=says):
        load_tokenizer(path)
