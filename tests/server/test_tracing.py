"""What is told of a server's work: numbers in the metrics, one line a request in the log, and no word of a prompt."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from singletree.events import Finished
from singletree.server.sessions.step import Step
from singletree.server.telemetry import Trace, Tracing

from .serving import MODEL, Served, serving
from .test_sessions import Harness, remembering


def step(session: str) -> Step:
    return Step(session, 0.0, "m", 1, "appended", 100, 90)


@pytest.mark.parametrize(
    ("session", "shown"), [("s", "s"), ("a b", "a_b"), ("a\nb", "a\\nb"), ("é\x1b[0m", "\\xe9\\x1b[0m")]
)
def test_a_sessions_name_keeps_the_line_one_line(
    session: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "singletree.requests")
    trace = Trace(Tracing(), "POST", "/v1/messages", "req_1")
    trace.record_step(step(session))
    trace.generating("m", ())
    trace.generated(Finished("stop"))
    trace.close()
    assert caplog.records[0].getMessage().endswith(f"end=stop session={shown} matched=90 new=10")


async def test_tokens_are_counted_by_how_they_go_on() -> None:
    async with remembering() as served:
        main = Harness(served, "hi")
        await main.go_on("one")
        await main.go_on("two")
        main.messages[0]["content"] = "ho"
        await main.go_on("three")
        steps = (await served.client.get("/v1/singletree/sessions/s")).json["steps"]
        metrics = (await served.client.get("/metrics")).body.decode()
    model = 'model="org/test-model"'
    matched, new = (sum(each[f"{kind}_tokens"] for each in steps) for kind in ("matched", "new"))
    assert f'singletree_prefix_tokens_total{{kind="matched",{model}}} {float(matched)}' in metrics
    assert f'singletree_prefix_tokens_total{{kind="new",{model}}} {float(new)}' in metrics
    assert f'singletree_tokens_total{{kind="prompt",{model}}} {float(matched + new)}' in metrics
    for course in ("first", "appended", "broken"):
        assert f'singletree_prefix_courses_total{{course="{course}",{model}}} 1.0' in metrics
    lost = float(steps[-1]["lost_tokens"])
    assert f'singletree_prefix_lost_tokens_total{{cause="message_changed",{model}}} {lost}' in metrics


def test_generations_that_wait_for_an_engine_are_exposed() -> None:
    tracing = Tracing()
    assert b"\nsingletree_generations_waiting 0.0\n" in tracing.exposition()
    tracing.waiting = lambda: 3
    assert b"\nsingletree_generations_waiting 3.0\n" in tracing.exposition()


CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
HEADERS = ("x-session-id", "x-claude-code-session-id", "x-claude-code-agent-id", "user-agent", "traceparent")


def series(exposition: bytes) -> set[str]:
    """The names of all series, with their labels."""
    lines = exposition.decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


async def ask_oddly(served: Served, number: int) -> None:
    """Send requests with names that nobody else uses, wherever a client may choose one."""
    name = f"n{number}"
    headers = {header: f"{name}{header}" for header in HEADERS}
    tool = {"type": "function", "function": {"name": f"tool_{name}", "parameters": {"type": "object"}}}
    for model in (MODEL, name, f"alias-{name}"):
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"[[script:call]] {name}"}],
            "tools": [tool],
            "stream": True,
            "user": name,
            "prompt_cache_key": name,
            "service_tier": "auto",
            "nvext": {"agent_context": {"session_type_id": name, "trajectory_id": name}},
        }
        answer = await served.client.post("/v1/chat/completions", body, headers)
        assert answer.status == 200, answer.body
    for path in (f"/{name}", f"/v1/{name}", f"/v1/models/{name}", f"/v1/singletree/sessions/{name}"):
        await served.client.get(path)


async def test_what_clients_choose_makes_no_series() -> None:
    async with serving({"call": CALL}, aliases=("*",)) as served:
        for number in range(3):
            await ask_oddly(served, number)
        await served.client.get("/metrics")
        before = series((await served.client.get("/metrics")).body)
        for number in range(3, 30):
            await ask_oddly(served, number)
        exposed = (await served.client.get("/metrics")).body
    assert series(exposed) == before
    assert b"n29" not in exposed
    assert b"tool_" not in exposed.replace(b"singletree_tool_call_dispatch_seconds", b"")


async def test_histograms_have_the_answers_of_an_agent() -> None:
    async with serving({"a": CALL}) as served:
        body = {
            "model": MODEL,
            "max_tokens": 99,
            "stream": True,
            "messages": [{"role": "user", "content": "[[script:a]]"}],
            "tools": [{"name": "ls", "description": "", "input_schema": {"type": "object"}}],
        }
        assert (await served.client.post("/v1/messages", body)).status == 200
        value = served.service.tracing.registry.get_sample_value
    one = {"model": MODEL}
    for name in (
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "answer_seconds",
        "request_prompt_tokens",
        "request_output_tokens",
        "tool_call_dispatch_seconds",
    ):
        assert value(f"singletree_{name}_count", one) == 1, name
    assert value("singletree_prefix_in_place_ratio_count", one | {"course": "first"}) == 1
    counted = value("singletree_tokens_total", one | {"kind": "prompt"})
    assert value("singletree_request_prompt_tokens_sum", one) == counted
    assert 0 < (value("singletree_tool_call_dispatch_seconds_sum", one) or 0) < 5


def test_counts_are_in_the_metrics_whenever_they_are_read() -> None:
    tracing = Tracing()
    value = tracing.registry.get_sample_value
    for status in (200, 200, 404):
        trace = Trace(tracing, "GET", "/health", "req_1")
        trace.route, trace.status = "/health", status
        trace.close()
    tracing.tokens["m", "cached"] += 0
    for _ in range(2):
        assert value("singletree_requests_total", {"route": "/health", "status": "200"}) == 2
        assert value("singletree_requests_total", {"route": "/health", "status": "404"}) == 1
        assert value("singletree_tokens_total", {"model": "m", "kind": "cached"}) == 0
    tracing.requests["/health", "200"] += 1
    assert b'singletree_requests_total{route="/health",status="200"} 3.0\n' in tracing.exposition()


def test_a_counter_begins_with_its_first_count_and_not_when_it_is_read() -> None:
    tracing = Tracing()
    before = time.time()
    tracing.rules["sorted keys"] += 1
    after = time.time()
    time.sleep(0.02)
    created = tracing.registry.get_sample_value("singletree_stability_rules_created", {"rule": "sorted keys"})
    assert created is not None
    assert before <= created <= after


def test_processes_that_share_metrics_know_each_count_when_its_request_ends(
    tmp_path: Path,
) -> None:
    script = """if True:
        from pathlib import Path
        from singletree.server.telemetry import Trace, Tracing

        tracing = Tracing()
        trace = Trace(tracing, "GET", "/health", "req_1")
        trace.accepted()
        tracing.rules["sorted keys"] += 1
        trace.route, trace.status = "/health", 200
        trace.close()
        other = Tracing()
        print(other.exposition().decode())
    """
    reported = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert 'singletree_requests_total{route="/health",status="200"} 1.0' in reported
    assert 'singletree_stability_rules_total{rule="sorted keys"} 1.0' in reported
    assert "singletree_generations_in_flight 0.0" in reported


def test_names_have_units_and_labels_are_few() -> None:
    families = list(Tracing().registry.collect())
    for family in families:
        assert family.name.startswith("singletree_")
        assert family.documentation.endswith(".")
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_tokens", "_ratio")), family.name
    assert len(families) > 20
