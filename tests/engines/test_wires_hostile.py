"""Every wire survives every hostile answer; see ``hostile.py``."""

from __future__ import annotations

import pytest

from engines.hostile import ASKED, HOSTILE, TOKENS, Check, events, outcome
from engines.vllm_memory import MemoryAnswer
from engines.wire_servers import DIALECTS, Dialect, Step
from singletree.errors import EngineFailed
from singletree.llamacpp import wire as llamacpp_wire
from singletree.remote import events as remote_events


@pytest.fixture(params=list(DIALECTS))
def dialect(request: pytest.FixtureRequest) -> Dialect:
    return DIALECTS[request.param]


@pytest.mark.parametrize("check", HOSTILE, ids=lambda check: check.__name__)
async def test_hostile(dialect: Dialect, check: Check) -> None:
    await check(dialect)


async def test_an_endless_line_is_not_kept(dialect: Dialect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_events, "_MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(llamacpp_wire, "_MAX_EVENT_BYTES", 1000)
    answer = MemoryAnswer(body=[events(dialect)[0], *[b"x" * 100] * 50])
    tokens, _, failure = await outcome(dialect, answer)
    assert tokens == TOKENS[:1]
    assert isinstance(failure, EngineFailed)
    assert answer.closed


@pytest.mark.parametrize("name", ["sglang-incremental", "sglang-cumulative"])
async def test_counts_that_fit_no_stream_are_refused(name: str) -> None:
    first, *_ = events(DIALECTS[name])
    odd = first.replace(b'"completion_tokens": 1', b'"completion_tokens": 9')
    tokens, _, failure = await outcome(DIALECTS[name], MemoryAnswer(body=[first, odd, b""]))
    assert tokens == TOKENS[:1]
    assert isinstance(failure, EngineFailed)
    assert "counts 9 in all" in failure.message


async def test_an_event_that_repeats_tokens_may_have_more_than_it_counts() -> None:
    dialect = DIALECTS["sglang-cumulative"]
    late = dialect.event(Step(ASKED, TOKENS[1:3], TOKENS[:1])).replace(
        b'"completion_tokens": 3', b'"completion_tokens": 2'
    )
    rest = dialect.event(Step(ASKED, TOKENS[3:], TOKENS[:3], "stop"))
    body = [events(dialect)[0], late, rest, dialect.ending(0), b""]
    assert await outcome(dialect, MemoryAnswer(body=body)) == (TOKENS, "stop", None)


async def test_an_event_of_very_many_tokens_is_not_decoded(
    dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_events, "_COUNTED_BYTES", 1000)
    monkeypatch.setattr(remote_events, "_MAX_VALUES", 1000)
    monkeypatch.setattr(remote_events, "_PROMPT_VALUES", 0)
    monkeypatch.setattr(llamacpp_wire, "_MAX_VALUES", 1000)
    first, *_ = events(dialect)
    answer = MemoryAnswer(body=[first, b'data: {"x": [' + b"1," * 5000 + b"1]}\n\n", b""])
    tokens, _, failure = await outcome(dialect, answer)
    assert tokens == TOKENS[:1]
    assert isinstance(failure, EngineFailed)
    assert "values" in failure.message
    assert answer.closed
