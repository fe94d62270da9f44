"""Tokens give the same text however they come."""

from __future__ import annotations

import itertools

import pytest

from singletree.prompts.tokenizer.added_tokens import AddedToken
from singletree.prompts.tokenizer.detokenizer import Detokenizer, TokenTexts

VOCABULARY = {0: "\u2581a", 1: "b", 2: "<0xC3>", 3: "<0xA4>", 4: ""}
ADDED = (AddedToken(10, "<tag>", special=False), AddedToken(11, "<end>", special=True))


def texts(*, stripping: bool) -> Detokenizer:
    known = TokenTexts(ADDED, VOCABULARY.get, "byte_fallback")
    return Detokenizer(known, strip_first=stripping, strip_after_added=stripping)


def joined(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Pieces with neighbours that are no special tokens joined."""
    out: list[tuple[str, bool]] = []
    for text, special in pieces:
        if out and not special and not out[-1][1]:
            out[-1] = (out[-1][0] + text, False)
        else:
            out.append((text, special))
    return out


@pytest.mark.parametrize("stripping", [False, True])
def test_tokens_alone_and_together_give_the_same_text(stripping: bool) -> None:
    for tokens in itertools.product((0, 1, 2, 3, 4, 10, 11), repeat=4):
        alone, together = texts(stripping=stripping), texts(stripping=stripping)
        pieces = [piece for token in tokens for piece in alone.feed([token])] + alone.flush()
        assert joined(pieces) == joined(together.feed(tokens) + together.flush())


def test_whole_text_is_what_a_feed_returns_or_nothing() -> None:
    for tokens in itertools.product((0, 1, 2, 3, 4, 10, 11), repeat=3):
        detokenizer = texts(stripping=False)
        text = detokenizer.whole_text(tokens)
        pieces = detokenizer.feed(tokens)
        if text is None:
            assert not {2, 3, 11}.isdisjoint(tokens)
        else:
            assert pieces == ([(text, False)] if text else [])


def test_there_is_no_whole_text_while_a_character_is_held_back() -> None:
    detokenizer = texts(stripping=False)
    detokenizer.feed([2])
    assert detokenizer.whole_text([1]) is None
    assert detokenizer.feed([3]) == [("\u00e4", False)]
    assert detokenizer.whole_text([1]) == "b"
