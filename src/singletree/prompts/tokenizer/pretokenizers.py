"""The patterns by which llama.cpp cuts text into words before byte pairs are merged, by name (``tokenizer.ggml.pre``).

The patterns are those of the models' own ``tokenizer.json``; the names are assigned in llama.cpp's
``src/llama-vocab.cpp`` (https://github.com/ggml-org/llama.cpp). Several patterns are applied one after the other,
each to the words that the one before made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A way to cut text into words.

    Attributes:
        patterns: regular expressions (Oniguruma); the matches and the gaps between them are the words.
        whole_words_first: whether a word in the vocabulary becomes that token, whatever the merges are.
        spaces_marked: whether the vocabulary has SentencePiece's form (``▁`` for a space), not the byte alphabet.
    """

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    spaces_marked: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_CJK = r"[一-龥\u3040-ゟ゠-ヿ]+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_UPPER = r"(?:(?=\p{L})[^a-z])"
_LOWER = r"(?:(?=\p{L})[^A-Z])"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_LINES = r"[^\n]+|[\n]+"

_SEED = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)

_DIGITS_APART = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_PLAIN_LLAMA3 = PreTokenizer((_LLAMA3,), whole_words_first=True)
_PLAIN_QWEN2 = PreTokenizer((_QWEN2,))
_PLAIN_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))
_PLAIN_GPT4O = PreTokenizer((_GPT4O,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "command-r": _DIGITS_APART,
    "codeshell": _DIGITS_APART,
    "exaone": _DIGITS_APART,
    "minerva-7b": _DIGITS_APART,
    "gpt-2": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "mpt": _PLAIN_GPT2,
    "olmo": _PLAIN_GPT2,
    "gigachat": _PLAIN_GPT2,
    "exaone4": _PLAIN_GPT2,
    "mellum": _PLAIN_GPT2,
    "llama3": _PLAIN_LLAMA3,
    "llama-v3": _PLAIN_LLAMA3,
    "llama-bpe": _PLAIN_LLAMA3,
    "falcon3": _PLAIN_LLAMA3,
    "falcon-h1": _PLAIN_LLAMA3,
    "pixtral": _PLAIN_LLAMA3,
    "lfm2": _PLAIN_LLAMA3,
    "glm4": _PLAIN_LLAMA3,
    "glm5": _PLAIN_LLAMA3,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": _PLAIN_QWEN2,
    "deepseek-r1-qwen": _PLAIN_QWEN2,
    "stablelm2": _PLAIN_QWEN2,
    "hunyuan": _PLAIN_QWEN2,
    "solar-open": _PLAIN_QWEN2,
    "megrez": _PLAIN_QWEN2,
    "grok-2": _PLAIN_QWEN2,
    "seed-coder": PreTokenizer((_SEED,)),
    "bailingmoe": PreTokenizer((_BAILING,)),
    "bailingmoe2": PreTokenizer((_BAILING,)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "qwen35": PreTokenizer((_QWEN35,)),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
    "deepseek-v3": _PLAIN_DEEPSEEK3,
    "hunyuan-dense": _PLAIN_DEEPSEEK3,
    "tekken": PreTokenizer((_TEKKEN,), whole_words_first=True),
    "gpt-4o": _PLAIN_GPT4O,
    "llama4": _PLAIN_GPT4O,
    "minimax-m2": _PLAIN_GPT4O,
    "gemma4": PreTokenizer((_LINES,), spaces_marked=True),
}


def split_stages(pre_tokenizer: PreTokenizer) -> list[dict[str, Any]]:
    """Return the patterns as stages of a ``tokenizer.json`` pipeline."""
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre_tokenizer.patterns
    ]
