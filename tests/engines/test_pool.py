"""Several engines as one: the contract, failures at every token, engines that come back, hang or are slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from engines.contract import CHECKS, Check, Subject
from engines.wire_servers import DIALECTS, DialectTransport, started
from server.test_takeover import until
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Engine, EngineInfo, GenerationJob, StopKind
from singletree.engines.lifetime import ReconnectingEngine, RestartBackoff
from singletree.engines.workers import Worker
from singletree.errors import (
    BadConfiguration,
    ContextOverflow,
    EngineFailed,
    EngineUnfit,
    InvalidRequest,
    Overloaded,
)
from singletree.routing.health import DRAIN_SECONDS, STALL_SECONDS, WorkerHealth
from singletree.routing.policy import Choice, LeastLoadedPolicy, RoundRobinPolicy
from singletree.routing.pool import MIGRATION_LIMIT, PROGRESS_TOKENS, EnginePool

PROMPT = [1, 2, 3]
END = 99
TOKENS = [*range(10, 22), END]


class Flaky:
    """Generates ``tokens`` behind ``PROMPT``, and goes on with them behind a prompt that has some.

    Args:
        fates: for each generation: after how many tokens it fails, an error to raise at once, ``hang`` to yield one
            token and no more until it is aborted; None, and after the last: it ends well.
        window, slots, kinds: what it reports.
    """

    def __init__(self, *fates: Any, window: int = 4096, slots: int = 2, kinds: tuple[Any, ...] = ()) -> None:
        self.fates = list(fates)
        self.jobs: list[GenerationJob] = []
        self.aborted: list[str] = []
        self.closed = 0
        self.tokens: Sequence[int] = TOKENS
        self.gate: asyncio.Event | None = None
        self._info = EngineInfo("m", window, slots, constraints=kinds, resumable=True)
        self._hanging = asyncio.Event()

    async def start(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Counted."""
        self.closed += 1

    def info(self) -> EngineInfo:
        """As given."""
        return self._info

    async def abort(self, request_id: str) -> None:
        """End a generation that hangs."""
        self.aborted.append(request_id)
        self._hanging.set()

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """See ``Engine``."""
        self.jobs.append(job)
        fate = self.fates.pop(0) if self.fates else None
        if isinstance(fate, Exception):
            raise fate
        if len(job.prompt_token_ids) >= self._info.context_window:
            raise ContextOverflow(len(job.prompt_token_ids), self._info.context_window)
        done = list(job.prompt_token_ids[len(PROMPT) :])
        assert done == list(self.tokens[: len(done)]), "the tokens so far are the beginning of the turn"
        yield Chunk((), cached_tokens=len(job.prompt_token_ids) - 1)
        rest = self.tokens[len(done) :]
        for at, token in enumerate(rest):
            if self.gate is not None:
                await self.gate.wait()
            if at == fate:
                raise EngineFailed("it died")
            finish: StopKind | None = "stop" if at == len(rest) - 1 else None
            yield Chunk([token], finish)
            if fate == "hang":
                await self._hanging.wait()
                yield Chunk((), "cancelled")
                return


def pool_of(*engines: Engine, **settings: Any) -> EnginePool:
    """The engines as one; their names are their numbers."""
    return EnginePool([Worker(str(i), engine) for i, engine in enumerate(engines)], **settings)


