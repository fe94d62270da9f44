"""Spans arrive at a receiver of OTLP; a receiver that is dead or silent slows nothing."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'singletree[otel]'")

from scale.otlp_receiver import attributes, receiving
from scale.processes import Group, ask, serving

pytestmark = pytest.mark.scale

CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
TOOL = {"name": "ls", "description": "lists", "input_schema": {"type": "object"}}
MESSAGES = "/v1/messages"
SECRET = "nobody may read this"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the SDK send often."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")


def talk(group: Group, session: str, *processes: int) -> list[float]:
    """Let an agent ask for a call, run it and ask again, of the given processes; return the seconds of each answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{SECRET} [[script:call,done]]"}]
    took = []
    for process in processes:
        body = {"model": "scripted", "max_tokens": 99, "messages": messages, "tools": [TOOL]}
        connection = group.connect(process)
        began = time.perf_counter()
        answer = ask(connection, MESSAGES, body, x_session_id=session)
        took.append(time.perf_counter() - began)
        assert answer.status == 200, answer.body
        content = answer.json["content"]
        calls = [part["id"] for part in content if part["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": id, "content": SECRET} for id in calls]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    return took


def test_a_session_arrives_as_one_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        with serving(tmp_path, "--otel") as group:
            group.write_scripts(call=CALL, done="Done.")
            talk(group, "s", 0, 0)
            spans = receiver.wait(4)
        names = sorted(span.name for span in spans)
        assert names == ["chat scripted", "chat scripted", "execute_tool ls", "invoke_agent"]
        assert len({span.trace_id for span in spans}) == 1
        [top] = [span for span in spans if span.name == "invoke_agent"]
        assert top.parent_span_id == b""
        assert {span.parent_span_id for span in spans if span is not top} == {top.span_id}
        assert attributes(top)["gen_ai.conversation.id"] == "s"
        resource, _ = receiver.spans[0]
        assert resource["service.name"] == "singletree"
        assert resource["deployment.environment.name"] == "test"
        assert receiver.headers[0]["authorization"] == "Basic abc"
        assert receiver.headers[0]["content-encoding"] == "gzip"
        assert SECRET not in str(spans)
        assert len(receiver.spans) == 4, "nothing is sent twice at the end"


def test_two_processes_send_one_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        with serving(tmp_path, "--otel", "--workers", "2") as group:
            group.write_scripts(call=CALL, done="Done.")
            talk(group, "s", 1, 2)
            receiver.wait(3)
        spans = [span for _, span in receiver.spans]
    assert len({span.trace_id for span in spans}) == 1
    chats = [span for span in spans if span.name.startswith("chat")]
    assert len(chats) == 2
    [parent] = {span.parent_span_id for span in chats}
    assert parent in {span.span_id for span in spans if span.name == "invoke_agent"}
    assert len({resource["service.instance.id"] for resource, _ in receiver.spans}) == 2


@pytest.mark.parametrize("kind", ["dead", "silent"])
def test_a_collector_that_is_gone_slows_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "without") as group:
        group.write_scripts(call=CALL, done="Done.")
        plain = [seconds for number in range(15) for seconds in talk(group, f"s{number}", 0, 0)]
    with receiving() as receiver:
        receiver.answers.clear()
        url = receiver.url if kind == "silent" else "http://127.0.0.1:9"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with serving(tmp_path / "with", "--otel") as group:
            group.write_scripts(call=CALL, done="Done.")
            took = [seconds for number in range(15) for seconds in talk(group, f"s{number}", 0, 0)]
            began = time.perf_counter()
            assert group.stop() == 0
            assert time.perf_counter() - began < 20
        assert statistics.median(took) < 3 * statistics.median(plain) + 0.02
        assert group.output.count("opentelemetry") + group.output.count("Transient") < 5
