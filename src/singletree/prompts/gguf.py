"""Reads the tokenizer of a GGUF file, such that its ids are llama.cpp's own.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Only the metadata at the head of the file is read.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from singletree.errors import BadConfiguration
from singletree.prompts.added_tokens import AddedToken
from singletree.prompts.definition import Pipeline, TokenizerDefinition
from singletree.prompts.pretokenizers import PRE_TOKENIZERS, PreTokenizer, split_stages

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
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


def read_metadata(path: Path) -> dict[str, Any]:
    """The key-value pairs of a GGUF file; arrays of numbers as ``array``. Raises BadConfiguration."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path.name).read()
    except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
        raise BadConfiguration(f"{path.name} is no readable GGUF file: {error}; fetch it again") from error


class _Reader:
    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data = data
        self._name = name
        self._position = 0

    def read(self) -> dict[str, Any]:
        version = struct.unpack_from("<I", self._data, 4)[0]
        if self._data[:4] != _MAGIC or version not in _VERSIONS:
            raise BadConfiguration(
                f"{self._name} is no GGUF file of version 2 or 3 (it begins with {self._data[:8]!r})"
            )
        count = struct.unpack_from("<Q", self._data, 16)[0]
        self._position = 24
        return {self._string(): self._value(self._number("<I")) for _ in range(count)}

    def _number(self, format: str) -> Any:
        value = struct.unpack_from(format, self._data, self._position)[0]
        self._position += struct.calcsize(format)
        return value

    def _string(self) -> str:
        begin = self._position + 8
        end = begin + struct.unpack_from("<Q", self._data, self._position)[0]
        if end > len(self._data):
            raise ValueError("a string reaches past the end of the file")
        self._position = end
        return self._data[begin:end].decode()

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"value type {kind} is unknown")
        element, count = self._number("<I"), self._number("<Q")
        if element == _STRING:
            return self._strings(count)
        if element not in _SCALARS:
            return [self._value(element) for _ in range(count)]
        code = _SCALARS[element][1]
        size = struct.calcsize(_SCALARS[element]) * count
        begin, self._position = self._position, self._position + size
        if self._position > len(self._data):
            raise ValueError("an array reaches past the end of the file")
        return array("B" if code == "?" else code, self._data[begin : self._position])

    def _strings(self, count: int) -> list[str]:
        """Hundreds of thousands of them, hence in one loop without a call for each."""
        data, position, end = self._data, self._position, len(self._data)
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            begin = position + 8
            position = begin + unpack(data, position)[0]
            if position > end:
                raise ValueError("a string reaches past the end of the file")
            strings.append(data[begin:position].decode("utf-8", "replace"))
        self._position = position
        return strings


def read_gguf(path: Path) -> TokenizerDefinition:
    """The tokenizer of a GGUF file. Raises BadConfiguration for a kind of tokenizer that is not supported."""
    metadata = read_metadata(path)
    model = metadata.get("tokenizer.ggml.model")
    if model not in _PIPELINES or "tokenizer.ggml.tokens" not in metadata:
        raise BadConfiguration(
            f"{path.name}: tokenizer kind {model!r} is not supported (supported: {', '.join(_PIPELINES)}); "
            "give the model's Hugging Face directory with its tokenizer.json instead"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or array("i", [_NORMAL]) * len(tokens)
    window = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return TokenizerDefinition(
        pipeline=_PIPELINES[model](metadata, tokens, types),
        added_tokens=_added_tokens(str(metadata.get("general.name", "")).lower(), tokens, types),
        vocabulary_size=len(tokens),
        named_tokens={
            name: tokens[metadata[key]]
            for name, key in _NAMED_TOKENS.items()
            if metadata.get(key, len(tokens)) < len(tokens)
        },
        stop_token_ids=frozenset(metadata[key] for key in _END_KEYS if key in metadata),
        chat_template=metadata.get("tokenizer.chat_template"),
        context_window=window if isinstance(window, int) else None,
    )


def _added_tokens(name: str, tokens: list[str], types: array[int]) -> tuple[AddedToken, ...]:
    """The tokens that are matched by their text.

    GGUF has no flag for Phi-3's habit of eating the white space after one, so that model is known by its
    name, as in llama.cpp.
    """
    strips = any(phi in name for phi in ("phi-3", "phi3"))
    return tuple(
        AddedToken(id, text, special=kind != _USER_DEFINED, rstrip=strips and text not in _NEVER_STRIPPING)
        for id, (text, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    )


def _byte_pair_pipeline(metadata: Mapping[str, Any], tokens: list[str], types: array[int]) -> Pipeline:
    """``gpt2``: byte pairs with the pre-tokenizer that ``tokenizer.ggml.pre`` names."""
    name = metadata.get("tokenizer.ggml.pre") or _DEFAULT_PRE[metadata["tokenizer.ggml.model"]]
    pre_tokenizer = PRE_TOKENIZERS.get(name)
    if pre_tokenizer is None:
        raise BadConfiguration(
            f"pre-tokenizer {name!r} is not supported (supported: {', '.join(sorted(PRE_TOKENIZERS))}); "
            "give the model's Hugging Face directory with its tokenizer.json instead"
        )
    vocabulary = _vocabulary(tokens, types)
    pairs = [_halves(merge) for merge in metadata.get("tokenizer.ggml.merges", ())]
    merges = [
        pair
        for pair in pairs
        if pair[0] in vocabulary and pair[1] in vocabulary and "".join(pair) in vocabulary
    ]
    return _byte_level(pre_tokenizer, vocabulary, merges)


def _byte_level(
    pre_tokenizer: PreTokenizer, vocabulary: Mapping[str, int], merges: list[tuple[str, str]]
) -> Pipeline:
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
    """``llama``: SentencePiece's pairs, the pair with the best score first.

    Any two neighbours whose join is in the vocabulary may merge, so every way to halve a token is a merge.
    """
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
    model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": tokens[unknown]}
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
    """Ids by text.

    A control token stands under a name that no text has: nothing may be segmented into it, and left out it
    would make a gap, at which fastokens gives up.
    """
    return {
        f"\0 {id}" if kind == _CONTROL or not text else text: id
        for id, (text, kind) in enumerate(zip(tokens, types, strict=False))
    }


def _halves(merge: str) -> tuple[str, str]:
    """A merge is written as its two sides with a space between, and a side never begins with one."""
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _byte_pairs(
    vocabulary: Mapping[str, int], merges: list[tuple[str, str]], *, ignore_merges: bool
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }
