"""Check servers with ``singletree check`` and keep their cards: ``python -m benchmarks.check_servers [NAME ...]``.

Each is started on loopback with its own recipe for agents, checked, and stopped. ``docs/check_page.py`` makes the table
of docs/check.md from the cards in ``benchmarks/results/check``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path

from benchmarks import compare_servers, peers, servers
from benchmarks.servers import Running
from engines import real_sglang, real_vllm, scripted_llama
from singletree.checking.contract import CHECKS

CARDS = Path(__file__).with_name("results") / "check"
SECONDS, _START_SECONDS = 600, 300
"""The limits of one card, and of a start: the machine may be busy."""

_LLAMA_SERVER = {
    "model_alias": "org/smollm2",
    "n_parallel": 2,
    "n_ctx": 8192,
    "kv_unified": True,
    "cpuparams.n_threads": 1,
    "cpuparams_batch.n_threads": 1,
    "use_jinja": True,
    "endpoint_metrics": True,
}


def _singletree(*flags: str) -> AbstractContextManager[Running]:
    return servers.singletree(flags=flags, patience=_START_SECONDS)


def _llama_server() -> AbstractContextManager[Running]:
    from singletree.engines.checkpoint import DEFAULT_MODEL
    from singletree.model_files.resolve import resolve

    port, model = real_vllm.free_port(), str(resolve(DEFAULT_MODEL, gguf=True).path)
    settings = {**_LLAMA_SERVER, "model.path": model, "hostnames": ["127.0.0.1"], "port": port}
    command = [sys.executable, "-c", scripted_llama.SERVE, json.dumps(settings)]
    return servers.running("llama-server", port, command, patience=_START_SECONDS)


def _vllm() -> AbstractContextManager[Running]:
    return real_vllm.running("--enable-auto-tool-choice", "--tool-call-parser", "hermes", max_model_len=8192)


@contextmanager
def _litellm() -> Iterator[Running]:
    if compare_servers.missing(["LiteLLM"]):
        raise SystemExit("LiteLLM cannot be installed here")
    with _vllm() as engine, compare_servers.litellm(engine.url, real_vllm.MODEL, [real_vllm.MODEL]) as server:
        yield server


def _sglang() -> AbstractContextManager[Running]:
    # Forced calls need the grammars that SGLang chooses by itself; the tests' own choice compiles none of them.
    flags = ["--tool-call-parser", "hermes", "--grammar-backend", "xgrammar"]
    flags += ["--context-length", "8192", "--max-total-tokens", "32768"]
    return real_sglang.running_sglang(*flags)


_WORKER_LACKS = ("overflow-words", "cached-tokens")
"""What the scripted worker, and not Dynamo, lacks: it takes prompts of any length, and has no cache."""

SERVERS: dict[str, tuple[str, Callable[[], AbstractContextManager[Running]], str]] = {
    "singletree-scripted": (
        "singletree, scripted engine",
        lambda: _singletree("--engine", "scripted", "--context-window", "20000"),
        version("singletree"),
    ),
    "singletree": (
        "singletree, SmolLM2 on embedded llama.cpp",
        lambda: _singletree("--model", "smollm2-135m-instruct"),
        version("singletree"),
    ),
    "llama-server": ("llama-server of xllamacpp, SmolLM2", _llama_server, version("xllamacpp")),
    "vllm": ("vLLM's own server, SmolLM2", _vllm, real_vllm.VLLM),
    "sglang": ("SGLang's own server, SmolLM2", _sglang, real_sglang.SGLANG),
    "litellm": ("LiteLLM before vLLM, SmolLM2", _litellm, compare_servers.LITELLM),
    "dynamo": ("Dynamo's frontend, scripted worker", lambda: servers.dynamo("Dynamo"), peers.DYNAMO_VERSION),
}
"""By the name of the card: what it is, how it is started, its version."""


def measure(name: str) -> None:
    """Start a server, check it, and write its card."""
    title, start, installed = SERVERS[name]
    file = CARDS / f"{name}.json"
    with start() as server:
        url = server.url
        command = [sys.executable, "-m", "singletree", "check", url, "--json", str(file)]
        command += ["--seconds", str(SECONDS)]
        if name == "dynamo":
            loops = [check.name for check in CHECKS if check.name.startswith("loop-")]
            command += ["--skip", ",".join((*_WORKER_LACKS, *loops))]
        done = subprocess.run(command, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{name}: the check ended with {done.returncode}")
    card = json.loads(file.read_text(encoding="utf-8"))
    card |= {"server": title, "version": installed, "date": date.today().isoformat(), "url": ""}
    for result in card["results"]:
        result["reason"] = result["reason"].replace(url, "URL")
    file.write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[1:] or SERVERS:
        measure(each)
