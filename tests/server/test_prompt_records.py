"""The records of earlier prompts: which one a prompt continues, and what is counted in them once."""

from __future__ import annotations

import random
from array import array
from itertools import combinations_with_replacement, product
from typing import Any

import pytest

from singletree.conversation import Reasoning, Text, Turn
from singletree.prefixes import common_text_prefix
from singletree.prompts.replay.turn_keys import HistoryDigests, fingerprint
from singletree.server.sessions.divergence import WIDTH, PromptRecord, ToolList
from singletree.server.sessions.sessions import Session, Sessions

NO_TOOLS = ToolList.of(())


def record(ids: list[int], ends: list[int], turn: int = 0, **more: Any) -> PromptRecord:
    """A record of which the last tokens, ``turn`` in number, are those of the turn."""
    return PromptRecord(
        "m",
        array("I", ids[: len(ids) - turn]).tobytes(),
        array("I", ids[len(ids) - turn :]).tobytes(),
        expected=ends[-1],
        messages=(),
        tools=NO_TOOLS,
        settings={},
        answer=None,
        ends=tuple((end, 0) for end in ends),
        **more,
    )


def rank(known: PromptRecord, tokens: bytes) -> tuple[int, bool, int]:
    matched = common_text_prefix(tokens, known.tokens) // WIDTH
    reached = max((end for end, _ in known.ends if end <= matched), default=0)
    return reached, reached == known.expected, matched


@pytest.mark.parametrize("seed", range(20))
def test_a_prompt_continues_the_record_that_it_extends_furthest(seed: int) -> None:
    chance = random.Random(seed)
    sessions = []
    for name in "ab":
        session = Session(name)
        for number in range(chance.randint(1, 8)):
            ids = [chance.choice([1, 1, 1, 2]) for _ in range(chance.randint(1, 8))]
            ends = sorted(chance.sample(range(1, len(ids) + 1), chance.randint(1, min(3, len(ids)))))
            session.keep(number, record(ids, ends, turn=chance.randrange(len(ids))))
        sessions.append(session)
    for length in range(1, 10):
        tokens = array("I", [chance.choice([1, 1, 1, 2]) for _ in range(length)]).tobytes()
        found = Sessions(2**20)._longest(sessions, "m", tokens)
        records = [known for session in sessions for known in session.records.values()]
        best = max(records, key=lambda known: rank(known, tokens))
        if rank(best, tokens)[2] == 0:
            assert found is None
        else:
            assert found is not None
            assert found.record is best  # of equal ones the first, which was used last
            assert found.matched == rank(best, tokens)[2]


def test_a_record_of_another_model_is_never_continued() -> None:
    session = Session("a")
    session.keep(1, record([1, 2, 3], [3]))
    assert Sessions(2**20)._longest([session], "other", array("I", [1, 2, 3, 4]).tobytes()) is None


def test_headers_are_the_same_number_however_they_were_counted_before() -> None:
    header = array("I", [7, 8]).tobytes()
    ids = [1, 7, 8, 2, 7, 8, 7, 8, 3, 7, 7, 8]
    plain = record(ids, [len(ids)])
    for counted, turn in product(range(len(ids) + 1), repeat=2):
        known = record(ids, [len(ids)], turn, headers=(counted, plain.headers_within(counted, header)))
        for end in range(len(ids) + 1):
            expected = sum(ids[at : at + 2] == [7, 8] for at in range(end - 1))
            assert known.headers_within(end, header) == plain.headers_within(end, header) == expected


def test_tokens_of_a_record_however_they_are_divided() -> None:
    ids = [1, 2, 3, 4, 5]
    tokens = array("I", ids).tobytes()
    for turn in range(len(ids) + 1):
        known = record(ids, [len(ids)], turn)
        assert (known.tokens, known.length, known.prompt_tokens) == (tokens, 5, 5 - turn)
        for start, end in combinations_with_replacement(range(8), 2):
            assert known.tokens_between(start, end) == tokens[start * WIDTH : end * WIDTH]
        for size in range(7):
            other = array("I", ([*ids, 6, 7])[:size]).tobytes()
            assert known.matched(other) == min(size, 5)
            assert known.matched(other + array("I", [9, 9]).tobytes()) == min(size, 5)


def test_fingerprints_of_a_grown_conversation_are_those_of_its_turns() -> None:
    turns = [Turn("user", (Text(str(number)), Reasoning("hm"))) for number in range(4)]
    first = HistoryDigests(turns[:2])
    known = first.fingerprints
    other = Turn("user", (Text("another"),))
    for grown, same in ((turns, 2), ([turns[0], other], 1), ([other], 0), (turns[:1], 1)):
        found = first.of_grown(grown, same).fingerprints
        assert found == tuple(map(fingerprint, grown))
        assert all(one is two for one, two in zip(found[:same], known, strict=False))
    assert first.of_grown(turns, 2).of_grown(turns[:3], 3).fingerprints == tuple(map(fingerprint, turns[:3]))
