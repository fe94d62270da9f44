"""Reads the tokenizer of a GGUF file, such that its ids are the same as llama.cpp's.

``PRE_TOKENIZERS`` has the patterns by which llama.cpp cuts text into words before byte pairs are merged, by name
(``tokenizer.ggml.pre``). They are those of the models' own ``tokenizer.json``; the names are assigned in llama.cpp's
``src/llama-vocab.cpp`` (https://github.com/ggml-org/llama.cpp). Several patterns are applied one after the other, each
to the words that the one before made.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from singletree.errors import BadConfiguration, WeightsUnavailable
from singletree.gguf import read_metadata, trained_context
from singletree.prompts.tokenizer.added_tokens import AddedToken
from singletree.prompts.tokenizer.definition import Pipeline, TokenizerDefinition


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

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: pre_tokenizer
    for names, pre_tokenizer in {
        "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
        "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
        "smollm starcoder refact command-r codeshell exaone minerva-7b": PreTokenizer((r"\p{N}", _GPT2)),
        "gpt-2 phi-2 mpt olmo gigachat exaone4 mellum": PreTokenizer((_GPT2,)),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2 glm4 glm5": PreTokenizer(
            (_LLAMA3,), whole_words_first=True
        ),
        "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
        "qwen2 deepseek-r1-qwen stablelm2 hunyuan solar-open megrez grok-2": PreTokenizer((_QWEN2,)),
        "qwen35": PreTokenizer((_QWEN35,)),
        "laguna": PreTokenizer((_LINES, _QWEN2)),
        "seed-coder": PreTokenizer((_SEED,)),
        "bailingmoe bailingmoe2": PreTokenizer((_BAILING,)),
        "deepseek-v3 hunyuan-dense": PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
        "tekken": PreTokenizer((_TEKKEN,), whole_words_first=True),
        "gpt-4o llama4 minimax-m2": PreTokenizer((_GPT4O,)),
        "gemma4": PreTokenizer((_LINES,), spaces_marked=True),
    }.items()
    for name in names.split()
}


def split_stages(pre_tokenizer: PreTokenizer) -> list[dict[str, Any]]:
    """Return the patterns as stages of a ``tokenizer.json`` pipeline."""
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre_tokenizer.patterns
    ]


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_NAMED_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

_NEVER_STRIPPING = frozenset({"<unk>", "<s>", "<|endoftext|>"})
_DEFAULT_PRE = {"gpt2": "default", "gemma4": "gemma4"}

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
_SPACE_TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_MARK_TO_SPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_BYTE_FALLBACK_DECODER = {
    "type": "Sequence",
    "decoders": [_MARK_TO_SPACE, {"type": "ByteFallback"}, {"type": "Fuse"}],
}


def read_gguf(path: Path) -> TokenizerDefinition:
    """Read the tokenizer of a GGUF file. Raises BadConfiguration if its kind is not supported.

    Raises WeightsUnavailable if the file cannot be read, is damaged or incomplete, or is not a GGUF file.
    """
    try:
        return _definition(path.name, read_metadata(path))
    except (AttributeError, IndexError, TypeError) as error:
        why = f"a field of its tokenizer has a wrong type or length ({error})"
        raise WeightsUnavailable(f"{path.name} is damaged: {why}; download it again") from error


def _definition(file: str, metadata: Mapping[str, Any]) -> TokenizerDefinition:
    model, template = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.chat_template")
    if model not in _PIPELINES or "tokenizer.ggml.tokens" not in metadata:
        raise BadConfiguration(
            f"{file}: tokenizer kind {model!r} is not supported (supported: {', '.join(_PIPELINES)}); "
            "give the model's Hugging Face directory with its tokenizer.json instead"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or array("i", [_NORMAL]) * len(tokens)
    if not isinstance(tokens, list) or not isinstance(template, str | None) or len(types) != len(tokens):
        raise TypeError("tokens and template are texts, and each token has a type")
    return TokenizerDefinition(
        pipeline=_PIPELINES[model](metadata, tokens, types),
        added_tokens=_added_tokens(str(metadata.get("general.name", "")).lower(), tokens, types),
        vocabulary_size=len(tokens),
        named_tokens={
            name: tokens[metadata[key]]
            for name, key in _NAMED_TOKENS.items()
            if metadata.get(key) in range(len(tokens))
        },
        stop_token_ids=frozenset(
            metadata[key] for key in _END_KEYS if metadata.get(key) in range(len(tokens))
        ),
        chat_template=template,
        context_window=trained_context(metadata),
    )


def _added_tokens(name: str, tokens: list[str], types: array[int]) -> tuple[AddedToken, ...]:
    """Phi-3's tokens take white space after them, for which GGUF has no flag: the name tells, as in llama.cpp."""
    strips = any(phi in name for phi in ("phi-3", "phi3"))
    return tuple(
        AddedToken(id, text, special=kind != _USER_DEFINED, rstrip=strips and text not in _NEVER_STRIPPING)
        for id, (text, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    )


def _byte_pair_pipeline(metadata: Mapping[str, Any], tokens: list[str], types: array[int]) -> Pipeline:
    """Return the pipeline for ``gpt2``: byte pairs with the pre-tokenizer that ``tokenizer.ggml.pre`` names."""
    name = metadata.get("tokenizer.ggml.pre") or _DEFAULT_PRE[metadata["tokenizer.ggml.model"]]
    pre_tokenizer = PRE_TOKENIZERS.get(name)
    if pre_tokenizer is None:
        raise BadConfiguration(
            f"pre-tokenizer {name!r} is not supported (supported: {', '.join(sorted(PRE_TOKENIZERS))}); "
            "give the model's Hugging Face directory with its tokenizer.json instead"
        )
    vocabulary = _vocabulary(tokens, types)
    pairs = map(_halves, metadata.get("tokenizer.ggml.merges", ()))
    merges = [pair for pair in pairs if vocabulary.keys() >= {*pair, "".join(pair)}]
    model = _byte_pairs(vocabulary, merges, ignore_merges=pre_tokenizer.whole_words_first)
    if pre_tokenizer.spaces_marked:
        return Pipeline(
            msgspec.Raw(msgspec.json.encode(model | {"byte_fallback": True})),
            normalizer=_SPACE_TO_MARK,
            pre_tokenizer={"type": "Sequence", "pretokenizers": split_stages(pre_tokenizer)},
            decoder=_BYTE_FALLBACK_DECODER,
        )
    return Pipeline(
        msgspec.Raw(msgspec.json.encode(model)),
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*split_stages(pre_tokenizer), BYTE_LEVEL]},
        decoder=BYTE_LEVEL,
    )


