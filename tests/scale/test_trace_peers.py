"""Records and spans, read by the programs for which they are: Dynamo's own replay, and Phoenix."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from engines.real_vllm import PEERS, free_port, pip, run_quietly
from server.agent_traffic import record_sub_agents
from server.serving import MODEL
from singletree.records.record_queue import BLOCK_TOKENS, RecordFile

pytestmark = pytest.mark.scale

DYNAMO = "ai-dynamo-runtime==1.6.1"
PHOENIX = "arize-phoenix==20.26.1"
SECONDS = 120
SECONDS_TO_START = 400
"""Phoenix makes its database first, which takes minutes on a machine that does other work, too."""

_REPLAY = """
import json, sys
from dynamo._core import run_mocker_trace_replay
found = run_mocker_trace_replay(
    [sys.argv[1]], trace_format="dynamo", replay_mode="offline", execution_model=sys.argv[2], capture_per_request=True)
print(json.dumps({"summary": found.summary, "requests": found.per_request}))
"""


def installed(name: str, *requirements: str) -> Path:
    """Return the environment ``name`` with ``requirements``; make it if it is missing."""
    venv = PEERS / name
    ready, wanted = venv / ".ready", "\n".join(requirements)
    if not ready.exists() or ready.read_text(encoding="utf-8") != wanted:
        print(f"Installing {wanted} into {venv} ...", flush=True)
        run_quietly(sys.executable, "-m", "venv", venv)
        pip(venv, "install", *requirements)
        ready.write_text(wanted, encoding="utf-8")
    return venv


def replayed_by_dynamo(trace: Path) -> dict[str, Any]:
    """Return what Dynamo's replay reports of a trace: a summary, and each request."""
    venv = installed("dynamo-replay", "--no-deps", DYNAMO)
    line = [str(venv / "bin" / "python"), "-c", _REPLAY, str(trace), MODEL]
    done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_dynamo_replays_a_trace_with_its_sub_agents(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    asyncio.run(record_sub_agents(RecordFile(trace, 2**24)))
    found = replayed_by_dynamo(trace)
    lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    requests = [line["request"] for line in lines if line["event_type"] == "request_end"]
    requests.sort(key=lambda request: request["request_received_ms"])
    records = {request["request_id"]: request for request in requests}
    assert len(records) == 5
    graph = found["summary"]["agentic_graph"]
    assert graph["source"]["digest"] == "requests:5;tools:1"
    assert (graph["node_count"], graph["play_count"]) == (5, 1), (
        "one tree: the child session is below its parent"
    )
    assert graph["block_size"] == BLOCK_TOKENS
    played = {each["request_id"]: each for each in found["requests"]}
    assert set(played) == set(records)
    first, *_, last = records
    assert played[last]["arrival_time_ms"] > max(
        each["terminal_time_ms"] for id, each in played.items() if id != last
    )
    for id, each in played.items():
        request = records[id]
        assert each["terminal_status"] == "completed"
        lengths = request["input_tokens"], request["output_tokens"]
        assert (each["input_length"], each["output_length"]) == lengths
        began, own = request["request_received_ms"], request["replay"]["input_sequence_hashes"]
        earlier = [other["replay"] for other in requests if other["request_received_ms"] < began]
        blocks = [_common(own, other["input_sequence_hashes"]) for other in earlier]
        # A cache of blocks holds the whole ones. Dynamo computes the last token of a prompt anew.
        assert each["reused_input_tokens"] == BLOCK_TOKENS * max(blocks, default=0)
    assert played[first]["reused_input_tokens"] == 0 < played[last]["reused_input_tokens"]


def _common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@contextmanager
def phoenix(folder: Path) -> Iterator[str]:
    """Run Phoenix until the block ends; yield its URL."""
    venv, port = installed("phoenix", PHOENIX), free_port()
    environment = {
        **os.environ,
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with (folder / "output.txt").open("wb") as output:
        line = [str(venv / "bin" / "phoenix"), "serve"]
        process = subprocess.Popen(line, env=environment, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + SECONDS_TO_START
        while not _answers(f"{url}/healthz"):
            assert process.poll() is None, (folder / "output.txt").read_text()[-2000:]
            assert time.monotonic() < until, "Phoenix did not start"
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def test_phoenix_understands_the_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'singletree[otel]'")
    from singletree.records.span_export import SpanExport, find_exporter

    with phoenix(tmp_path) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        asyncio.run(record_sub_agents(SpanExport(find_exporter(), content=True)))
        until = time.monotonic() + SECONDS
        while len(spans := _read(f"{url}/v1/projects/default/spans?limit=100")) < 10:
            assert time.monotonic() < until, spans
            time.sleep(0.5)
    kinds = sorted(span["span_kind"] for span in spans)
    assert kinds == ["AGENT"] * 4 + ["LLM"] * 5 + ["TOOL"]
    assert len({span["context"]["trace_id"] for span in spans}) == 1
    [top] = [span for span in spans if span["parent_id"] is None]
    agents = [span for span in spans if span["span_kind"] == "AGENT" and span is not top]
    assert {span["parent_id"] for span in agents} == {top["context"]["span_id"]}
    assert {span["attributes"]["session.id"] for span in spans} == {"s", "c"}
    [tool] = [span["attributes"] for span in spans if span["span_kind"] == "TOOL"]
    assert (tool["tool.name"], tool["output.value"]) == ("ls", "a file")
    last = max((span for span in spans if span["span_kind"] == "LLM"), key=lambda span: span["end_time"])
    answered = last["attributes"]
    assert answered["llm.output_messages.0.message.content"] == "Done."
    assert answered["llm.token_count.prompt_details.cache_read"] > 0
    assert answered["llm.input_messages.2.message.content"] == "a file"


def _read(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]
    return found
