"""The contract refuses engines that break it, and no engine that only rounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from engines.contract import Subject, runs_generations_apart
from singletree.engines.engine import Chunk, EngineInfo, GenerationJob, LogprobRow

END = 0
PROMPTS = [(10,), (20,), (30,)]


class Batching:
    """Writes a counted sequence behind each prompt; where several run at once some tokens differ.

    Args:
        gap: by how many nats the other token is less likely; None: it does not tell.
        strays: what the other token is, by the last token of the prompt.
    """

    def __init__(self, gap: float | None, strays: dict[int, int]) -> None:
        self._gap, self._strays = gap, strays
        self._running = 0

    def info(self) -> EngineInfo:
        """Tells log-probabilities of prompts, or not."""
        return EngineInfo("batching", 100, returns_prompt_logprobs=self._gap is not None)

    def _row(self, known: Sequence[int], token: int) -> LogprobRow:
        best = self._next(known)
        if token == best:
            return ((token, -0.1),)
        near = token == self._strays.get(known[0])
        return ((token, -0.1 - ((self._gap or 0.0) if near else 12.0)), (best, -0.1))

    @staticmethod
    def _next(known: Sequence[int]) -> int:
        """Counts three on; behind another token it counts on from there."""
        return END if len(known) > 3 else known[-1] + 1

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """See Engine."""
        known, sampling = list(job.prompt_token_ids), job.sampling
        if sampling.prompt_logprobs is not None:
            rows = [(), *(self._row(known[:at], known[at]) for at in range(1, len(known)))]
            yield Chunk([END], "stop", prompt_logprobs=rows)
            return
        self._running += 1
        try:
            await asyncio.sleep(0)
            while known[-1] != END:
                crowded = self._running > 1 and len(known) == 2
                known.append(self._strays.get(known[0], self._next(known)) if crowded else self._next(known))
                yield Chunk(known[-1:], "stop" if known[-1] == END else None)
        finally:
            self._running -= 1


def subject(engine: Any) -> Subject:
    return Subject(engine, lambda: engine, PROMPTS[0], PROMPTS)


@pytest.mark.parametrize("gap", [0.0, 0.3, None])
async def test_the_same_answers_are_apart(gap: float | None) -> None:
    await runs_generations_apart(subject(Batching(gap, {})))


async def test_two_tokens_that_are_about_as_likely_may_change_places() -> None:
    await runs_generations_apart(subject(Batching(0.3, {20: 77})))


@pytest.mark.parametrize("gap", [5.0, None])
async def test_a_token_of_another_generation_is_refused(gap: float | None) -> None:
    with pytest.raises(AssertionError):
        await runs_generations_apart(subject(Batching(gap, {20: 12})))
