"""Stop strings: the same outcome at every split, and nothing held that cannot become one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from singletree.server.turn.stop_strings import StopStrings


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    watch, out = StopStrings(stops), []
    for piece in pieces:
        out += watch.feed([(piece, False)])
        if watch.matched is not None:
            break
    out += watch.close()
    return "".join(text for text, _ in out), watch.matched


CASES = [
    (("END",), "one END two", "one ", "END"),
    (("END",), "one EN", "one EN", None),
    (("aab",), "aaab", "a", "aab"),
    (("ab", "abc"), "xabc", "x", "ab"),
    (("bc", "abcd"), "abcd", "a", "bc"),
    (("xabcd", "bc"), "xabcd", "xa", "bc"),
    (("cd", "abcd"), "abcd", "", "abcd"),
    (("\n\n",), "a\n\nb", "a", "\n\n"),
    (("é🙂",), "caf\u00e9🙂!", "caf", "é🙂"),
    ((), "all of it", "all of it", None),
    (("",), "all of it", "all of it", None),
]


@pytest.mark.parametrize(("stops", "text", "kept", "matched"), CASES)
def test_every_split(stops: tuple[str, ...], text: str, kept: str, matched: str | None) -> None:  # C16
    for size in range(len(text)):
        for cuts in itertools.combinations(range(1, len(text)), min(size, 2)):
            edges = [0, *cuts, len(text)]
            pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
            assert run(stops, pieces) == (kept, matched), pieces
    assert run(stops, list(text)) == (kept, matched)


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.text("abc", max_size=5)))
def test_any_split_agrees_with_the_whole(stops: list[str], pieces: list[str]) -> None:
    assert run(tuple(stops), pieces) == run(tuple(stops), ["".join(pieces)])


def test_holds_back_only_what_could_become_a_stop_string() -> None:
    watch = StopStrings(("STOP",))
    assert watch.feed([("go on ST", False)]) == [("go on ", False)]
    assert watch.feed([("ART", False)]) == [("ST", False), ("ART", False)]


def test_special_tokens_stay_marked_and_may_be_part_of_a_stop_string() -> None:
    watch = StopStrings(("</call>!",))
    assert watch.feed([("a", False), ("<call>", True), ("b", False), ("</call>", True)]) == [
        ("a", False),
        ("<call>", True),
        ("b", False),
    ]
    assert watch.feed([("?", False)]) == [("</call>", True), ("?", False)]
    assert watch.feed([("</call>", True), ("!", False)]) == []
    assert watch.matched == "</call>!"


def test_a_special_token_that_a_stop_string_cuts_is_text() -> None:
    watch = StopStrings(("call>",))
    assert watch.feed([("<call>", True)]) == [("<", False)]
    assert watch.close() == []
