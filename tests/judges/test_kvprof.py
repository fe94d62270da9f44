"""kvprof renders and tokenizes what a client sends by llama.cpp's own routes, and names the token at which a prompt
leaves the one before: is it the token that the report of the session names?
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clients.served import running
from engines import real_vllm
from engines.tiny_shapes import tiny_model
from judges import install
from judges.test_judges import _installed

pytestmark = pytest.mark.judges

MODEL = "tiny"
SECONDS = 300

Messages = list[dict[str, str]]

SYSTEM = "You are a careful guide. " + " ".join(f"Rule {number}: say where it is." for number in range(40))
QUESTIONS = ("Where was Rome?", "And its walls?", "Who built them?", "What of the harbour?")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _changed(messages: Messages, at: int, old: str, new: str) -> Messages:
    assert old in messages[at]["content"]
    changed = {**messages[at], "content": messages[at]["content"].replace(old, new)}
    return [changed if each is messages[at] else each for each in messages]


def conversations() -> Iterator[tuple[str, Messages]]:
    """What a client sends, one request after the other, and what it has changed in each.

    kvprof compares a prompt with any earlier one that it extends, so only the last request extends another.
    """
    messages = [_message("system", SYSTEM), _message("user", QUESTIONS[0])]
    for question in QUESTIONS[1:]:
        messages += [_message("assistant", f"It is told in {question}"), _message("user", question)]
    yield "nothing", messages
    messages = _changed(messages, -1, "harbour?", "harbour!")
    yield "the last character", messages
    messages = _changed(messages, 3, "walls", "gates")
    yield "a question", messages
    messages = _changed(messages, 2, "told", "written")
    yield "an answer", messages
    messages = [*messages[:2], *messages[4:]]
    yield "two turns are left out", messages
    messages = _changed(messages, 0, "Rule 20", "Law 20")
    yield "the middle of the system prompt", messages
    messages = _changed(messages, 0, "You are", "Be")
    yield "the first word", messages
    yield "two turns are added", [*messages, _message("assistant", "Nobody knows."), _message("user", "Why?")]


@contextmanager
def llama_server(model: Path, folder: Path) -> Iterator[str]:
    """llama.cpp's own server, with all its routes."""
    from engines.scripted_llama import SERVE

    port = real_vllm.free_port()
    settings = {
        **{"model.path": str(model), "model_alias": MODEL, "hostnames": ["127.0.0.1"], "port": port},
        **{"use_jinja": True, "n_ctx": 8192, "n_parallel": 1},
        **{"cpuparams.n_threads": 1, "cpuparams_batch.n_threads": 1},
    }
    log = folder / "llama-server.log"
    with log.open("wb") as out:
        command = [sys.executable, "-c", SERVE, json.dumps(settings)]
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        real_vllm.wait_until_ready(f"http://127.0.0.1:{port}", process, log, "llama.cpp")
        yield f"http://127.0.0.1:{port}"
    finally:
        real_vllm.stop_server(process)


@contextmanager
def tapping(upstream: str, traces: Path) -> Iterator[str]:
    """kvprof between a client and a server: it records what the client sends, and what it is answered."""
    port = real_vllm.free_port()
    command = [str(install.kvprof().with_name("kvprof")), "tap", "--upstream", upstream]
    command += ["--listen", f"127.0.0.1:{port}", "--trace-dir", str(traces)]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 60
        while True:
            try:
                _get(f"{url}/health")
                break
            except OSError:
                assert time.monotonic() < until
                assert process.poll() is None
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        return json.load(answer)


def _ask(url: str, messages: Messages) -> None:
    body = {"model": MODEL, "max_tokens": 4, "temperature": 0, "messages": messages}
    headers = {"content-type": "application/json", "x-session-id": "judged"}
    asked = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
        answer.read()


@pytest.mark.parametrize("engine", ["embedded", "llama-server"])
def test_kvprof_names_the_same_token(engine: str, tmp_path: Path) -> None:
    _installed("kvprof", install.kvprof)
    model, traces, port = tiny_model("worded"), tmp_path / "traces", real_vllm.free_port()
    changes, sent = zip(*conversations(), strict=True)
    with llama_server(model, tmp_path) as theirs:
        flags = ["--engine", "llamacpp", "--model", str(model), "--model-name", MODEL, "--no-store"]
        flags += ["--engine-url", theirs] if engine == "llama-server" else []
        own = f"http://127.0.0.1:{port}"
        with running(flags, port, tmp_path / "output.txt"):
            with tapping(own, traces) as url:
                for messages in sent:
                    _ask(url, messages)
            steps = _get(f"{own}/v1/singletree/sessions/judged")["steps"]
        command = [str(install.kvprof().with_name("kvprof")), "analyze", "--json", "--no-log"]
        command += ["--upstream", theirs, "--trace-dir", str(traces)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    judged = json.loads(done.stdout)
    assert len(judged) == len(steps) == len(sent)
    for change, each, step in zip(changes, judged, steps, strict=True):
        print(f"kvprof, {engine}: {change}: token {each['diverge_tok']} of {each['prompt_tokens']}")
        assert each["exact"] is True, "both write the same prompt"
        assert each["prompt_tokens"] == step["prompt_tokens"]
        assert each["diverge_tok"] == (step["matched_tokens"] or None), change
        receipt = step["receipt"]
        assert each["cache_read"] == receipt["cached_tokens"]
        assert each["prefilled"] == receipt["new_tokens"] + receipt["reread_tokens"]