def _sentencepiece_pipeline(metadata: Mapping[str, Any], tokens: list[str], types: array[int]) -> Pipeline:
    """Any two neighbours whose join is in the vocabulary may merge, so every way to halve a token is a merge."""
    scores = metadata.get("tokenizer.ggml.scores") or array("f", bytes(4 * len(tokens)))
    vocabulary = _vocabulary(tokens, types)
    by_score = sorted(
        (id for id in vocabulary.values() if types[id] in (_NORMAL, _USER_DEFINED, _UNUSED)),
        key=lambda id: -scores[id],
    )
    merges = [
        (token[:cut], token[cut:])
        for token in (tokens[id] for id in by_score)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    model = _byte_pairs(vocabulary, merges, ignore_merges=False)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    # A control token has another name in the vocabulary.
    name = tokens[unknown] if tokens[unknown] in vocabulary else f"\0 {unknown % len(tokens)}"
    model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": name}
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [{"type": "Prepend", "prepend": "▁"}] if prefixed else []
    return Pipeline(
        msgspec.Raw(msgspec.json.encode(model)),
        normalizer={"type": "Sequence", "normalizers": [*prepend, _SPACE_TO_MARK]},
        decoder=_BYTE_FALLBACK_DECODER,
    )


_PIPELINES: dict[str, Callable[[Mapping[str, Any], list[str], array[int]], Pipeline]] = {
    "gpt2": _byte_pair_pipeline,
    "gemma4": _byte_pair_pipeline,
    "llama": _sentencepiece_pipeline,
}


def _vocabulary(tokens: list[str], types: array[int]) -> dict[str, int]:
    """Control tokens have names that no text contains. Without them, the ids had a gap, which fastokens refuses."""
    return {
        f"\0 {id}" if kind == _CONTROL or not text else text: id
        for id, (text, kind) in enumerate(zip(tokens, types, strict=False))
    }


def _halves(merge: str) -> tuple[str, str]:
    """Return the two sides of a merge. A space separates them, and neither side begins with one."""
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _byte_pairs(
    vocabulary: Mapping[str, int], merges: list[tuple[str, str]], *, ignore_merges: bool
) -> dict[str, Any]:
    return {"type": "BPE", "ignore_merges": ignore_merges, "vocab": vocabulary, "merges": merges}
