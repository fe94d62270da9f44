"""What the hook of the operator finds is in no token that is kept, and all other tokens stay."""

from __future__ import annotations

import itertools
from array import array
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from singletree.training.session_files import Redactor


class Pieces:
    """A tokenizer whose tokens are pieces of bytes; the first one is that of ``*``."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [b"*", *pieces]

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def encode(self, text: str) -> list[int]:
        return [0]


def redactor(pieces: list[bytes], places: list[tuple[int, int]]) -> Redactor:
    return Redactor(lambda text: places, cast(Any, Pieces(pieces)))


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[bytes], list[tuple[int, int]]]:
    """A text, its bytes in pieces that may cut characters, and places in it."""
    text = draw(st.text(alphabet="ab €é😀\x00", min_size=1, max_size=12))
    data = text.encode()
    cuts = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=12))})
    pieces = [data[start:end] for start, end in itertools.pairwise(cuts)]
    for at in draw(st.lists(st.integers(0, len(pieces)), max_size=2)):
        pieces.insert(at, b"")
    ends = st.integers(0, len(text))
    return (
        text,
        pieces,
        [(min(each), max(each)) for each in draw(st.lists(st.tuples(ends, ends), max_size=3))],
    )


@given(made=cut_texts())
def test_the_tokens_of_a_place_go_and_others_stay(
    made: tuple[str, list[bytes], list[tuple[int, int]]],
) -> None:
    text, pieces, places = made
    ids = array("I", range(1, len(pieces) + 1))
    kept, ranges = redactor(pieces, places).tokens(ids)
    at = [len(text[:index].encode()) for index in range(len(text) + 1)]
    hidden = {byte for start, end in places for byte in range(at[start], at[end])}
    changed = {token for start, end in ranges for token in range(start, end)}
    position = 0
    for number, piece in enumerate(pieces):
        own = {*range(position, position + len(piece))}
        position += len(piece)
        assert (kept[number] == 0) == (number in changed)
        if own & hidden:
            assert number in changed
        elif own:
            assert number not in changed
    assert ids.tolist() == [*range(1, len(pieces) + 1)]


def test_bytes_that_are_no_text_count_as_one_character_each() -> None:
    seen: list[str] = []

    def find(text: str) -> list[tuple[int, int]]:
        seen.append(text)
        return [(2, 4)]

    kept, ranges = Redactor(find, cast(Any, Pieces([b"\xff", b"\xe2\x82", b"k", b"l"]))).tokens(
        array("I", [1, 2, 3, 4])
    )
    assert seen == ["\ufffd\ufffd\ufffdkl"]
    assert (kept.tolist(), ranges) == ([1, 0, 0, 4], [(1, 3)])


def test_all_texts_of_a_turn_are_searched() -> None:
    parts = [
        {"type": "text", "text": "x1"},
        {"type": "call", "id": "c1", "name": "x1", "arguments": "x1"},
        {"type": "image"},
    ]
    found = redactor([], [(1, 2)]).turn({"role": "user", "parts": parts})
    assert found["parts"] == [
        {"type": "text", "text": "x*"},
        {"type": "call", "id": "c1", "name": "x*", "arguments": "x*"},
        {"type": "image"},
    ]
