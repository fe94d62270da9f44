"""The one string of a custom tool, taken out of its arguments as they are written."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from singletree.protocols.openai.custom_tools import InputText, to_arguments, to_input

ANY_TEXT = st.text(st.characters(codec="utf-8"))
LIKE_JSON = st.lists(
    st.sampled_from(
        [
            "{",
            "}",
            '"',
            ":",
            ",",
            " ",
            "\n",
            "\\",
            "\\u",
            "d83d",
            "\\ude00",
            "\\n",
            "input",
            '{"input": "',
            "x",
        ]
    )
).map("".join)


def piecewise(pieces: list[str], *, complete: bool) -> str:
    reader = InputText()
    return "".join(reader.feed(p) for p in pieces) + reader.close("".join(pieces), complete=complete)


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


@given(ANY_TEXT, st.booleans(), st.lists(st.integers(0, 1000)))
def test_the_string_comes_out_as_it_went_in(text: str, ascii_only: bool, cuts: list[int]) -> None:  # C9 C25
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert piecewise(cut(arguments, cuts), complete=True) == text
    assert to_input(to_arguments(text), complete=True) == text


@given(LIKE_JSON, st.booleans(), st.lists(st.integers(0, 1000)))
def test_pieces_give_what_the_whole_gives(arguments: str, complete: bool, cuts: list[int]) -> None:  # C9
    written = piecewise(cut(arguments, cuts), complete=complete)
    assert written == to_input(arguments, complete=complete)
    written.encode()


@given(ANY_TEXT)
def test_a_cut_string_is_shown_as_far_as_it_goes(text: str) -> None:  # C15
    arguments = json.dumps({"input": text})
    written = [to_input(arguments[:end], complete=False) for end in range(len(arguments) + 1)]
    assert all(text.startswith(s.removesuffix("\ufffd")) for s in written)
    assert written[-1] == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a\\u12zz\\q"}', "a\\u12zz\\q"),
        ('{"input": "line\nbreak\tand tab"}', "line\nbreak\tand tab"),
        ('{"input": "\\ud83d\\ude00\\ud83dx\\udc00"}', "😀\ufffdx\ufffd"),
        (" \n{\n  " + " " * 500 + '"input": "a"}', "a"),
    ],
)
def test_what_models_write(arguments: str, expected: str) -> None:  # C17
    assert piecewise(list(arguments), complete=True) == expected


def test_text_leaves_at_once() -> None:  # C10
    reader = InputText()
    pieces = [reader.feed(piece) for piece in ('{"inp', 'ut": "a', "b\\", "n", "c\\u00", 'e9"}', "rest")]
    assert pieces == ["", "a", "b", "\n", "c", "é", ""]


def test_endless_white_space_is_not_searched_again_and_again() -> None:  # C41
    reader = InputText()
    assert all(reader.feed(" " * 10) == "" for _ in range(20_000))
