"""The smallest real model: the default one, fetched when it is not in the cache."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from singletree.engines.checkpoint import DEFAULT_MODEL
from singletree.errors import WeightsUnavailable
from singletree.model_files.resolve import resolve

# <|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n, as SmolLM2's tokenizer spells it.
_BEFORE, _AFTER = (1, 4093, 198), (2, 198, 1, 520, 9531, 198)
FRANCE = (*_BEFORE, 1780, 314, 260, 3575, 282, 4649, 47, *_AFTER)
"""What is the capital of France?"""
ITALY = (*_BEFORE, 1780, 314, 260, 3575, 282, 7158, 47, *_AFTER)
"""What is the capital of Italy?"""
JAPAN = (*_BEFORE, 1780, 314, 260, 3575, 282, 3085, 47, *_AFTER)
"""What is the capital of Japan?"""
END_TOKENS = (0, 2)


def small_model() -> Path:
    """Its GGUF file; skips the test where it cannot be had."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed")
    try:
        return resolve(DEFAULT_MODEL, gguf=True).path
    except WeightsUnavailable as error:
        pytest.skip(str(error))