class InOrder(RoundRobinPolicy):
    """Chooses the first engine that there is."""

    async def choose(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice:
        """See ``RoutingPolicy``."""
        return Choice(workers[0], reason="the first")


async def run(pool: EnginePool, job: GenerationJob | None = None) -> list[Chunk]:
    """All chunks of one generation; the pool is begun, and not closed."""
    await pool.begin()
    chunks = pool.generate(job or GenerationJob(PROMPT, Sampling(), "r", stop_token_ids=(END,)))
    async with aclosing(chunks):
        return [chunk async for chunk in chunks]


def tokens_of(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def assert_idle(pool: EnginePool) -> None:
    """Nothing is accounted for any more."""
    for worker in pool.workers:
        assert (worker.load.generations, worker.load.prefill_tokens, worker.load.decode_tokens) == (0, 0, 0)


# The contract


def remote_pool() -> EnginePool:
    """Two servers in memory, one of vLLM and one of SGLang, which generate alike."""

    def connecting(name: str) -> ReconnectingEngine:
        return ReconnectingEngine(name, lambda: started(DialectTransport(DIALECTS[name])))

    return pool_of(connecting("vllm-completions"), connecting("sglang-incremental"), hold_seconds=5)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject() -> AsyncIterator[Subject]:
    engine = remote_pool()
    await engine.start()
    ending = [list(range(start, start + 30)) for start in (5, 106, 207)]
    yield Subject(engine, remote_pool, list(range(300, 340)), ending, reports_cached=False)
    assert_idle(engine)
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(subject: Subject, check: Check) -> None:
    await check(subject)


# Failures


@pytest.mark.parametrize("first", range(len(TOKENS) + 1))
async def test_a_turn_is_whole_wherever_two_engines_die(first: int) -> None:
    for second in range(len(TOKENS) - first + 1):
        engines = Flaky(first), Flaky(second), Flaky(None)
        pool = pool_of(*engines)
        chunks = await run(pool)
        await pool.close()
        assert tokens_of(chunks) == TOKENS
        assert [chunk.finish for chunk in chunks if chunk.finish] == ["stop"]
        assert sum(chunk.cached_tokens is not None for chunk in chunks) == 1, "of the first engine alone"
        assert [chunk for chunk in chunks if not chunk.token_ids and not chunk.finish and not chunk.route][
            1:
        ] == []
        assert_idle(pool)
        assert sum(len(engine.jobs) for engine in engines) <= 3


async def test_the_first_chunk_of_each_engine_names_it() -> None:
    pool = pool_of(Flaky(3), Flaky(EngineFailed("refused")), Flaky(None), policy=InOrder())
    routes = [chunk.route for chunk in await run(pool) if chunk.route is not None]
    assert [(route.worker, route.failovers) for route in routes] == [("0", 0), ("2", 2)]
    assert routes[0].reason
    await pool.close()


async def test_a_pool_of_one_names_no_engine() -> None:
    assert all(chunk.route is None for chunk in await run(pool_of(Flaky())))


async def test_a_failure_before_the_first_token_is_another_engines_turn() -> None:
    bad, good = Flaky(EngineFailed("refused")), Flaky()
    pool = pool_of(bad, good)
    assert tokens_of(await run(pool)) == TOKENS
    assert [job.prompt_token_ids for job in good.jobs] == [PROMPT]
    await pool.close()


async def test_as_many_failures_in_a_row_as_the_limit() -> None:
    for limit in range(4):
        engines = [Flaky(*[1] * 9) for _ in range(6)]
        pool = pool_of(*engines, migration_limit=limit)
        with pytest.raises(EngineFailed, match="died"):
            await run(pool)
        assert sum(len(engine.jobs) for engine in engines) == limit + 1
        await pool.close()


async def test_a_long_turn_survives_more_failures_than_the_limit() -> None:
    engines = [Flaky(*[PROGRESS_TOKENS] * 9) for _ in range(2)]
    for engine in engines:
        engine.tokens = [*([7] * PROGRESS_TOKENS * (MIGRATION_LIMIT + 3)), END]
    pool = pool_of(*engines)
    assert tokens_of(await run(pool)) == engines[0].tokens
    await pool.close()


async def test_a_lasting_cause_is_only_that_engines() -> None:
    pool = pool_of(Flaky(EngineUnfit("the key is wrong")), Flaky())
    assert tokens_of(await run(pool)) == TOKENS
    await pool.close()
    both = pool_of(Flaky(EngineUnfit("the key is wrong")), Flaky(EngineUnfit("no such model")))
    with pytest.raises(EngineUnfit, match="key"):
        await run(both)
    await both.close()


async def test_a_full_engine_is_passed_over() -> None:
    full, free = Flaky(Overloaded("full", retry_after=9)), Flaky()
    pool = pool_of(full, free)
    assert tokens_of(await run(pool)) == TOKENS
    assert len(full.jobs) == 1
    await pool.close()
    pool = pool_of(*(Flaky(Overloaded("full", retry_after=after)) for after in (9, 4)))
    with pytest.raises(Overloaded, match="all engines are full") as caught:
        await run(pool)
    assert caught.value.retry_after == 4
    await pool.close()


async def test_a_refusal_of_the_request_is_the_clients() -> None:
    pool = pool_of(Flaky(InvalidRequest("no")), Flaky())
    with pytest.raises(InvalidRequest):
        await run(pool)
    await pool.close()


async def test_an_abort_goes_to_the_engine_that_generates() -> None:
    engines = Flaky(2), Flaky("hang"), Flaky()
    pool = pool_of(*engines, policy=InOrder())
    await pool.begin()
    async with aclosing(pool.generate(GenerationJob(PROMPT, Sampling(), "r"))) as chunks:
        found = [await anext(chunks) for _ in range(4)]
        await pool.abort("another")
        await pool.abort("r")
        found += [chunk async for chunk in chunks]
    assert found[-1].finish == "cancelled"
    assert [engine.aborted for engine in engines] == [[], ["r"], []]
    assert_idle(pool)
    await pool.close()


# What the pool reports


async def test_the_pool_can_do_what_all_can() -> None:
    pool = pool_of(
        Flaky(window=100, slots=3, kinds=("structural_tag", "lark", "regex")),
        Flaky(window=80, slots=4, kinds=("regex", "lark")),
    )
    info = pool.info()
    assert (info.context_window, info.slots, info.constraints) == (80, 7, ("lark", "regex"))
    assert info.details is not None
    assert info.details["engines"] == {"0": "up", "1": "up"}


async def test_a_job_goes_where_it_fits() -> None:
    small, large = Flaky(window=4), Flaky()
    pool = pool_of(small, large)
    for _ in range(2):
        job = GenerationJob([*PROMPT, *TOKENS[:3]], Sampling(), "r")
        assert tokens_of(await run(pool, job)) == TOKENS[3:]
    assert small.jobs == []
    await pool.close()


async def test_load_is_what_runs() -> None:
    engine = Flaky()
    engine.gate = asyncio.Event()
    pool = pool_of(engine, Flaky(), policy=LeastLoadedPolicy(Random(0)))
    await pool.begin()
    engine.gate.set()
    chunks = pool.generate(GenerationJob(PROMPT, Sampling(max_tokens=50), "r", expected_tokens=20))
    await anext(chunks)
    [worker] = [worker for worker in pool.workers if worker.load.generations]
    assert (worker.load.prefill_tokens, worker.load.decode_tokens) == (0, len(PROMPT) + 20)
    await chunks.aclose()
    assert_idle(pool)
    await pool.close()


# Engines that go down and come back


class Revived:
    """``connect`` of an engine whose server is down for some tries."""

    def __init__(self, *outcomes: Engine | Exception) -> None:
        self.outcomes = list(outcomes)
        self.tries = 0

    async def __call__(self) -> Engine:
        self.tries += 1
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


DOWN = EngineFailed("nobody answers")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try at once, and never wait."""
    monkeypatch.setattr(RestartBackoff, "check", lambda self: None)


async def test_an_engine_that_comes_back_is_used_again() -> None:
    first, again = Flaky(2), Flaky()
    connect = Revived(first, DOWN, again)
    pool = pool_of(ReconnectingEngine("a", connect), hold_seconds=60)
    await pool.start()
    assert tokens_of(await run(pool)) == TOKENS, "held until its only engine is back"
    assert (connect.tries, pool.workers[0].state) == (3, "up")
    assert [job.prompt_token_ids for job in again.jobs] == [[*PROMPT, *TOKENS[:2]]]
    assert first.closed == 1, "the old connection is closed when nothing runs on it"
    await pool.close()
    assert again.closed == 1


async def test_others_go_on_while_an_engine_is_connected_anew() -> None:
    old, new = Flaky(None, EngineFailed("poison")), Flaky()
    old.gate = asyncio.Event()
    pool = pool_of(ReconnectingEngine("a", Revived(old, new)), hold_seconds=60)
    await pool.start()
    healthy = asyncio.create_task(run(pool))
    await until(lambda: len(old.jobs) == 1)
    assert tokens_of(await run(pool)) == TOKENS
    assert (old.closed, len(new.jobs)) == (0, 1)
    old.gate.set()
    assert tokens_of(await healthy) == TOKENS
    assert old.closed == 1
    await pool.close()


async def test_when_all_are_gone_turns_are_held_and_then_refused() -> None:
    connect = Revived(Flaky(EngineFailed("gone")), *[DOWN] * 10_000)
    pool = pool_of(ReconnectingEngine("a", connect), hold_seconds=0)
    await pool.start()
    with pytest.raises(Overloaded, match="no engine of this model answers") as caught:
        await run(pool)
    assert caught.value.retry_after >= 1
    await pool.close()


async def test_a_turn_in_the_middle_ends_with_its_failure() -> None:
    pool = pool_of(ReconnectingEngine("a", Revived(Flaky(2), *[DOWN] * 10_000)), hold_seconds=0)
    await pool.start()
    with pytest.raises(EngineFailed, match="died"):
        await run(pool)
    await pool.close()


async def test_some_may_be_down_at_the_start() -> None:
    late = Flaky()
    connect = Revived(DOWN, DOWN, late)
    pool = pool_of(ReconnectingEngine("a", connect), ReconnectingEngine("b", Revived(Flaky())))
    await pool.start()
    await until(lambda: pool.workers[0].state == "up")
    for _ in range(2):
        assert tokens_of(await run(pool)) == TOKENS
    assert len(late.jobs) == 1
    await pool.close()


async def test_not_all_may_be_down_at_the_start() -> None:
    pool = pool_of(*(ReconnectingEngine(name, Revived(DOWN)) for name in "ab"))
    with pytest.raises(EngineFailed, match="nobody answers"):
        await pool.start()


async def test_an_engine_that_does_not_fit_stops_the_start() -> None:
    fine, wrong = Flaky(), BadConfiguration("another model")
    pool = pool_of(ReconnectingEngine("a", Revived(fine)), ReconnectingEngine("b", Revived(wrong)))
    with pytest.raises(BadConfiguration, match="another model"):
        await pool.start()
    assert fine.closed == 1


async def test_the_policy_learns_that_a_cache_is_lost() -> None:
    class Noting(RoundRobinPolicy):
        def __init__(self) -> None:
            super().__init__()
            self.lost: list[str] = []
            self.generated: list[list[int]] = []

        def worker_lost(self, worker: Worker) -> None:
            self.lost.append(worker.name)

        def ended(self, job: GenerationJob, choice: Choice, generated: Sequence[int]) -> None:
            self.generated.append(list(generated))

    policy = Noting()
    engines = ReconnectingEngine("a", Revived(Flaky(4), Flaky())), ReconnectingEngine("b", Revived(Flaky()))
    pool = pool_of(*engines, policy=policy)
    await pool.start()
    assert tokens_of(await run(pool)) == TOKENS
    await until(lambda: policy.lost == ["0", "0"])
    assert policy.generated == [TOKENS[:4], TOKENS[4:]]
    await pool.close()


# Engines that hang or are slow


async def test_a_turn_leaves_an_engine_that_hangs() -> None:
    hanging, other = Flaky("hang"), Flaky()
    pool = pool_of(hanging, other)
    await pool.begin()
    chunks = pool.generate(GenerationJob(PROMPT, Sampling(), "r"))
    found = [await anext(chunks), await anext(chunks)]
    now = asyncio.get_running_loop().time()
    pool._health.check(now + STALL_SECONDS - 1)
    await asyncio.sleep(0)
    assert hanging.aborted == []
    pool._health.check(now + STALL_SECONDS + 1)
    found += [chunk async for chunk in chunks]
    assert (tokens_of(found), found[-1].finish) == (TOKENS, "stop")
    assert hanging.aborted == ["r"]
    await pool.close()


async def test_the_time_to_read_a_long_prompt_is_no_hanging() -> None:
    workers = [Worker(str(i), Flaky()) for i in range(2)]
    health = WorkerHealth(workers, RoundRobinPolicy())
    running = health.began(workers[0], "r", prompt_tokens=100_000)
    now = asyncio.get_running_loop().time()
    health.check(now + STALL_SECONDS + 900)
    assert not running.stalled
    health.progressed(running, 1)
    health.check(asyncio.get_running_loop().time() + STALL_SECONDS + 1)
    assert running.stalled
    await health.close()


async def test_nobody_is_taken_from_the_only_engine() -> None:
    workers = [Worker("a", Flaky()), Worker("b", Flaky(), state="down")]
    health = WorkerHealth(workers, RoundRobinPolicy())
    running = health.began(workers[0], "r", prompt_tokens=1)
    health.check(asyncio.get_running_loop().time() + 10_000)
    assert not running.stalled


async def test_a_slow_engine_is_drained_and_tried_again() -> None:
    workers = [Worker(name, Flaky()) for name in "abc"]
    health = WorkerHealth(workers, RoundRobinPolicy())
    paces = health._paces
    for worker, seconds in zip(workers, (0.02, 0.03, 0.3), strict=True):
        paces[worker].add(seconds * 100, 100)
    health.check(1000.0)
    assert [worker.state for worker in workers] == ["up", "up", "draining"]
    assert health.available() == workers[:2]
    health.check(1000.0 + DRAIN_SECONDS - 1)
    assert health.available() == workers[:2]
    health.check(1000.0 + DRAIN_SECONDS)
    assert health.available() == workers
    health._paces[workers[2]].add(30, 100)
    health.check(2000.0)
    health.check(2000.0 + 2 * DRAIN_SECONDS - 1)
    assert health.available() == workers[:2], "longer the second time"


async def test_alike_engines_are_not_slow() -> None:
    workers = [Worker(name, Flaky()) for name in "ab"]
    health = WorkerHealth(workers, RoundRobinPolicy())
    for worker, seconds in zip(workers, (0.0001, 0.04), strict=True):
        health._paces[worker].add(seconds * 100, 100)
    health.check(1000.0)
    assert [worker.state for worker in workers] == ["up", "up"], "fast enough for anybody"


async def test_slow_engines_are_better_than_none() -> None:
    workers = [Worker("a", Flaky(), state="draining"), Worker("b", Flaky(), state="down")]
    assert WorkerHealth(workers, RoundRobinPolicy()).available() == workers[:1]
