"""Stop strings: the same outcome at every split, and nothing held that cannot become one."""

from __future__ import annotations

import itertools
import tracemalloc
from copy import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from singletree.server.turn.stop_strings import StopStrings

from .serving import serving


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


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5), st.text("abc", max_size=12))
def test_the_match_that_ends_first_wins_and_the_longest_of_these(stops: list[str], text: str) -> None:
    ends = [(end, stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    expected: tuple[str, str | None] = (text, None)
    if ends:
        end, stop = min(ends, key=lambda each: (each[0], -len(each[1])))
        expected = text[: end - len(stop)], stop
    assert run(tuple(stops), [text]) == expected


def test_memory_is_linear_and_shared_by_the_choices() -> None:
    long = "".join(map(chr, range(0x4E00, 0x4E00 + 4096)))
    tracemalloc.start()
    try:
        choices = [StopStrings((long,)) for _ in range(64)]
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()
    assert choices[-1].feed([(long[:-1], False)]) == []
    choices[-1].feed([(long[-1], False)])
    assert choices[-1].matched == long


class CountedSteps(dict[int, int]):
    """The edges of an automaton, which count how often one is looked for."""

    count = 0

    def get(self, key: int, default: int | None = None) -> int | None:  # type: ignore[override]
        self.count += 1
        return super().get(key, default)


@pytest.mark.parametrize("unit", ["a", "ab", "x"])
def test_work_is_linear_in_the_text(unit: str) -> None:
    watch = StopStrings(("a" * 2000 + "b", "ab" * 900 + "c", *(f"a{n}" for n in range(50))))
    watch._automaton = copy(watch._automaton)
    steps = watch._automaton._next = CountedSteps(watch._automaton._next)
    text = unit * (20_000 // len(unit))
    kept = "".join(piece for character in text for piece, _ in watch.feed([(character, False)]))
    assert text.startswith(kept)
    assert watch.matched is None
    assert steps.count <= 2 * len(text) + 1


LIMITED = [
    ("/v1/chat/completions", "stop"),
    ("/v1/completions", "stop"),
    ("/v1/messages", "stop_sequences"),
    ("/inference/v1/generate", "stop"),
]


@pytest.mark.parametrize(("path", "field"), LIMITED)
@pytest.mark.parametrize(
    ("stops", "words"),
    [
        (
            ["x"] * 65,
            "has 65 stop strings; send at most 64 (the operator of this server can set --limit stop_strings=65",
        ),
        (
            ["x" * 4097],
            "has 4097 characters; send at most 4096 (the operator of this server can set --limit stop_ch",
        ),
    ],
)
async def test_more_than_the_limit_is_refused(path: str, field: str, stops: list[str], words: str) -> None:
    if path.startswith("/inference"):
        sent: dict[str, Any] = {"token_ids": [1], "sampling_params": {field: stops}}
    elif path == "/v1/completions":
        sent = {"prompt": "x", field: stops}
    else:
        sent = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, field: stops}
    async with serving() as served:
        answer = await served.client.post(path, {"model": "alias", **sent})
    assert answer.status == 400
    message = answer.json["error"]["message"]
    assert f"{field} {words}" in message or f"sampling_params.{field} {words}" in message
