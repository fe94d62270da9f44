"""A checkpoint of two layers with eyes, without weights: engines make them up with ``--load-format dummy``.

What is tested with it are places, keys, caches and counts of pictures. Each byte of text is a token, and a picture of
28 x 28 pixels is one: the smallest that it sees has four.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from server.picture_model import TEMPLATE

MODEL = "tiny-vlm"
WINDOW = 8192
LOAD = ("--load-format", "dummy")
_ADDED = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<|video_pad|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"),
    "</tool_response>",
)
IDS = {text: 256 + index for index, text in enumerate(_ADDED)}
PAD, BEFORE, BEHIND = IDS["<|image_pad|>"], IDS["<|vision_start|>"], IDS["<|vision_end|>"]

_TEXT: dict[str, Any] = {
    "model_type": "qwen2_vl_text",
    "bos_token_id": IDS["<|endoftext|>"],
    "eos_token_id": IDS["<|im_end|>"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW,
    "rope_parameters": {
        "mrope_section": [4, 6, 6],
        "rope_theta": 1000000.0,
        "rope_type": "default",
        "type": "mrope",
    },
    "tie_word_embeddings": True,
    "vocab_size": 256 + len(_ADDED),
}
_VISION: dict[str, Any] = {
    "model_type": "qwen2_vl_vision",
    "depth": 2,
    "embed_dim": 64,
    "hidden_size": 128,
    "num_heads": 4,
    "mlp_ratio": 2,
    "in_channels": 3,
    "in_chans": 3,  # the name that SGLang reads
    "patch_size": 14,
    "spatial_patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "dtype": "bfloat16",
    "image_token_id": PAD,
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": BEFORE,
    "vision_end_token_id": BEHIND,
    "tie_word_embeddings": True,
    "text_config": _TEXT,
    "vision_config": _VISION,
}
_PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 1280 * 28 * 28,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def picture_length(width: int, height: int) -> int:
    """How many tokens a picture takes whose sides are multiples of 28."""
    return width * height // 28**2


def write_tiny_vlm(folder: Path) -> Path:
    """Write the checkpoint into ``folder``, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Any] = {
        "config.json": _CONFIG,
        "preprocessor_config.json": _PREPROCESSOR,
        "generation_config.json": {"eos_token_id": [IDS["<|im_end|>"]], "bos_token_id": IDS["<|endoftext|>"]},
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": WINDOW,
            "chat_template": TEMPLATE,
        },
    }
    for name, value in parts.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({character: id for id, character in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    added = [tokenizers.AddedToken(text, special=text.startswith("<|"), normalized=False) for text in _ADDED]
    tokenizer.add_tokens(added)
    assert [tokenizer.token_to_id(text) for text in _ADDED] == list(IDS.values())
    return tokenizer
