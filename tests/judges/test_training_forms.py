"""Judges of captured sessions and of their forms: the code of those who train on them."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks import peers
from benchmarks.template_models import TEMPLATES

from clients.served import running
from engines import real_vllm
from judges import install
from judges.renderer_ids import FAMILIES, MESSAGES, PROMPTS, TOOLS, prompts_of
from singletree.training.exports import FORMS
from singletree.training.graph import read_session
from training.session_model import Action, play

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


def _python(install_it: Callable[[], Path]) -> str:
    try:
        return str(install_it())
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the judge cannot be installed here: {error}")


def _run(python: str, script: str, *arguments: str, given: object = None, **variables: str) -> Any:
    """Return the last line that a script prints, as JSON."""
    done = subprocess.run(
        [python, "-c", script, *arguments],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def _capturing(folder: Path) -> Iterator[str]:
    """The URL of a server with a small model that captures."""
    port = real_vllm.free_port()
    stored = ["--store-path", str(folder / "responses.sqlite")]
    capture = ["--capture", str(folder / "sessions"), "--capture-content"]
    with running(["--model-name", "m", "*", *stored, *capture], port, folder / "output.txt"):
        yield f"http://127.0.0.1:{port}"


def test_rllm_and_atif_read_a_session(tmp_path: Path) -> None:
    python = _python(install.training)
    with _capturing(tmp_path) as url:
        found = _run(python, _CLIENT, url)
    print(f"rllm-model-gateway and ATIF: {found}")
    assert (found["traces"], found["steps"]) == (3, 6)
    assert found["words"]


_OPENENV = """\
import json, os, sys
from types import SimpleNamespace
import httpx
from openenv.core.harness.capture.contract import to_training_trace
from openenv.core.harness.capture.export import export_session
from openenv.core.harness.capture.graph import RolloutGraph, TurnNode
from openenv.core.harness.capture.validate_llm import validate_llm
from openenv.core.harness.training import TrainingTrace

root = sys.argv[1]
found = {}
for allowed in ("", "1"):
    os.environ["OPENENV_ALLOW_RAW_LOGPROBS"] = allowed
    report = validate_llm(root, "m", timeout=300)
    found["allowed" if allowed else "level"] = [report.capture_level, report.logprobs_mode, report.tool_support]
assert report.ok, report.findings
messages = [{"role": "user", "content": "Name a color."}]
for turn in range(4):
    body = {"model": "m", "messages": messages, "max_tokens": 24, "temperature": 1.0, "seed": turn}
    answer = httpx.post(f"{root}/sessions/judged/v1/chat/completions", json=body, timeout=300).raise_for_status()
    messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Another one."}]
graph = RolloutGraph()
for trace in httpx.get(f"{root}/sessions/judged/traces").json():
    graph.add_turn(TurnNode(trace["trace_id"].partition(":")[2], trace["prompt_token_ids"],
                            trace["completion_token_ids"], trace["logprobs"], model=trace["model"]))
session = SimpleNamespace(session_id="judged", metadata={}, findings=[], graph=graph)
document = export_session(session)
theirs = to_training_trace(graph, document)
[text] = httpx.get(f"{root}/sessions/judged/traces", params={"form": "openenv"}).json()
ours = TrainingTrace.model_validate_json(json.dumps(text))
for one, other in zip(ours.turns, theirs.turns, strict=True):
    for name in ("node_id", "prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask"):
        assert getattr(one, name) == getattr(other, name), name
print(json.dumps({**found, **document["stats"], "trainable": document["trainable"]}))
"""


def test_openenv_has_the_same_trace(tmp_path: Path) -> None:
    """OpenEnv makes of the calls what our form has, and finds one root."""
    python = _python(install.training)
    with _capturing(tmp_path) as url:
        found = _run(python, _OPENENV, url)
    print(f"OpenEnv: {found}")
    assert found["allowed"][0] == "tokens"
    assert (found["n_turns"], found["n_roots"], found["n_forks"], found["trainable"]) == (4, 1, 0, True)


_STRICT = """\
import json, sys
from openenv.core.harness.training import TrainingTrace
traces = [TrainingTrace.model_validate_json(json.dumps(each)) for each in json.load(sys.stdin)]
print(json.dumps(sum(sum(turn.loss_mask) for trace in traces for turn in trace.turns)))
"""

_VERL = """\
import json, sys
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
outputs = [AgentLoopOutput(**each).as_dict() for each in json.load(sys.stdin)]
for each in outputs:
    assert each["responses"].shape == each["response_mask"].shape == each["rollout_log_probs"].shape
print(json.dumps(sum(int(each["response_mask"].sum()) for each in outputs)))
"""

_SKYRL = """\
import ast, json, sys
from pathlib import Path
from typing import Any, Dict, List, Optional
import numpy as np
from loguru import logger
# The module of the function imports Ray and what needs Python 3.12: the function itself needs neither.
source = Path(sys.argv[1], "skyrl", "train", "utils", "trainer_utils.py").read_text()
wanted = ("validate_generator_output", "_validate_step_wise_fields")
tree = ast.parse(source)
tree.body = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name in wanted]
GeneratorOutput = dict
exec(compile(tree, "trainer_utils.py", "exec"))
found = json.load(sys.stdin)
for each in found:
    validate_generator_output(len(each["response_ids"]), each)
