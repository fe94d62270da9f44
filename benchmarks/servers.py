"""The servers that are measured, in processes of their own on loopback, on one tokenizer and template."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from benchmarks import peers
from benchmarks.processor import cpu_seconds
from engines.real_vllm import ROOT, free_port, stop_server

MODEL = "qwen3"


class Running(Protocol):
    """What runs, whoever started it."""

    @property
    def url(self) -> str: ...


START_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs.

    Attributes:
        pid: of the process that speaks HTTP: what is measured, with its children.
        engine: of the process that plays the engine, where that is another one.
        log: what it prints.
    """

    name: str
    port: int
    pid: int
    engine: int | None = None
    log: Path = Path(os.devnull)

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pids(self) -> tuple[int, ...]:
        """Both, the measured one first."""
        return (self.pid,) if self.engine is None else (self.pid, self.engine)


_START = "from singletree.cli import main; main()"
SCRIPTED = ("--engine", "scripted", "--model", str(peers.QWEN3))


@contextmanager
def running(
    name: str,
    port: int,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    patience: float = START_SECONDS,
    key: str = "",
) -> Iterator[Server]:
    """Start a server at ``port``, and wait until it lists a model. Raises SystemExit with the end of its log."""
    models = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers={"x-api-key": key})
    with _folder() as folder, process_of(command, folder / "server.log", environment) as process:
        server = Server(name, port, process.pid, log=folder / "server.log")
        until = time.monotonic() + patience
        while not _lists_a_model(models):
            if time.monotonic() > until or process.poll() is not None:
                tail = server.log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise SystemExit(f"{name} did not start; the end of its log:\n{tail}")
            time.sleep(0.2)
        yield server


def _lists_a_model(request: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(json.load(answer)["data"])
    except (OSError, ValueError):
        return False


@contextmanager
def singletree(
    name: str = "singletree",
    flags: Sequence[str] = SCRIPTED,
    patience: float = START_SECONDS,
    start: str = _START,
    key: str = "",
) -> Iterator[Server]:
    """singletree with these flags of ``serve``, by default with the scripted engine inside; ready in ``patience`` s.

    Args:
        start: Python that runs the command.
        key: of its API, where it needs one.
    """
    port = free_port()
    with running(name, port, _serve(port, flags, start), patience=patience, key=key) as server:
        yield server


@contextmanager
def vllm_stub(port: int = 0) -> Iterator[Server]:
    """A server without a model that plays scripts over vLLM's wire; at any port for 0."""
    port = port or free_port()
    command = [sys.executable, "-m", "benchmarks.vllm_stub", str(port), str(peers.QWEN3)]
    with running("the stub of vLLM", port, command) as server:
        yield server


@contextmanager
def singletree_before_vllm(flags: Sequence[str] = ()) -> Iterator[Server]:
    """singletree with an engine in another process, as users run it: a server that speaks vLLM's wire."""
    with (
        vllm_stub() as engine,
        singletree(flags=(*before_vllm(engine.url), *flags)) as server,
    ):
        yield replace(server, engine=engine.pid)


def before_vllm(url: str) -> list[str]:
    """Return the flags with which singletree stands before a vLLM that has Qwen3's tokenizer."""
    return ["--engine-url", url, "--engine", "vllm", "--model", str(peers.QWEN3)]


@contextmanager
def started(flags: Sequence[str]) -> Iterator[tuple[float, float, int]]:
    """Start singletree; yield the seconds until it printed that it is ready, its CPU seconds, and its process."""
    port = free_port()
    with _folder() as folder:
        log = folder / "server.log"
        began = time.perf_counter()
        with process_of(_serve(port, flags), log) as process:
            while b"ready      http" not in log.read_bytes():
                if process.poll() is not None or time.perf_counter() - began > START_SECONDS:
                    raise SystemExit(f"singletree did not start:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.005)
            yield time.perf_counter() - began, cpu_seconds(process.pid), process.pid


def _serve(port: int, flags: Sequence[str], start: str = _START) -> list[str]:
    return [sys.executable, "-c", start, "serve", "--model-name", MODEL, "--port", str(port), *flags]


_DYNAMO = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def dynamo(
    name: str,
    flags: Sequence[str] = (),
    *,
    model: Path = peers.QWEN3,
    names: Sequence[str] = (MODEL,),
    settings: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Dynamo's frontend and a worker that plays scripts; neither etcd nor NATS.

    Args:
        model: folder of the tokenizer and the chat template.
        names: of the model.
        settings: further variables of both environments.
    """
    port, python = free_port(), str(peers.PYTHON)
    frontend = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    frontend += ["--discovery-backend", "file", "--request-plane", "tcp", "--enable-anthropic-api", *flags]
    with _folder() as folder:
        environment = {**os.environ, **_DYNAMO, "DYN_FILE_KV": str(folder), **(settings or {})}
        worker = [python, str(Path(__file__).with_name("dynamo_worker.py")), str(model), ",".join(names)]
        scripts = {**environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
        with (
            process_of(worker, folder / "worker.log", scripts) as engine,
            running(name, port, frontend, environment) as server,
        ):
            yield replace(server, engine=engine.pid)


@contextmanager
def process_of(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that prints to ``log``; it and all that it started end with the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop_server(process)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="singletree-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
