"""Encodes the segments between added tokens."""

from __future__ import annotations

import zlib
from collections.abc import Callable
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
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._definition = msgspec.json.encode(pipeline)
        self._is_packed = False
        self._reference: tokenizers.Tokenizer | None = tokenizers.Tokenizer.from_buffer(self._definition)
        self._vocabulary: _Vocabulary = self._reference
        self.encode: _Encode = self._encode

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary entry of an id; None for an id that the vocabulary does not have."""
        return self._vocabulary.id_to_token(token_id)

    def _encode(self, text: str) -> list[int]:
        if self._reference is None:
            self._reference = tokenizers.Tokenizer.from_buffer(zlib.decompress(self._definition))
        ids: list[int] = self._reference.encode(text, add_special_tokens=False).ids
        return ids

    def accelerate(self, vocabulary_size: int) -> bool:
        """Switch to fastokens if it gives the same ids for every probe; return whether it did. Takes seconds.

        It may run in a thread while other threads encode.

        Args:
            vocabulary_size: one more than the highest id; all entries up to there have to be the same, too.
        """
        if self._is_packed:
            return True
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

        # The reference is made again for the first text that fastokens refuses.
        self.encode, self._vocabulary = encode, fast
        self._definition, self._is_packed = zlib.compress(self._definition, 1), True
        self._reference = None
        return True
