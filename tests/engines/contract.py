"""What every engine must do: one list of checks, run on each engine.

To put an engine under it, make a ``Subject`` and run every check of ``CHECKS`` on it, as ``test_contract.py``
does. The checks say nothing about what is generated, only about what ``Engine`` promises.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from secrets import token_hex

import pytest
from msgspec import structs

from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Engine, GenerationJob
from singletree.errors import ContextOverflow, EngineFailed, InvalidRequest

PATIENCE = 120.0
"""Seconds without a chunk after which a generation is taken to hang. How long all of it takes is no promise: on a busy
machine a real engine needs a second for a token."""

ROUNDING = 1.0
"""How much less likely than the best a token may be, in nats, for rounding to have made it the likeliest. Engines add
in another order when several generations run at once; a token of another generation is far less likely."""


@dataclass(frozen=True)
class Subject:
    """An engine under the checks.

    Attributes:
        engine: started, and used by one check after another.
        make: makes another one, not started.
        endless: a prompt that goes on for at least 200 tokens when end tokens are ignored.
        ending: prompts whose answers end by themselves within 200 tokens, are the same up to rounding, and differ.
        reports_cached: whether it tells how much of a prompt was cached.
    """

    engine: Engine
    make: Callable[[], Engine]
    endless: Sequence[int]
    ending: Sequence[Sequence[int]]
    reports_cached: bool = True


Check = Callable[[Subject], Awaitable[None]]
CHECKS: list[Check] = []

_GREEDY = Sampling(temperature=0.0, max_tokens=200)
_LONG = Sampling(temperature=0.0, max_tokens=200, ignore_eos=True)


def _check(check: Check) -> Check:
    CHECKS.append(check)
    return check


async def collect(chunks: AsyncGenerator[Chunk, None]) -> list[Chunk]:
    """All chunks of a generation that should not hang."""
    found: list[Chunk] = []
    clock = asyncio.get_running_loop().time
    async with asyncio.timeout(PATIENCE) as patience:
        async for chunk in chunks:
            found.append(chunk)
            patience.reschedule(clock() + PATIENCE)
    return found


def tokens_of(chunks: Sequence[Chunk]) -> list[int]:
    """The tokens of all chunks."""
    return [token for chunk in chunks for token in chunk.token_ids]


def assert_well_formed(chunks: Sequence[Chunk]) -> None:
    """``finish`` on the last chunk and no other, cached tokens told once at most, no chunk for nothing."""
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert sum(chunk.cached_tokens is not None for chunk in chunks) <= 1
    silent = [c for c in chunks if not c.token_ids and c.finish is None and c.cached_tokens is None]
    assert silent == []


async def _reads_tokens(chunks: AsyncGenerator[Chunk, None]) -> None:
    """Until the first token has come."""
    async with asyncio.timeout(PATIENCE):
        async for chunk in chunks:
            assert chunk.finish is None
            if chunk.token_ids:
                return


async def _is_free(subject: Subject) -> None:
    """As many generations as there are slots run through, so nothing that went before holds one."""
    few = replace(_LONG, max_tokens=2)
    count = min(subject.engine.info().slots, 8)
    runs = [
        collect(subject.engine.generate(GenerationJob(subject.endless, few, f"free-{i}")))
        for i in range(count)
    ]
    for chunks in await asyncio.gather(*runs):
        assert chunks[-1].finish == "length"


@_check
async def describes_itself(subject: Subject) -> None:
    info = subject.engine.info()
    assert info.name
    assert info.context_window > len(subject.endless) + 200
    assert info.slots >= 1


@_check
async def ends_by_itself(subject: Subject) -> None:
    for prompt in subject.ending:
        chunks = await collect(subject.engine.generate(GenerationJob(prompt, _GREEDY, "ending")))
        assert_well_formed(chunks)
        assert chunks[-1].finish == "stop"
        assert 0 < len(tokens_of(chunks)) <= 200
        assert all(chunk.logprobs is None for chunk in chunks)


@_check
async def obeys_max_tokens(subject: Subject) -> None:
    for count in (1, 5):
        sampling = replace(_LONG, max_tokens=count)
        chunks = await collect(subject.engine.generate(GenerationJob(subject.endless, sampling, "short")))
        assert_well_formed(chunks)
        assert chunks[-1].finish == "length"
        assert len(tokens_of(chunks)) == count


@_check
async def takes_max_tokens_of_zero(subject: Subject) -> None:
    chunks = await collect(
        subject.engine.generate(GenerationJob(subject.endless, replace(_LONG, max_tokens=0), "none"))
    )
    assert_well_formed(chunks)
    assert (tokens_of(chunks), chunks[-1].finish) == ([], "length")


@_check
async def clamps_max_tokens_to_the_window(subject: Subject) -> None:
    sampling = replace(_GREEDY, max_tokens=10**9)
    chunks = await collect(subject.engine.generate(GenerationJob(subject.ending[0], sampling, "clamped")))
    assert chunks[-1].finish == "stop"


@_check
async def ends_at_a_stop_token(subject: Subject) -> None:
    few = replace(_LONG, max_tokens=8)
    tokens = tokens_of(await collect(subject.engine.generate(GenerationJob(subject.endless, few, "all"))))
    stop = tokens[4]
    chunks = await collect(
        subject.engine.generate(GenerationJob(subject.endless, few, "cut", stop_token_ids=[stop]))
    )
    assert_well_formed(chunks)
    assert chunks[-1].finish == "stop"
    assert tokens_of(chunks) == tokens[: tokens.index(stop) + 1]


@_check
async def returns_log_probabilities(subject: Subject) -> None:
    sampling = replace(_LONG, max_tokens=4, logprobs=2)
    chunks = await collect(subject.engine.generate(GenerationJob(subject.endless, sampling, "logprobs")))
    assert len(tokens_of(chunks)) == 4
    for chunk in chunks:
        assert chunk.logprobs is not None or not chunk.token_ids
        for token, known in zip(chunk.token_ids, chunk.logprobs or (), strict=True):
            ids = [id for id, _ in known]
            assert ids[0] == token
            assert len(set(ids)) == len(ids)
            assert all(value <= 0.0 for _, value in known)


@_check
async def returns_log_probabilities_of_the_prompt_if_declared(subject: Subject) -> None:
    sampling, prompt = replace(_LONG, max_tokens=2, prompt_logprobs=1), subject.endless
    chunks = await collect(subject.engine.generate(GenerationJob(prompt, sampling, "prompt logprobs")))
    assert len(tokens_of(chunks)) == 2
    received = [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None]
    if not subject.engine.info().returns_prompt_logprobs:
        assert received == []
        return
    [rows] = received
    assert len(rows) == len(prompt)
    assert not rows[0], "it follows nothing"
    assert [row[0][0] for row in rows[1:]] == list(prompt[1:])
    assert all(value <= 0.0 for row in rows for _, value in row)


@_check
async def knows_a_prompt_again(subject: Subject) -> None:
    prompt = subject.ending[0]
    await collect(subject.engine.generate(GenerationJob(prompt, _GREEDY, "first")))
    chunks = await collect(subject.engine.generate(GenerationJob(prompt, _GREEDY, "again")))
    received = [chunk.cached_tokens for chunk in chunks if chunk.cached_tokens is not None]
    if subject.reports_cached:
        assert len(received) == 1
        assert 0 < received[0] <= len(prompt)


@_check
async def aborts_by_id(subject: Subject) -> None:
    async with aclosing(subject.engine.generate(GenerationJob(subject.endless, _LONG, "aborted"))) as chunks:
        await _reads_tokens(chunks)
        await subject.engine.abort("aborted")
        rest = await collect(chunks)
    assert_well_formed(rest)
    assert rest[-1].finish == "cancelled"
    assert len(tokens_of(rest)) < 150
    await _is_free(subject)


@_check
async def aborts_at_once_however_early(subject: Subject) -> None:
    reading = asyncio.create_task(
        collect(subject.engine.generate(GenerationJob(subject.endless, _LONG, "early")))
    )
    await asyncio.sleep(0)
    await subject.engine.abort("early")
    chunks = await reading
    assert chunks[-1].finish == "cancelled"
    await _is_free(subject)


@_check
async def aborts_only_the_one_that_is_meant(subject: Subject) -> None:
    few = replace(_LONG, max_tokens=20)
    other = asyncio.create_task(
        collect(subject.engine.generate(GenerationJob(subject.endless, few, "other")))
    )
    async with aclosing(subject.engine.generate(GenerationJob(subject.endless, _LONG, "meant"))) as chunks:
        await _reads_tokens(chunks)
        await subject.engine.abort("meant")
        assert (await collect(chunks))[-1].finish == "cancelled"
    left = await other
    assert (len(tokens_of(left)), left[-1].finish) == (20, "length")


@_check
async def ignores_unknown_ids(subject: Subject) -> None:
    await subject.engine.abort("nobody")
    await collect(subject.engine.generate(GenerationJob(subject.ending[0], _GREEDY, "over")))
    await subject.engine.abort("over")
    await _is_free(subject)


@_check
async def ends_when_it_is_closed(subject: Subject) -> None:
    for _ in range(2 * min(subject.engine.info().slots, 4)):
        chunks = subject.engine.generate(GenerationJob(subject.endless, _LONG, "left"))
        await _reads_tokens(chunks)
        async with asyncio.timeout(PATIENCE):
            await chunks.aclose()
    await _is_free(subject)


@_check
async def ends_when_its_reader_is_cancelled(subject: Subject) -> None:
    reading = asyncio.create_task(
        collect(subject.engine.generate(GenerationJob(subject.endless, _LONG, "cancelled")))
    )
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await _is_free(subject)


@_check
async def runs_generations_apart(subject: Subject) -> None:
    """What is generated for one prompt follows from that prompt, whatever else runs.

    That is the promise, and not that it is the same to the token: engines round in another way when several run at
    once, and where two tokens are about as likely the answer goes another way from there. So where an answer differs
    from the one that was generated alone, each of its tokens has to be about the likeliest after its own prompt and
    what was generated before it; an engine that does not tell how likely they are has to give the same.
    """
    prompts = list(subject.ending)
    alone = [
        tokens_of(await collect(subject.engine.generate(GenerationJob(p, _GREEDY, "alone")))) for p in prompts
    ]
    assert len({tuple(tokens) for tokens in alone}) == len(prompts)
    runs = [
        collect(subject.engine.generate(GenerationJob(p, _GREEDY, f"among-{i}")))
        for i, p in enumerate(prompts)
    ]
    together = [tokens_of(chunks) for chunks in await asyncio.gather(*runs)]
    for prompt, by_itself, among in zip(prompts, alone, together, strict=True):
        if among != by_itself:
            assert await _shortfall(subject, prompt, among) <= ROUNDING, (by_itself, among)


async def _shortfall(subject: Subject, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """How much less likely than the best one any of ``tokens`` is behind ``prompt`` and those before it, in nats."""
    if not subject.engine.info().returns_prompt_logprobs:
        return float("inf")
    sampling = replace(_GREEDY, max_tokens=1, prompt_logprobs=1)
    chunks = await collect(subject.engine.generate(GenerationJob([*prompt, *tokens], sampling, "scored")))
    [rows] = [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None]
    return max(max(value for _, value in row) - row[0][1] for row in rows[len(prompt) :])


@_check
async def takes_more_than_it_has_slots(subject: Subject) -> None:
    few = replace(_LONG, max_tokens=2)
    count = min(subject.engine.info().slots, 8) + 2
    runs = [
        collect(subject.engine.generate(GenerationJob(subject.endless, few, f"many-{i}")))
        for i in range(count)
    ]
    assert [len(tokens_of(chunks)) for chunks in await asyncio.gather(*runs)] == [2] * count


@_check
async def delivers_in_order(subject: Subject) -> None:
    """Each token is delivered or yielded, once and in order, and delivered only while a chunk is awaited."""
    job = GenerationJob(subject.endless, replace(_LONG, max_tokens=40), "delivered")
    plain = tokens_of(await collect(subject.engine.generate(job)))
    for refused in (0, 1, 3):
        seen = await _Consumer(refused).read(subject.engine, job)
        assert len(seen) == len(plain)
        if seen != plain:
            assert await _shortfall(subject, subject.endless, seen) <= ROUNDING, (plain, seen)


class _Consumer:
    """Takes tokens in both ways; of four calls of ``deliver`` in a row, ``refused`` end with False."""

    def __init__(self, refused: int) -> None:
        self._refused = refused
        self._seen: list[int] = []
        self._calls = 0
        self._waits = False

    def _deliver(self, token_ids: Sequence[int]) -> bool:
        assert self._waits
        assert token_ids
        assert self._seen, "the first tokens are yielded"
        self._seen.extend(token_ids)
        self._calls += 1
        self._waits = self._calls % 4 >= self._refused
        return self._waits

    async def read(self, engine: Engine, job: GenerationJob) -> list[int]:
        async with aclosing(engine.generate(structs.replace(job, deliver=self._deliver))) as chunks:
            self._waits = True
            while chunk := await asyncio.wait_for(anext(chunks, None), PATIENCE):
                self._waits = False
                self._seen.extend(chunk.token_ids)
                await asyncio.sleep(0)
                self._waits = True
        return self._seen


@_check
async def refuses_what_does_not_fit(subject: Subject) -> None:
    window = subject.engine.info().context_window
    prompt = (list(subject.endless) * (window // len(subject.endless) + 1))[:window]
    with pytest.raises(ContextOverflow) as caught:
        await collect(subject.engine.generate(GenerationJob(prompt, _LONG, "long")))
    assert (caught.value.prompt_tokens, caught.value.maximum) == (window, window)


@_check
async def refuses_an_empty_prompt(subject: Subject) -> None:
    with pytest.raises(InvalidRequest):
        await collect(subject.engine.generate(GenerationJob([], _LONG, "empty")))


@_check
async def closing_ends_what_is_in_flight(subject: Subject) -> None:
    engine = subject.make()
    with pytest.raises(EngineFailed):
        await collect(engine.generate(GenerationJob(subject.endless, _LONG, "too early")))
    await engine.start()
    reading = asyncio.create_task(collect(engine.generate(GenerationJob(subject.endless, _LONG, "waiting"))))
    held = engine.generate(GenerationJob(subject.endless, _LONG, "held"))
    await _reads_tokens(held)
    async with asyncio.timeout(PATIENCE):
        await engine.close()
    with pytest.raises(EngineFailed):
        await collect(held)
    with pytest.raises(EngineFailed):
        await reading
    with pytest.raises(EngineFailed):
        await collect(engine.generate(GenerationJob(subject.endless, _LONG, "too late")))
    await engine.close()


async def keeps_tenants_apart(subject: Subject) -> None:
    """Prompts share the cache only with prompts of the same salt: for engines that have salts, not in ``CHECKS``."""
    prompt, counts = list(subject.ending[0]) * 4, []
    run = token_hex(4)  # An engine that was asked before still has the prompts of that time.
    for number, salt in enumerate((f"a{run}", f"a{run}", f"b{run}", "", f"a{run}")):
        job = GenerationJob(prompt, replace(_GREEDY, max_tokens=2), f"salted-{number}", cache_salt=salt)
        chunks = await collect(subject.engine.generate(job))
        counts.append(max(chunk.cached_tokens or 0 for chunk in chunks))
    first, again, other, _, last = counts
    assert (first, other) == (0, 0)
    assert again == last > len(prompt) / 2
