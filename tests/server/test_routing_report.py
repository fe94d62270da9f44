"""Which of several engines generated, what was expected of its cache and what came: metrics, log, report, explain."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from singletree.cli.session_commands import explain
from singletree.engines.engine import Chunk, EngineInfo, GenerationJob, Route
from singletree.records.record_queue import RecordFile, RecordQueue
from singletree.records.request_records import RequestRecords
from singletree.server.sessions import PATH as SESSIONS

from .serving import MODEL, body, serving

PATHS = ("/v1/messages", "/v1/chat/completions", "/v1/responses")


class Routed:
    """An engine that answers as a pool does.

    Attributes:
        jobs: what it was asked for.
    """

    def __init__(self, route: Route | None, cached: int | None = 30) -> None:
        self.route, self.cached = route, cached
        self.jobs: list[GenerationJob] = []

    async def start(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    def info(self) -> EngineInfo:
        """Roomy."""
        return EngineInfo("routed", 8192)

    async def abort(self, request_id: str) -> None:
        """Nothing to do."""

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """See Engine."""
        self.jobs.append(job)
        yield Chunk([65], route=self.route)
        yield Chunk([66], "stop", cached_tokens=self.cached)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_the_engine_and_its_prediction_are_reported(
    path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    route = Route("http://b:8000", 40, "40 of 50 tokens cached, the most", waited_seconds=1.5)
    caplog.set_level(logging.INFO, "singletree.requests")
    async with serving(engine=Routed(route)) as served:
        headers = {"x-singletree-session": "s"}
        assert (await served.client.post(path, body(path, "hi", stream=stream), headers)).status == 200
        metrics = (await served.client.get("/metrics")).body.decode()
        (step,) = (await served.client.get(f"{SESSIONS}/s")).json["steps"]
    named = f'model="{MODEL}",worker="http://b:8000"'
    assert f"singletree_routed_generations_total{{{named}}} 1.0" in metrics
    for kind, tokens in {"predicted": 40.0, "cached": 30.0, "missing": 10.0, "unexpected": 0.0}.items():
        labels = f'kind="{kind}",{named}'
        assert f"singletree_routing_tokens_total{{{labels}}} {tokens}" in metrics
    assert f'singletree_queue_seconds_count{{model="{MODEL}"}} 1.0' in metrics
    assert step["route"] == {
        "worker": "http://b:8000",
        "predicted_cached_tokens": 40,
        "reason": "40 of 50 tokens cached, the most",
        "failovers": 0,
        "waited_seconds": 1.5,
    }
    assert any(" worker=http://b:8000 predicted=40" in record.message for record in caplog.records)


async def test_the_choice_and_the_hints_are_in_the_request_record(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    records = RequestRecords(RecordQueue(RecordFile(path, 2**20)))
    route = Route("b", 40, "40 of 50 tokens cached, the most", 1, 1.25)
    async with serving(engine=Routed(route)) as served:
        served.service.records = records
        hints = {"priority": 3, "strict_priority": 1, "latency_sensitivity": 2.0, "osl": 70}
        asked = body(PATHS[1], "hi", nvext={"agent_hints": hints})
        assert (await served.client.post(PATHS[1], asked)).status == 200
        assert (await served.client.post(PATHS[1], body(PATHS[1], "hi"))).status == 200
        (job, _) = served.engine.jobs  # type: ignore[attr-defined]
    records.close()
    hinted, plain = (json.loads(line)["request"]["singletree"] for line in path.read_text().splitlines())
    expected = {
        "worker": "b",
        "predicted_cached_tokens": 40,
        "route_reason": "40 of 50 tokens cached, the most",
        "failovers": 1,
        "waited_seconds": 1.25,
    }
    assert {name: hinted[name] for name in expected} == expected
    sent = {"priority": 3, "strict_priority": 1, "latency_sensitivity": 2.0, "expected_tokens": 70}
    assert hinted["hints"] == sent
    assert "hints" not in plain
    assert (job.priority, job.latency_sensitivity, job.expected_tokens) == (-(1 << 32) - 3, 2.0, 70)


async def test_after_a_failover_the_counts_of_two_engines_are_not_compared() -> None:
    async with serving(engine=Routed(Route("b", 40, "", failovers=1))) as served:
        await served.client.post(PATHS[0], body(PATHS[0], "hi"))
        metrics = (await served.client.get("/metrics")).body.decode()
    assert 'singletree_routed_generations_total{model="' in metrics
    assert "singletree_routing_tokens_total{" not in metrics


async def test_one_engine_has_no_route() -> None:
    async with serving(engine=Routed(None)) as served:
        await served.client.post(PATHS[0], body(PATHS[0], "hi"), {"x-singletree-session": "s"})
        (step,) = (await served.client.get(f"{SESSIONS}/s")).json["steps"]
    assert step["route"] is None


@pytest.mark.parametrize("path", PATHS)
async def test_salt_and_session_reach_the_engine(path: str) -> None:
    async with serving(engine=Routed(None)) as served:
        sent = body(path, "hi", cache_salt="of the body")
        await served.client.post(path, sent, {"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"})
        await served.client.post(path, sent, {"x-singletree-cache-salt": "tenant"})
        jobs = served.engine.jobs  # type: ignore[attr-defined]
    assert [(job.cache_salt, job.session) for job in jobs[:1]] == [("of the body", "c/a")]
    assert jobs[1].cache_salt == "tenant"


@pytest.mark.parametrize(
    ("route", "line"),
    [
        ({}, "   engine  b; 40 cached tokens predicted, 30 came; why"),
        ({"predicted_cached_tokens": None, "reason": ""}, "   engine  b"),
        ({"failovers": 2}, "   engine  b; after 2 failed; why"),
        ({"worker": None, "predicted_cached_tokens": None}, "   engine  the only one; why"),
    ],
)
def test_explain_names_the_engine(
    route: dict[str, Any], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {
        "worker": "b",
        "predicted_cached_tokens": 40,
        "reason": "why",
        "failovers": 0,
        "waited_seconds": 0.0,
    }
    step = {
        "at": 0.0,
        "line": 1,
        "prompt_tokens": 50,
        "matched_tokens": 0,
        "new_tokens": 50,
        "cached_tokens": 30,
        "generated_tokens": 2,
        "course": "first",
        "route": whole | route,
        "break": None,
        "lost_tokens": 0,
    }
    session = {"id": "s", "model": "m", "requests": 1, "steps": [step]}
    monkeypatch.setattr("singletree.cli.running_server.RunningServer.fetch", lambda *_: session)
    explain("s")
    assert line in capsys.readouterr().out.splitlines()
