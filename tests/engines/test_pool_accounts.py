"""What a pool knows of a turn while it runs, and that nothing of it is left: load, queue, the tokens that came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from engines.test_pool import END, PROMPT, TOKENS, Flaky, InOrder, assert_idle, pool_of, run, tokens_of
from server.test_takeover import until
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, GenerationJob
from singletree.engines.workers import Worker
from singletree.errors import EngineFailed, Overloaded
from singletree.routing.policy import Choice, RoundRobinPolicy


class Gated(Flaky):
    """Waits for its gate before the first chunk and before each other one; counts the generations that were ended."""

    ended = 0

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """See ``Engine``."""
        assert self.gate is not None
        try:
            for token in self.tokens:
                await self.gate.wait()
                self.gate.clear()
                yield Chunk([token])
        finally:
            self.ended += 1


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("chunks", [0, 1, 2])
async def test_a_cancelled_turn_leaves_nothing_wherever_it_waits(count: int, chunks: int) -> None:
    engine = Gated()
    engine.gate = asyncio.Event()
    others = [Flaky() for _ in range(count - 1)]
    pool = pool_of(engine, *others, policy=InOrder(), hold_seconds=60)
    waiting = asyncio.create_task(run(pool))
    for _ in range(chunks):
        engine.gate.set()
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    assert pool.workers[0].load.generations == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.ended == 1
    assert_idle(pool)
    assert pool.waiting == 0
    assert all(worker.state == "up" for worker in pool.workers)
    await pool.close()


async def test_a_turn_that_is_cancelled_in_the_queue_leaves_nothing() -> None:
    pool = pool_of(Flaky(*[Overloaded("full")] * 1000), hold_seconds=60)
    waiting = asyncio.create_task(run(pool))
    await until(lambda: pool.waiting == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.waiting == 0
    assert_idle(pool)
    await pool.close()


async def test_delivered_tokens_are_those_of_the_turn_and_of_its_account() -> None:
    """What an engine delivers is counted once: for the next engine, for the policy, and for the limit of tokens."""
    accounts: list[list[int]] = []

    class Noting(InOrder):
        def ended(self, job: GenerationJob, choice: Choice, generated: Sequence[int]) -> None:
            accounts.append([*generated])

    class Delivering(Flaky):
        async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
            """See ``Engine``."""
            self.jobs.append(job)
            deliver = job.deliver
            assert deliver is not None
            first, *rest = self.tokens[len(job.prompt_token_ids) - len(PROMPT) :]
            yield Chunk([first])
            for token in rest[:3]:
                assert deliver([token])
            if len(self.jobs) == 1:
                raise EngineFailed("it died")
            yield Chunk(rest[3:], "stop")

    engine, got = Delivering(), list[int]()

    def deliver(token_ids: Sequence[int]) -> bool:
        got.extend(token_ids)
        return True

    pool = pool_of(engine, Flaky(), policy=Noting())
    pool.workers[1].state = "draining"
    job = GenerationJob(PROMPT, Sampling(), "r", stop_token_ids=(END,), deliver=deliver)
    await pool.begin()
    async with aclosing(pool.generate(job)) as chunks:
        async for chunk in chunks:
            got.extend(chunk.token_ids)
    assert got == TOKENS
    assert engine.jobs[1].prompt_token_ids == [*PROMPT, *TOKENS[:4]]
    assert accounts == [TOKENS[:4], TOKENS[4:]]
    assert_idle(pool)
    await pool.close()


@pytest.mark.parametrize("count", [1, 2])
async def test_an_abort_ends_a_turn_that_waits_for_a_place(count: int) -> None:
    engines = [Flaky(*[Overloaded("full")] * 1000) for _ in range(count)]
    pool = pool_of(*engines, hold_seconds=60)
    waiting = asyncio.create_task(run(pool))
    await until(lambda: pool.waiting == 1)
    await pool.abort("r")
    assert [chunk.finish for chunk in await waiting] == ["cancelled"]
    assert pool.waiting == 0
    assert_idle(pool)
    await pool.close()


async def test_the_only_engine_is_used_without_asking_the_policy() -> None:
    class Silent(RoundRobinPolicy):
        async def choose(self, job: GenerationJob, workers: Sequence[Worker]) -> Choice:
            raise AssertionError("there is nothing to choose")

    pool = pool_of(Flaky(2), policy=Silent())
    chunks = await run(pool)
    assert tokens_of(chunks) == TOKENS
    assert all(chunk.route is None for chunk in chunks)
    assert_idle(pool)
    await pool.close()
