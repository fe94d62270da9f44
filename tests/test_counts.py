"""The counts of work: what they count, and when they complain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import counts
from benchmarks.counting_work import AreaCrossings, Work, WorkCounter, area_of
from benchmarks.counts import compare, read
from benchmarks.tool_session import PROTOCOLS, opening

from server.in_memory_server import InMemoryServer
from singletree import families
from singletree.parsing.parser import Parser

BEFORE = {"a token": {"calls": 100, "instructions": 1000, "peak": 0}}


def feed(tokens: int) -> Work:
    """Parse ``tokens`` words, and count."""
    pieces = ["word "] * tokens
    with WorkCounter().counting() as work:
        parser = Parser(families.get("qwen3"))
        for piece in pieces:
            parser.feed(piece)
    return work


def test_the_same_work_counts_the_same() -> None:
    feed(4)
    first, second, more = feed(20), feed(20), feed(40)
    assert (first.calls, first.instructions) == (second.calls, second.instructions)
    assert more.calls > first.calls > 20
    assert more.instructions > first.instructions > 10 * first.calls / 2


def test_what_is_not_the_projects_is_not_counted() -> None:
    with WorkCounter().counting() as work:
        assert sorted(json.loads(json.dumps([3, 1, 2]))) == [1, 2, 3]
    assert (work.calls, work.instructions) == (0, 0)


@pytest.mark.parametrize(
    ("now", "grew"),
    [
        (Work(100, 1000, 0), []),
        (Work(60, 900, 0), [False, False]),
        (Work(101, 1000, 0), [False]),
        (Work(104, 1000, 0), [True]),
        (Work(100, 1041, 0), [True]),
    ],
)
def test_growth_beyond_the_tolerance_is_a_failure(now: Work, grew: list[bool]) -> None:
    assert [fails for _, fails in compare({"a token": now}, BEFORE)] == grew


def test_a_count_that_is_new_or_gone_is_a_failure() -> None:
    assert [fails for _, fails in compare({"another": Work(1, 1, 0)}, BEFORE)] == [True, True]


def test_the_counts_of_the_last_release_are_complete() -> None:
    known = read()
    for protocol in ("messages", "chat", "responses"):
        for what in ("a token", "a request of one token", "a repeated prompt of 50,000 tokens"):
            assert known[f"{what}, {protocol}, vllm-completions"]["calls"] > 10


def test_instructions_are_compared_on_one_version_of_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(counts, "PATH", tmp_path / "counts.json")
    monkeypatch.setattr(counts, "version", lambda: "3.11")
    counts.write({"a token": Work(100, 1000, 0)})
    assert read()["a token"] == {"calls": 100, "instructions": 1000, "peak": 0, "crossings": 0}
    monkeypatch.setattr(counts, "version", lambda: "3.12")
    assert read()["a token"] == {"calls": 100, "peak": 0, "crossings": 0}


MOST_CROSSINGS = {"messages": 12, "chat": 12, "responses": 12}
"""The ways from one area to another that a request takes before the engine is asked. They only ever fall."""


@pytest.mark.parametrize(
    ("module", "area"),
    [
        ("singletree.prompts.tokenizer.tokenizer", "prompts"),
        ("singletree.server.http.app", "server/http"),
        ("singletree.server.doors", None),
        ("singletree.events", None),
        ("json", None),
    ],
)
def test_the_area_of_a_module(module: str, area: str | None) -> None:
    assert area_of(module) == area


async def test_the_main_street_crosses_few_areas() -> None:
    server = InMemoryServer("vllm-completions")
    await server.start()
    try:
        for protocol in PROTOCOLS:
            body = counts.request_body(protocol, opening(""), 1)
            await server.ask(protocol.path, body, [counts.TOKEN])  # Fills caches.
            with AreaCrossings().collecting() as crossed:
                await server.ask(protocol.path, body, [counts.TOKEN])
            assert len(crossed.ways) == MOST_CROSSINGS[protocol.name], sorted(crossed.ways)
    finally:
        await server.close()
