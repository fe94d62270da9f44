"""What vLLM's own API server costs: its process alone, with an engine process behind it that costs little.

The model is tiny, with random weights and Qwen3's tokenizer, so that an engine step takes milliseconds. Its text is
random, too: what is counted is CPU for each event that the API server sends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import peers, tool_session
from benchmarks.processor import own_cpu_seconds
from benchmarks.servers import MODEL, Server
from benchmarks.stream_reader import WrongAnswer, post, read_streams
from benchmarks.wire_protocols import Protocol
from engines import real_vllm

_WINDOW = 8192
_SHORT = 8
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


def write_model(folder: Path, shape: dict[str, Any]) -> Path:
    """Write a folder that vLLM loads with ``--load-format dummy``: a configuration and Qwen3's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(peers.QWEN3 / name, folder)
    known = json.loads((peers.QWEN3 / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(known | shape), encoding="utf-8")
    # Greedy: random weights end no turn then.
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0}), encoding="utf-8")
    return folder


@contextmanager
def running() -> Iterator[Server]:
    """Start ``vllm serve`` on the tiny model."""
    venv, _ = real_vllm.install()
    folder = write_model(peers.HOME.parent / "tiny-qwen3", TINY)
    port = real_vllm.free_port()
    log = peers.HOME.parent / "vllm-api.log"
    command = [str(venv / "bin" / "vllm"), "serve", str(folder), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--served-model-name", MODEL, "--max-model-len", str(_WINDOW), "--max-num-seqs", "64"]
    command += ["--load-format", "dummy", "--enforce-eager", "--disable-log-stats"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=real_vllm.environment(), start_new_session=True
        )
    try:
        real_vllm.wait_until_ready(f"http://127.0.0.1:{port}", process, log, "vLLM")
        yield Server("vLLM", port, process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(1)


def token_cost(server: Server, protocol: Protocol, streams: int, tokens: int) -> float:
    """Return CPU µs of the API server's process for each event of text."""
    short, few = _ask(server, protocol, streams, _SHORT)
    long, many = _ask(server, protocol, streams, tokens + _SHORT)
    if many - few < streams * tokens / 2:
        raise WrongAnswer(f"vLLM sent {many - few} events for {streams * tokens} tokens")
    return (long - short) / (many - few) * 1e6


def request_cost(server: Server, protocol: Protocol, count: int) -> float:
    """Return CPU seconds of the API server's process for a request of one token, eight at a time."""
    _ask(server, protocol, 8, 1)
    return sum(_ask(server, protocol, 8, 1)[0] for _ in range(count // 8)) / count


def _ask(server: Server, protocol: Protocol, streams: int, tokens: int) -> tuple[float, int]:
    session = tool_session.opening("")
    more = {"ignore_eos": True} if protocol.name == "chat" else {}
    body = {"model": MODEL, "stream": True, protocol.limit: tokens, **more, **protocol.body(session)}
    body.pop("tools")  # vLLM has to be told how to parse calls; without tools it has less to do.
    request = post(protocol.path, json.dumps(body).encode(), protocol.headers)
    before = own_cpu_seconds(server.pid)
    answers = read_streams(server.port, [request] * streams, b"data: ")
    return own_cpu_seconds(server.pid) - before, sum(answer.events for answer in answers)
