"""Encodes the segments between added tokens."""

from __future__ import annotations

import ctypes
import re
import zlib
from array import array
from collections.abc import Callable
from threading import Lock
from typing import TypeAlias

import msgspec
import tokenizers

from singletree.prompts.tokenizer.definition import Pipeline


def return_freed_memory() -> None:
    """Return freed memory to the operating system, where the C library does not do that by itself.

    Parsing a vocabulary takes a hundred megabytes for a moment, in pieces so small that glibc keeps them.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library; TypeError on Windows
        return
    trim(0)


_Encode: TypeAlias = "Callable[[str], array[int]]"


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


SLICE_CHARACTERS = 65_536
"""Characters that are encoded at a time: each takes up to 250 bytes while it is encoded."""
_NEIGHBOURS = 128
"""Characters on both sides of a cut by which it is checked: as many as the longest token of spaces has."""
_TRIES = 5
"""Places that are checked for one cut, the last with four characters less: Gemma has a token of 31 spaces."""
_WORD_END = re.compile(r"(?<=[^\W\d_])(?=[ \n])")
_SEARCHED = 4096
"""Characters before the end of a slice in which the end of a word is looked for."""


def encode_in_slices(text: str, encode: _Encode) -> array[int]:
    """Return the token ids of ``text``, encoded slice by slice, so that a long text takes little memory at a time.

    A slice ends where a word does, and where the texts on both sides of the cut have the same tokens apart as together.
    Where there is no such place, the slice goes on. In a word without end that is all that is checked: its tokens at a
    cut can differ from those of the whole.
    """
    ids, at = array("I"), 0
    while at < len(text):
        end = at + SLICE_CHARACTERS
        while (cut := _cut_before(text, end, encode)) is None:
            end += SLICE_CHARACTERS
        ids.extend(encode(text[at:cut]))
        at = cut
    return ids


def _cut_before(text: str, end: int, encode: _Encode) -> int | None:
    if end >= len(text):
        return len(text)
    words: list[int] = [match.start() for match in _WORD_END.finditer(text, end - _SEARCHED, end)]
    reaches = range(_NEIGHBOURS, _NEIGHBOURS - _TRIES, -1)
    ends = (end - _NEIGHBOURS + reach for reach in reaches)
    for place, reach in (*zip(reversed(words), reaches, strict=False), *zip(ends, reaches, strict=True)):
        left, right = text[place - reach : place], text[place : place + reach]
        apart = encode(left) + encode(right)
        if encode(left + right) == apart:
            return place
    return None


class SegmentEncoder:
    """Encodes segments with one pipeline: ``encode`` returns the token ids of one.

    ``accelerate`` switches to a faster implementation. Only one implementation stays in memory: each takes tens of
    megabytes for a vocabulary of today's size. With ``is_lazy``, the pipeline is loaded for the first segment: for one
    that has been loaded before, because an error is not seen until then.
    """

    def __init__(self, pipeline: Pipeline, *, is_lazy: bool = False) -> None:
        self._pipeline: Pipeline | None = pipeline
        self._definition = b""
        self.is_fast = False
        self._reference: tokenizers.Tokenizer | None = None
        self._loading = Lock()
        self._token_of: Callable[[int], str | None] | None = None
        self.encode: _Encode = self._encode
        if not is_lazy:
            self.load()

    def load(self) -> tokenizers.Tokenizer:
        """Load the reference implementation if it is not in memory, and return it. Takes half a second."""
        with self._loading:
            if self._pipeline is not None:
                self._definition = msgspec.json.encode(self._pipeline)
                self._pipeline = None
            if self._reference is None:
                packed = self._definition
                self._reference = tokenizers.Tokenizer.from_buffer(
                    zlib.decompress(packed) if self.is_fast else packed
                )
                return_freed_memory()
            self._token_of = self._token_of or self._reference.id_to_token
            return self._reference

    def load_once(self) -> None:
        if self._token_of is None:
            self.load()

    def id_to_token(self, token_id: int) -> str | None:
        return (self._token_of or self.load().id_to_token)(token_id)

    def _encode(self, text: str) -> array[int]:
        reference = self._reference or self.load()
        # Unlike encode, it lets other threads run meanwhile.
        [encoding] = reference.encode_batch_fast([text], add_special_tokens=False)
        return array("I", encoding.ids)

    def encode_array(self, text: str) -> array[int]:
        """Return the token ids of a segment as an array; one longer than a slice is encoded in slices."""
        return self.encode(text) if len(text) <= SLICE_CHARACTERS else encode_in_slices(text, self.encode)

    def accelerate(self, vocabulary_size: int) -> bool:
        """Switch to fastokens if it has the same vocabulary and the same ids for every probe. Takes seconds."""
        if self.is_fast:
            return True
        self.load()
        try:
            import fastokens

            fast = fastokens.Tokenizer.from_json_str(self._definition.decode())
            # Packed ids: to make a number of each takes as long as to encode a text whose words are known.
            encode_packed = fast.encode_batch_flat
            same = all(array("I", encode_packed([probe])[0]) == self._encode(probe) for probe in PROBES)
            same = same and all(fast.id_to_token(id) == self.id_to_token(id) for id in range(vocabulary_size))
        except Exception:  # an optional library, which can refuse any part of a pipeline
            return False
        if not same:
            return False

        def encode(text: str) -> array[int]:
            try:
                return array("I", encode_packed([text])[0])
            except Exception:  # its regular expressions have limits that the reference does not have
                return self._encode(text)

        packed = zlib.compress(self._definition, 1)
        # The reference is made again for the first text that fastokens refuses.
        with self._loading:
            self.encode, self._token_of = encode, fast.id_to_token
            self._definition, self.is_fast, self._reference = packed, True, None
        return True
