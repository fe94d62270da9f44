"""Judges of captured sessions: the client of rllm-model-gateway, and the models of the trajectory format ATIF."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from clients.served import running
from engines import real_vllm
from judges import install

pytestmark = pytest.mark.judges

_CLIENT = """\
import json, sys
import httpx
from atif import Trajectory
from rllm_model_gateway.client import GatewayClient

root = sys.argv[1]
with GatewayClient(root) as client:
    assert client.health()["status"] == "ok"
    session = client.create_session("judged", metadata={"task": 1})
    url = client.get_session_url(session)
    messages = [{"role": "user", "content": "Name a color."}]
    for turn in range(3):
        body = {"model": "*", "messages": messages, "max_tokens": 24, "temperature": 1.0, "seed": turn}
        answer = httpx.post(f"{url}/chat/completions", json=body, timeout=300).raise_for_status().json()
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "Another one."}]
    assert client.flush()
    assert [each["session_id"] for each in client.list_sessions()] == ["judged"]
    assert client.get_session_info(session)["trace_count"] == 3
    traces = client.get_session_traces(session)
    assert client.get_trace(traces[0].trace_id) == traces[0]
    for before, after in zip(traces, traces[1:]):
        known = before.prompt_token_ids + before.completion_token_ids
        assert after.prompt_token_ids[: len(known)] == known
    for trace in traces:
        assert len(trace.logprobs) == len(trace.completion_token_ids) and max(trace.logprobs) <= 0
    httpx.post(f"{root}/sessions/{session}/complete", json={"reward": 1.0}).raise_for_status()
    documents = httpx.get(f"{root}/sessions/{session}/traces", params={"form": "atif"}).json()
    for document in documents:
        found = Trajectory.model_validate(document)
        assert found.to_json_dict()["extra"]["reward"] == 1.0
    (one,) = documents
    print(json.dumps({"traces": len(traces), "steps": len(one["steps"]), "words": one["steps"][1]["message"]}))
    assert client.delete_session(session) == 3
"""


def test_rllm_and_atif_read_a_session(tmp_path: Path) -> None:
    try:
        python = install.training()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"rllm-model-gateway and atif cannot be installed here: {error}")
    port = real_vllm.free_port()
    stored = ["--store-path", str(tmp_path / "responses.sqlite")]
    capture = ["--capture", str(tmp_path / "sessions"), "--capture-content"]
    with running(["--model-name", "m", "*", *stored, *capture], port, tmp_path / "output.txt"):
        command = [str(python), "-c", _CLIENT, f"http://127.0.0.1:{port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout)
    print(f"rllm-model-gateway and ATIF: {found}")
    assert (found["traces"], found["steps"]) == (3, 6)
    assert found["words"]
