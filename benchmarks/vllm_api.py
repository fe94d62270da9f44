"""What vLLM's own API server costs, and singletree with vLLM in its process: the front-end process alone.

The engine process behind it costs little: its model is tiny, with random weights and Qwen3's tokenizer, so that a step
takes milliseconds. Its text is random, too: what is counted is CPU for each event that the front end sends.
"""

from __future__ import annotations

import json
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks import peers, servers, tool_session
from benchmarks.processor import own_cpu_seconds
from benchmarks.servers import MODEL, Server
from benchmarks.stream_reader import WrongAnswer, post, read_streams
from benchmarks.token_cost import LEAST_TOKENS
from benchmarks.tool_session import Protocol
from engines import real_vllm

_STREAMS = 64
_SHORT = 8
_WINDOW = "8192"
_ENGINE = ("--load-format", "dummy", "--enforce-eager")
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


def running() -> AbstractContextManager[Server]:
    """Start ``vllm serve`` on the tiny model."""
    venv, _ = real_vllm.install()
    port = real_vllm.free_port()
    command = [str(venv / "bin" / "vllm"), "serve", str(_model()), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--served-model-name", MODEL, "--max-num-seqs", str(_STREAMS), "--max-model-len", _WINDOW]
    command += [*_ENGINE, "--disable-log-stats"]
    return servers.running("vLLM", port, command, real_vllm.environment(), real_vllm.READY_SECONDS)


def running_in_process() -> AbstractContextManager[Server]:
    """Start singletree with vLLM in its process, on the tiny model."""
    python, environment = real_vllm.program()
    port = real_vllm.free_port()
    command = [str(python), "-m", "singletree", "serve", "--engine", "vllm", "--model", str(_model())]
    command += ["--port", str(port), "--model-name", MODEL, "--slots", str(_STREAMS)]
    command += ["--context-window", _WINDOW, "--", *_ENGINE]
    title = "singletree with vLLM in its process"
    return servers.running(title, port, command, environment, real_vllm.READY_SECONDS)


def _model() -> Path:
    """Write a folder that vLLM loads with ``--load-format dummy``: a configuration and Qwen3's tokenizer."""
    folder = peers.HOME.parent / "tiny-qwen3"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(peers.QWEN3 / name, folder)
    known = json.loads((peers.QWEN3 / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(known | TINY), encoding="utf-8")
    # Greedy: random weights end no turn then.
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0}), encoding="utf-8")
    return folder


def token_cost(server: Server, protocol: Protocol, streams: int, tokens: int) -> float:
    """Return CPU µs of the front-end process for each event of text.

    Args:
        tokens: of each stream; more where the streams are few.
    """
    tokens = max(tokens, LEAST_TOKENS // streams)
    short, few = _ask(server, protocol, streams, _SHORT)
    long, many = _ask(server, protocol, streams, tokens + _SHORT)
    if many - few < streams * tokens / 2:
        raise WrongAnswer(f"{server.name} sent {many - few} events for {streams * tokens} tokens")
    return (long - short) / (many - few) * 1e6


def request_cost(server: Server, protocol: Protocol, count: int) -> float:
    """Return CPU seconds of the front-end process for a request of one token, eight at a time."""
    _ask(server, protocol, 8, 1)
    return sum(_ask(server, protocol, 8, 1)[0] for _ in range(count // 8)) / count


def _ask(server: Server, protocol: Protocol, streams: int, tokens: int) -> tuple[float, int]:
    session = tool_session.opening("")
    more = {"ignore_eos": True} if protocol.name == "chat" else {}
    body = {"model": MODEL, "stream": True, protocol.limit: tokens, **more, **protocol.body(session)}
    body.pop("tools")  # vLLM needs to know how to parse calls; without tools it has less to do.
    request = post(protocol.path, json.dumps(body).encode(), protocol.headers)
    before = own_cpu_seconds(server.pid)
    answers = read_streams(server.port, [request] * streams, b"data: ")
    return own_cpu_seconds(server.pid) - before, sum(answer.events for answer in answers)
