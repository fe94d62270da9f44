"""What is told of the time that a prompt takes to be read."""

from __future__ import annotations

import logging

import pytest

from engines.contract import collect
from engines.small_model import small_model
from singletree.conversation import Sampling
from singletree.engines.engine import GenerationJob
from singletree.llamacpp import prefix_cache
from singletree.llamacpp.engine import LlamaCppEngine
from singletree.llamacpp.prefix_cache import PrefillEstimator, PrefillSpeed

STEPS = [(0, 0.0), (256, 8.0), (512, 17.0), (10_300, 331.0)]


def estimates(
    reading: PrefillEstimator, *steps: tuple[int, float], total: int = 10_300, cached: int = 0
) -> list[str]:
    """What is told on the way."""
    found = (reading.estimate(total, cached, read, seconds) for read, seconds in steps)
    return [each for each in found if each is not None]


def test_the_first_prompt_is_reported_as_soon_as_the_speed_is_known() -> None:
    reading = PrefillEstimator(PrefillSpeed())
    assert estimates(reading, STEPS[0]) == []
    assert estimates(reading, STEPS[1]) == [
        "10044 of 10300 prompt tokens have to be read: about 314 s until the first word, at the measured 32 tokens/s"
    ]
    assert estimates(reading, *STEPS[2:]) == [], "once is enough"


def test_a_prompt_that_takes_minutes_is_reported_again() -> None:
    reading = PrefillEstimator(PrefillSpeed())
    steps = [(at * 256, at * 8.0) for at in range(1, 12)]
    lines = estimates(reading, *steps)
    assert [line.partition(" of")[0] for line in lines] == ["10044", "9020", "7996"]


def test_the_next_one_is_reported_before_it_is_read() -> None:
    speed = PrefillSpeed()
    estimates(PrefillEstimator(speed), *STEPS)
    assert speed.tokens_per_second == pytest.approx(10_300 / 331)
    [line] = estimates(PrefillEstimator(speed), STEPS[0])
    assert line.startswith("10300 of 10300 prompt tokens have to be read: about 331 s")
    assert estimates(PrefillEstimator(speed), (10_200, 0.0), cached=10_200) == [], (
        "what is cached needs no reading"
    )


def test_short_readings_are_not_reported_and_give_no_speed() -> None:
    speed = PrefillSpeed()
    assert estimates(PrefillEstimator(speed), (0, 0.0), (20, 4.0), (31, 9.0), total=2000) == []
    assert speed.tokens_per_second is None
    assert estimates(PrefillEstimator(speed), (0, 0.0), (256, 1.0), (900, 4.0), total=900) == []
    assert estimates(PrefillEstimator(speed), (0, 0.0), (0, 0.0), total=0) == []


def test_a_machine_that_became_busy_is_reported_while_it_reads() -> None:
    speed = PrefillSpeed()
    speed.record(1000, 1.0)
    [line] = estimates(PrefillEstimator(speed), (0, 0.0), (256, 8.0), total=1000)
    assert line.startswith("744 of 1000 prompt tokens")


async def test_llama_cpp_reports_it_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "MIN_REPORTED_SECONDS", 0.0001)
    caplog.set_level(logging.INFO, "singletree.llamacpp.engine")
    engine = LlamaCppEngine(small_model(), slots=1, context_window=512, batch_tokens=64, threads=1)
    await engine.start()
    try:
        prompt = [5 + i % 97 for i in range(200)]
        await collect(engine.generate(GenerationJob(prompt, Sampling(max_tokens=1), "r1")))
        [line] = [record.getMessage() for record in caplog.records]
        assert line.startswith("id=r1 136 of 200 prompt tokens have to be read: about ")
        assert (engine.info().details or {})["prompt_tokens_per_second"] > 0
    finally:
        await engine.close()
