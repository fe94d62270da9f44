"""Encodes the segments between added tokens."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import tokenizers

from singletree.prompts.tokenizer.definition import Pipeline

_Encode = Callable[[str], list[int]]

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

    Attributes:
        encode: returns the token ids of a segment.
        backend: the reference implementation.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._json = msgspec.json.encode(pipeline).decode()
        self.backend = tokenizers.Tokenizer.from_str(self._json)
        self.encode: _Encode = self._encode

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def accelerate(self) -> bool:
        """Switch to fastokens if it gives the same ids for every probe; return whether it did. Takes seconds."""
        try:
            import fastokens

            fast = fastokens.Tokenizer.from_json_str(self._json)
            same = all(fast.encode(probe).ids == self._encode(probe) for probe in PROBES)
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

        self.encode = encode
        return True
