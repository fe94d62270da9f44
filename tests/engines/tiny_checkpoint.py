"""A checkpoint with two small layers, for `--load-format dummy`: made-up weights, a real tokenizer and chat template.

A prompt of a harness has tens of thousands of tokens. Through two layers they go in seconds on one core.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

WINDOW = 65_536

_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dtype": "bfloat16",
    "vocab_size": 151_936,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 151_645,
    "pad_token_id": 151_643,
}
_GENERATION = {"eos_token_id": [151_645, 151_643], "pad_token_id": 151_643}


def make_tiny_checkpoint(folder: Path, tokenizer: Path) -> Path:
    """Write the checkpoint into ``folder``, with the files of ``tokenizer``, a folder of Qwen's, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(_GENERATION), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return folder
