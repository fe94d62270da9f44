"""A long text is encoded in slices: the tokens are those of the whole, and other threads run meanwhile."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from singletree.prompts.tokenizer.encoder import encode_in_slices
from singletree.testing import byte_model

WORDS = "The quick brown fox said: 'I'LL see'.\n\n\tdef f(x):  return 12345\n  naïve\u00a0日本語 text here\n"


def counted(sizes: list[int]) -> Callable[[str], array[int]]:
    """Words with the white space before them are tokens, as in most vocabularies; ``sizes`` has what was encoded."""

    def encode(text: str) -> array[int]:
        sizes.append(len(text))
        ids, start = array("I"), 0
        for at in range(1, len(text) + 1):
            if at == len(text) or (text[at].isspace() and not text[at - 1].isspace()):
                ids.append(hash(text[start:at]) & 0xFFFFFFFF)
                start = at
        return ids

    return encode


@pytest.mark.parametrize("unit", [WORDS, "word " * 3, "a\n", " " * 50 + "x", "日本 "])
def test_slices_have_the_tokens_of_the_whole(unit: str) -> None:
    sizes: list[int] = []
    text = unit * (300_000 // len(unit))
    encode = counted(sizes)
    whole = encode(text)
    sizes.clear()
    assert encode_in_slices(text, encode) == whole
    assert max(sizes) <= 65_536


def test_a_word_without_end_is_cut_where_its_neighbours_allow_it() -> None:
    def pairs(text: str) -> array[int]:
        return array("I", map(ord, text[::2]))

    text = "ab" * 200_000
    assert encode_in_slices(text, pairs) == pairs(text)


@pytest.mark.parametrize("longest", [1, 2, 8, 31, 64, 128])
def test_a_run_is_cut_whatever_the_length_of_its_longest_token(longest: int) -> None:
    """Spaces have one of 128 in most vocabularies, of 31 in Gemma's."""
    sizes: list[int] = []

    def runs(text: str) -> array[int]:
        sizes.append(len(text))
        whole, rest = divmod(len(text), longest)
        return array("I", [longest] * whole + [rest] * (rest > 0))

    assert sum(encode_in_slices(" " * 300_000, runs)) == 300_000
    assert max(sizes) <= 65_536


def test_a_text_that_cannot_be_cut_is_encoded_whole() -> None:
    def prefixed(text: str) -> array[int]:
        return array("I", [1, *map(ord, text)])

    text = "word " * 40_000
    assert encode_in_slices(text, prefixed) == prefixed(text)


def test_other_threads_run_while_a_text_is_encoded() -> None:
    tokenizer = byte_model.byte_tokenizer()
    reference = tokenizer._first.load()
    calls: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(reference, name)

    tokenizer._first._reference = Watched()  # type: ignore[assignment]
    tokenizer.encode("x" * 200_000)
    # Of its methods only the batch's let go of the interpreter.
    assert set(calls) == {"encode_batch_fast"}
