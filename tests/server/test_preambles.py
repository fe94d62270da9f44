"""What is logged about the first turn of each harness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from singletree.cli.launch import HARNESSES
from singletree.engines.engine import Chunk, EngineInfo, GenerationJob
from singletree.errors import EngineFailed
from singletree.llamacpp.preambles import PREAMBLES, describe_first_turns, log_first_turns


class Reader:
    """An engine that reads; its speed is known afterwards."""

    def __init__(self, speed: float | None, failure: Exception | None = None) -> None:
        self.jobs: list[GenerationJob] = []
        self._speed = speed
        self._failure = failure

    async def start(self) -> None:
        raise AssertionError

    async def close(self) -> None:
        raise AssertionError

    async def abort(self, request_id: str) -> None:
        raise AssertionError

    def info(self) -> EngineInfo:
        speed = self._speed if self.jobs else None
        return EngineInfo("m", 8192, details={"prompt_tokens_per_second": speed})

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        self.jobs.append(job)
        await asyncio.sleep(0)
        if self._failure is not None:
            raise self._failure
        yield Chunk((5,), "length")


def test_every_harness_has_a_preamble() -> None:
    assert {harness.program for harness in HARNESSES} == set(PREAMBLES)


def test_a_first_turn_is_estimated_for_what_fits_the_window() -> None:
    assert describe_first_turns(40.0, 16_000) == (
        "prompts are read at about 40 tokens/s here, slower towards the end of a long one; a first turn takes at "
        "least: pi 35 s, Codex 2 min, Cline 2 min, OpenClaw 3 min, OpenCode 3 min, GitHub Copilot CLI 5 min, "
        "Claude Code 5 min"
    )
    assert describe_first_turns(0.25, 2048).endswith("at least: pi 93 min")
    assert "window of 1000 tokens" in describe_first_turns(3000.0, 1000)


async def test_the_speed_is_measured_behind_all_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "singletree.llamacpp.preambles")
    engine = Reader(100.0)
    await log_first_turns(engine, "a model")
    [job] = engine.jobs
    assert (job.priority > 0, job.sampling.max_tokens, len(job.prompt_token_ids) < 128) == (True, 1, True)
    assert "a model: prompts are read at about 100 tokens/s here" in caplog.text


@pytest.mark.parametrize("engine", [Reader(None), Reader(None, EngineFailed("it was closed"))])
async def test_nothing_is_promised_that_was_not_measured(
    engine: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "singletree.llamacpp.preambles")
    await log_first_turns(engine, "a model")
    assert caplog.text == ""