print(json.dumps(sum(sum(map(sum, each["loss_masks"])) for each in found)))
"""


_SESSION: tuple[Action, ...] = (
    "continue", "fork", "retry", "race", "edit", "compact", "cut", "rewind", "continue", "continue",
)  # fmt: skip


@pytest.mark.parametrize(
    ("form", "script", "install_it"),
    [
        ("openenv", _STRICT, install.training),
        ("verl", _VERL, install.trainers),
        ("skyrl", _SKYRL, install.training),
    ],
)
def test_a_trainer_takes_its_form(
    form: str, script: str, install_it: Callable[[], Path], tmp_path: Path
) -> None:
    """Sessions with retries, edits, compaction, forks and cut answers: as many tokens are trained on."""
    python = _python(install_it)
    arguments = [_python(install.skyrl)] if form == "skyrl" else []
    documents: list[Any] = []
    trained = 0
    for seed in range(20):
        play(tmp_path / "s.jsonl", _SESSION[seed % 3 :], seed)
        graph = read_session(tmp_path / "s.jsonl")
        documents += FORMS[form](graph)
        trained += sum(sum(each["loss_mask"]) for each in FORMS["singletree"](graph))
    assert _run(python, script, *arguments, given=documents) == trained
    print(f"{form}: {len(documents)} documents, {trained} tokens to train on")


_RENDER = """\
import json, sys
from pathlib import Path
import tokenizers
from renderers import config_from_name, create_renderer

class Tokenizer:
    unk_token_id = None

    def __init__(self, folder, name):
        self.inner = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
        config = json.loads(Path(folder, "tokenizer_config.json").read_text())
        self.name_or_path, self.eos_token, self.bos_token = name, config["eos_token"], config.get("bos_token")
        self.eos_token_id = self.inner.token_to_id(self.eos_token)
        self.bos_token_id = self.bos_token and self.inner.token_to_id(self.bos_token)

    def encode(self, text, *args, **more):
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids, *args, **more):
        return self.inner.decode(list(ids), skip_special_tokens=False)

    def convert_tokens_to_ids(self, tokens):
        return self.inner.token_to_id(tokens) if isinstance(tokens, str) else [*map(self.inner.token_to_id, tokens)]

given = json.load(sys.stdin)
found = {}
for name, folder in given["folders"].items():
    renderer = create_renderer(Tokenizer(folder, name), config_from_name(name))
    found[name] = {
        title: list(renderer.render_ids(given["messages"][start:end], tools=given["tools"] if tools else None,
                                        add_generation_prompt=True))
        for title, (start, end, tools) in given["prompts"].items()
    }
print(json.dumps(found))
"""

_DIFFERENT = {
    "qwen3.6": {
        "later"
    },  # Reasoning of earlier tasks is kept here (preserve_thinking), so that prompts grow.
    "gemma4": {"result", "later"},  # Thinking stays on here after a turn that thought.
    "kimi-k2": {"tools", "result", "later"},  # Its renderer sorts the fields of tools; the template does not.
}
"""By family, the prompts in which the ids differ, and why."""


@pytest.mark.skipif(not TEMPLATES.exists(), reason="the templates of the models are not here")
def test_renderers_of_prime_rl_have_the_same_ids(tmp_path: Path) -> None:
    python = _python(install.training)
    peers.ensure_tokenizer()
    ours = {name: prompts_of(name, tmp_path / name) for name in FAMILIES}
    given = {
        "folders": {name: str(tmp_path / name) for name in FAMILIES},
        "messages": MESSAGES,
        "tools": TOOLS,
        "prompts": PROMPTS,
    }
    theirs = _run(python, _RENDER, given=given)
    equal = {
        name: [title for title in PROMPTS if ours[name][title] == theirs[name][title]] for name in FAMILIES
    }
    print("renderers:", {name: f"{len(titles)} of {len(PROMPTS)}" for name, titles in equal.items()})
    different = {name: {*PROMPTS} - {*titles} for name, titles in equal.items()}
    assert {name: titles for name, titles in different.items() if titles} == _DIFFERENT


def test_trl_makes_an_update(tmp_path: Path) -> None:
    """What docs/training.md describes: a model is trained on what the server captured, on the CPU."""
    python = _python(install.trainers)
    _, model = real_vllm.install()
    script = Path(__file__).resolve().parents[2] / "docs" / "train_with_trl.py"
    with _capturing(tmp_path) as url:
        done = subprocess.run(
            [python, str(script), url, str(model)],
            cwd=tmp_path,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=1800,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    changed, _, report = done.stdout[done.stdout.index(" tensors changed") - 12 :].partition(
        " tensors changed"
    )
    count, _, total = changed.split()[-3:]
    found = json.loads(report[report.index("{") :])
    print(f"TRL: {count} of {total} tensors changed, {found}")
    assert count == total
    assert math.isfinite(float(found["loss"]))
