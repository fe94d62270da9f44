"""Encodes the segments between added tokens."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from threading import Lock
from typing import Protocol

import msgspec
import tokenizers

from singletree.prompts.tokenizer.definition import Pipeline

_Encode = Callable[[str], list[int]]


class _Vocabulary(Protocol):
    def id_to_token(self, token_id: int, /) -> str | None: ...


PROBES = (
    "The quick brown fox jumps over the lazy dog.\n\nIt's 12345678 o'clock, isn't it? I'LL SEE…",
    "def f(x: int = 0) -> dict[str, Any]:\n\treturn {'a': [x, 1.5e-3], \"b\": None}  # äöü ß\r\n\r\n   \n",
    "日本語のテキスト、中文字符。한국어 텍스트 русский عربى हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🇩🇪 e\u0301 ﬁ \u00a0\u2028\ufeff\ue000 ①²½ Ⅻ \u0000\u0007",
    " leading and trailing   ",
    "\n\n\n   \t\t  x\t\n",
    "A" * 300 + " " * 300 + "=" * 100 + "0" * 50,
    '{"name": "get_weather", "arguments": {"city": "Par\\u00eds", "days": 3.0}}',
    "<|im_start|>user</s><think>[INST]<start_of_turn>▁▁<0x0A>",
)
"""Texts on which two implementations differ if they differ in any way that matters."""


class SegmentEncoder:
    """Encodes segments with one pipeline. ``accelerate`` switches to a faster implementation of it.

    Only one implementation stays in memory: each takes tens of megabytes for a vocabulary of today's size.

    Attributes:
        encode: returns the token ids of a segment.

    Args:
        pipeline: the stages of the tokenizer.
        is_lazy: whether the pipeline is loaded for the first segment and not at once; for one that has been loaded
            before, because an error is not seen until then.
    """

    def __init__(self, pipeline: Pipeline, *, is_lazy: bool = False) -> None:
        self._pipeline: Pipeline | None = pipeline
        self._definition = b""
        self._is_packed = False
        self._reference: tokenizers.Tokenizer | None = None
        self._loading = Lock()
        self._vocabulary: _Vocabulary | None = None
        self.encode: _Encode = self._encode
        if not is_lazy:
            self.load()

    def load(self) -> tokenizers.Tokenizer:
        """Load the reference implementation if it is not in memory, and return it. Takes half a second."""
        with self._loading:
            if self._pipeline is not None:
                self._definition = msgspec.json.encode(self._pipeline)
                self._pipeline = None
            reference = self._reference
            if reference is None:
                packed = self._definition
                reference = tokenizers.Tokenizer.from_buffer(
                    zlib.decompress(packed) if self._is_packed else packed
                )
                self._reference = reference
            if self._vocabulary is None:
                self._vocabulary = reference
            return reference

    def load_once(self) -> bool:
        """Load an implementation if none is in memory; return whether it did."""
        if self._vocabulary is not None:
            return False
        self.load()
        return True

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary entry of an id; None for an id that the vocabulary does not have."""
        vocabulary = self.load() if self._vocabulary is None else self._vocabulary
        return vocabulary.id_to_token(token_id)

    def _encode(self, text: str) -> list[int]:
        reference = self._reference
        if reference is None:
            reference = self.load()
        ids: list[int] = reference.encode(text, add_special_tokens=False).ids
        return ids

    def accelerate(self, vocabulary_size: int) -> bool:
        """Switch to fastokens if it gives the same ids for every probe; return whether it did. Takes seconds.

        It may run in a thread while other threads encode.

        Args:
            vocabulary_size: one more than the highest id; all entries up to there have to be the same, too.
        """
        if self._is_packed:
            return True
        self.load()
        try:
            import fastokens

            fast = fastokens.Tokenizer.from_json_str(self._definition.decode())
            same = all(fast.encode(probe).ids == self._encode(probe) for probe in PROBES)
            same = same and all(fast.id_to_token(id) == self.id_to_token(id) for id in range(vocabulary_size))
        except Exception:  # an optional library, which can refuse any part of a pipeline
            return False
        if not same:
            return False

        def encode(text: str) -> list[int]:
            try:
                ids: list[int] = fast.encode(text).ids
                return ids
            except Exception:  # its regular expressions have limits that the reference does not have
                return self._encode(text)

        packed = zlib.compress(self._definition, 1)
        # The reference is made again for the first text that fastokens refuses.
        with self._loading:
            self.encode, self._vocabulary = encode, fast
            self._definition, self._is_packed, self._reference = packed, True, None
        return True
