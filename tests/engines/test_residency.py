"""Residency: whose turns go on and whose wait, where the caches are too small for all sessions."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from engines.routing_jobs import job, now, workers
from singletree.engines.engine import Chunk, GenerationJob
from singletree.engines.workers import Worker
from singletree.routing.kv_policy import KvAwarePolicy
from singletree.routing.policy import Choice
from singletree.routing.predicted_cache import Mean, Residency


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def policy(
    pool: list[Worker],
    clock: Watch,
    *,
    wait: float = 30.0,
    overhead: float = 0.0,
    reading: float = 100.0,
    queued: int = 4000,
    cached: int = 0,
    generating: float = 0.0,
    pause: float = 1.0,
) -> KvAwarePolicy:
    """A policy that has seen two turns of a session elsewhere.

    Args:
        overhead: seconds until the prompt of the first turn was read, of which nearly all was cached.
        reading: how much longer that of the second one took.
        queued: how many tokens the engine had to read until then, as was expected.
        cached: how many of them it had, as it reported behind the last token.
        generating, pause: seconds from then to the end, and from there to the next turn.
    """
    made = KvAwarePolicy("m", wait=wait, clock=clock)
    now(made.start(pool))
    for tokens, seconds in ((100, overhead), (queued, overhead + reading)):
        elsewhere = workers(1, kv_cache_tokens=10_000)
        choice = made.choose_now(asked := prompt("z"), elsewhere)
        assert choice is not None
        choice.worker.load.prefill_tokens = tokens
        made.sent(asked, choice)
        clock.seconds += seconds
        made.prompt_read(asked, choice, Chunk([1]))
        clock.seconds += generating
        made.prompt_read(asked, choice, Chunk([], cached_tokens=cached))
        made.ended(asked, choice, [1])
        made.worker_lost(choice.worker)
        clock.seconds += pause
    return made


def prompt(session: str, tokens: int = 4000) -> GenerationJob:
    return job([ord(session)] * tokens, session)


def play(routing: KvAwarePolicy, asked: GenerationJob, pool: list[Worker]) -> Choice | None:
    """A whole turn; None if it has to wait."""
    choice = routing.choose_now(asked, pool)
    if choice is not None:
        routing.sent(asked, choice)
        routing.prompt_read(asked, choice, Chunk([1]))
        routing.ended(asked, choice, [1, 2])
    return choice


def test_a_session_waits_until_another_has_been_idle() -> None:
    pool, clock = workers(1, kv_cache_tokens=10_000), Watch()
    routing = policy(pool, clock)
    assert play(routing, prompt("a"), pool)
    assert play(routing, prompt("b"), pool)
    assert play(routing, waiting := prompt("c"), pool) is None
    clock.seconds += 6
    assert play(routing, prompt("b", 4100), pool), "a resident goes on"
    assert play(routing, waiting, pool) is None
    clock.seconds += 6
    assert play(routing, waiting, pool), "a has been idle for twelve seconds"
    assert play(routing, prompt("a", 4100), pool) is None


def test_no_turn_waits_longer_than_its_reading_would_hold_up_the_others() -> None:
    pool, clock = workers(1, kv_cache_tokens=10_000), Watch()
    routing = policy(pool, clock, reading=2.0)
    for name in ("a", "b"):
        assert play(routing, prompt(name), pool)
    assert play(routing, waiting := prompt("c"), pool) is None
    assert play(routing, shorter := prompt("d", 2000), pool) is None
    clock.seconds += 4.5
    assert play(routing, waiting, pool) is None
    assert play(routing, shorter, pool), "one second, for each of two residents and of two that wait"
    clock.seconds += 1
    assert play(routing, waiting, pool) is None
    clock.seconds += 1
    assert play(routing, waiting, pool), "two seconds, for each of two residents and of one that waits"


@pytest.mark.parametrize(
    ("seen", "waits"),
    [
        ({"reading": 2.0, "pause": 4.0}, True),
        ({"reading": 1.0, "pause": 4.0}, False),
        ({"reading": 2.0, "pause": 5.0}, False),
        ({"reading": 2.0, "pause": 4.0, "generating": 1.0}, False),
        ({"reading": 2.0, "pause": 4.0, "queued": 8000}, False),
        ({"reading": 1.0, "pause": 4.0, "cached": 2000}, True),
        ({"reading": 1.0, "pause": 4.0, "overhead": 3.0}, False),
        ({"reading": 2.0, "pause": 4.0, "overhead": 3.0}, True),
        # Behind a long pause a session has left its room: 4.5 s are less, and 13.5 s are more.
        ({"reading": 2.0, "pause": 3600.0}, False),
        ({"reading": 6.0, "pause": 3600.0}, True),
    ],
)
def test_turns_wait_where_to_read_all_anew_takes_longer_than_sessions_take_to_come_back(
    seen: dict[str, Any], waits: bool
) -> None:
    pool, clock = (
        workers(1, kv_cache_tokens=10_000),
        Watch(),
    )  # 9,000 tokens of room: 4.5 s, if 4,000 take 2 s
    routing = policy(pool, clock, **seen)
    for name in ("a", "b"):
        assert play(routing, prompt(name), pool)
    assert (play(routing, prompt("c"), pool) is None) == waits


def test_a_new_session_evicts_others_only_where_little_of_it_has_to_be_read() -> None:
    for own, chosen in ((4700, 1), (300, 0)):
        pool, clock = workers(2, kv_cache_tokens=10_000), Watch()
        routing = policy(pool, clock, wait=0.0)
        for name in ("a", "b"):
            assert play(routing, prompt(name, 4400), pool[:1])
        forked = [ord("a")] * (4700 - own) + [9] * own
        choice = routing.choose_now(job(forked, "c"), pool)
        assert choice is not None
        assert choice.worker is pool[chosen]


def test_a_mean_follows_its_samples() -> None:
    assert Mean().value is None
    mean = Mean()
    for sample in (1.0, 2.0, 6.0):
        mean.add(sample)
    assert mean == Mean(3.0, 3)
    for _ in range(1000):
        mean.add(9.0)
    assert mean.value == pytest.approx(9.0, abs=0.01)


def test_a_resident_moves_only_where_it_evicts_nobody() -> None:
    pool, clock = workers(3, kv_cache_tokens=10_000), Watch()
    routing = policy(pool, clock)
    first = play(routing, prompt("a"), pool[:1])
    for name in ("b", "c"):
        assert play(routing, prompt(name), pool[1:2])
    assert first is not None
    first.worker.load.prefill_tokens = 6000
    for able, chosen in ((pool[:2], pool[0]), (pool, pool[2])):
        choice = routing.choose_now(prompt("a", 4100), able)
        assert choice is not None
        assert choice.worker is chosen


def test_no_turn_waits_for_ever_and_priority_goes_first() -> None:
    pool, clock = workers(1, kv_cache_tokens=10_000), Watch()
    routing = policy(pool, clock)
    for name in ("a", "b"):
        assert play(routing, prompt(name), pool)
    late, urgent = prompt("c"), job([9] * 4000, "d", priority=-1)
    assert play(routing, late, pool) is None
    assert play(routing, urgent, pool) is None
    for _ in range(5):
        clock.seconds += 5
        for name in ("a", "b"):
            assert play(routing, prompt(name), pool)
    clock.seconds += 4
    assert play(routing, prompt("a"), pool), "it stays"
    assert play(routing, late, pool) is None
    clock.seconds += 7
    assert play(routing, late, pool), "thirty seconds are over"


def test_room_goes_to_the_urgent_first() -> None:
    pool, clock = workers(1, kv_cache_tokens=10_000), Watch()
    routing = policy(pool, clock)
    for name in ("a", "b"):
        assert play(routing, prompt(name), pool)
    late, urgent = prompt("c"), job([9] * 4000, "d", priority=-1)
    assert play(routing, late, pool) is None
    assert play(routing, urgent, pool) is None
    clock.seconds += 9
    assert play(routing, prompt("b"), pool)
    clock.seconds += 3
    assert play(routing, late, pool) is None, "there is room for one"
    assert play(routing, urgent, pool)


def test_who_outgrows_the_room_takes_it_from_the_last_that_came() -> None:
    pool, clock = workers(1, kv_cache_tokens=10_000), Watch()
    routing = policy(pool, clock)
    for name in ("a", "b"):
        assert play(routing, prompt(name), pool)
    assert play(routing, prompt("a", 5500), pool)
    assert play(routing, job([1] * 3600, "b"), pool) is None, "nothing of it is cached"


def test_who_grows_a_little_displaces_nobody() -> None:
    pool, clock = workers(1, kv_cache_tokens=10_000), Watch()
    routing = policy(pool, clock)
    for name in ("a", "b"):
        assert play(routing, prompt(name), pool)
    assert play(routing, prompt("a", 5400), pool), "9,400 of 9,500 tokens"
    assert play(routing, job([1] * 4000, "b"), pool), "it is resident, whatever is cached of it"
    assert play(routing, job([1] * 10, "c"), pool) is None, "more than the 9,000 for those that come"


def test_sessions_with_one_system_prompt_do_not_all_gather_where_it_is_cached() -> None:
    pool, clock = workers(4, kv_cache_tokens=100_000), Watch()
    routing = policy(pool, clock)
    system = [7] * 1600
    homes = []
    for number in range(16):
        choice = play(routing, job([*system, *[number + 100] * 3000], f"s{number}"), pool)
        assert choice is not None
        homes.append(choice.worker.name)
    counts = Counter(homes)
    assert len(counts) > 1
    assert max(counts.values()) < 16


def test_nobody_waits_without_need() -> None:
    clock = Watch()
    for pool, wait in (
        (workers(1), 30.0),  # whose cache has an unknown size
        (workers(2, kv_cache_tokens=100_000), 30.0),
        (workers(1, kv_cache_tokens=1000), 0.0),
    ):
        routing = policy(pool, clock, wait=wait)
        assert all(play(routing, prompt(name), pool) for name in "abcd")
    routing, pool = KvAwarePolicy("m", clock=clock), workers(1, kv_cache_tokens=1000)
    assert all(play(routing, prompt(name), pool) for name in "abcd"), "no speed is known"
    routing = policy(pool := workers(1, kv_cache_tokens=1000), clock)
    assert play(routing, prompt("a"), pool), "larger than the cache, and alone"
    assert all(play(routing, job([n] * 4000), pool) for n in range(4)), "sessions without a name"


def test_an_engine_that_lost_its_cache_has_room() -> None:
    pool, clock = workers(1, kv_cache_tokens=10_000), Watch()
    routing = policy(pool, clock)
    for name in ("a", "b"):
        assert play(routing, prompt(name), pool)
    assert play(routing, waiting := prompt("c"), pool) is None
    routing.worker_lost(pool[0])
    assert play(routing, later := prompt("d"), pool) is None, "who waits goes first"
    assert play(routing, waiting, pool)
    assert play(routing, later, pool)


async def test_the_pool_waits_in_choose_and_the_reason_says_so() -> None:
    pool, clock = workers(1, kv_cache_tokens=10_000), Watch()
    routing = policy(pool, clock)
    for name in ("a", "b"):
        assert play(routing, prompt(name), pool)
    asked = asyncio.create_task(routing.choose(prompt("c"), pool))
    gone = asyncio.create_task(routing.choose(job([7] * 4000, "d", priority=-9), pool))
    await asyncio.sleep(0.01)
    assert not asked.done()
    gone.cancel()
    clock.seconds += 12
    choice = await asyncio.wait_for(asked, 5)
    assert choice.reason.endswith("waited 12.0 s for room in a cache")


def test_the_books_balance() -> None:
    residency = Residency()
    for name in "abc":
        residency.began(name, 0, 100, 250, 0.0)
    assert len(residency) == 3, "running turns are not displaced"
    for name in "abc":
        residency.ended(name, 100, 250, 1.0)
    assert len(residency) == 2
    residency.ended("b", 100, 250, 1.0)
    residency.began("a", 0, 100, 250, 1.0)
    residency.ended("a", 100, 250, 1.0)
    assert residency.with_room(50, [250], [0], 1.0) == [0]
    assert residency.with_room(51, [250], [0], 1.0) == []
    residency.began("a", 1, 120, 250, 2.0)
    assert residency.with_room(150, [250, 250], [0, 1], 2.0) == [0]
    residency.ended("a", 120, 250, 2.0)
    residency.lost(1)
    assert residency.with_room(150, [250, 250], [0, 1], 3.0) == [0, 1]
    assert residency.with_room(200, [250, 250], [0, 1], 20.0) == [0, 1], "all have been idle"
    assert len(residency) == 0
