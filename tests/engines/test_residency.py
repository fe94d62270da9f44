"""Residency: whose turns go on and whose wait, where the caches are too small for all sessions."""

from __future__ import annotations

import asyncio
from collections import Counter

from engines.routing_jobs import job, now, workers
from singletree.engines.engine import Chunk, GenerationJob
from singletree.engines.workers import Worker
from singletree.routing.kv_policy import KvAwarePolicy
from singletree.routing.policy import Choice
from singletree.routing.residency import Patience, Residency

PATIENCE = Patience(idle=10.0, wait=30.0, tokens=0)


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def policy(pool: list[Worker], clock: Watch, patience: Patience = PATIENCE) -> KvAwarePolicy:
    made = KvAwarePolicy("m", patience=patience, clock=clock)
    now(made.start(pool))
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


def test_no_turn_waits_much_longer_than_it_takes_to_be_read() -> None:
    pool, clock = workers(1, kv_cache_tokens=10_000), Watch()
    routing = policy(pool, clock)
    for name in ("a", "b"):
        choice = routing.choose_now(asked := prompt(name), pool)
        assert choice is not None
        routing.sent(asked, choice)
        clock.seconds += 0.5  # 4,000 tokens
        routing.prompt_read(asked, choice, Chunk([1], cached_tokens=0))
        routing.ended(asked, choice, [1])
    assert play(routing, waiting := prompt("c"), pool) is None
    clock.seconds += 3.8
    assert play(routing, waiting, pool) is None
    clock.seconds += 0.3
    assert play(routing, waiting, pool), "eight times half a second are over"


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
    for pool, patience in (
        (workers(1), PATIENCE),  # whose cache has an unknown size
        (workers(2, kv_cache_tokens=100_000), PATIENCE),
        (workers(1, kv_cache_tokens=1000), Patience(wait=0.0, tokens=0)),
        (workers(1, kv_cache_tokens=1000), Patience(tokens=5000)),  # it is read in a moment
    ):
        routing = policy(pool, clock, patience)
        assert all(play(routing, prompt(name), pool) for name in "abcd")
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
    residency = Residency(PATIENCE)
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
