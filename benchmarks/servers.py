"""The servers that are measured, in processes of their own on loopback, on one tokenizer and template."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import peers
from benchmarks.processor import cpu_seconds
from engines.real_vllm import free_port
from singletree.conversation import Sampling
from singletree.engines.engine import GenerationJob
from singletree.prompts.tokenizer.tokenizer import load_tokenizer
from singletree.testing.scripted_engine import ScriptedEngine

MODEL = "qwen3"
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
    def pids(self) -> tuple[int, ...]:
        """Both, the measured one first."""
        return (self.pid,) if self.engine is None else (self.pid, self.engine)


def filler() -> list[int]:
    """The tokens that singletree's scripted engine plays, for other engines to play the same."""
    tokenizer = load_tokenizer(peers.QWEN3)
    engine = ScriptedEngine(tokenizer.encode, tokenizer.decode)

    async def play() -> list[int]:
        await engine.start()
        job = GenerationJob(tokenizer.encode("[[gen:1000:1000:0]]"), Sampling(), "filler")
        return [token async for chunk in engine.generate(job) for token in chunk.token_ids]

    return asyncio.run(play())


_START = "from singletree.cli import main; main()"
SCRIPTED = ("--engine", "scripted", "--model", str(peers.QWEN3))


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
    with _folder() as folder, process_of(_serve(port, flags, start), folder / "server.log") as process:
        wait_ready(name, port, process, folder / "server.log", patience, key)
        yield Server(name, port, process.pid, log=folder / "server.log")


@contextmanager
def vllm_stub(filler: Sequence[int], model: Path = peers.QWEN3, port: int = 0) -> Iterator[tuple[str, int]]:
    """The URL and the process of a server without a model that plays ``filler`` over vLLM's wire; at any port for 0."""
    port = port or free_port()
    with _folder() as folder:
        ids, log = folder / "filler.json", folder / "stub.log"
        ids.write_text(json.dumps(list(filler)), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.vllm_stub", str(port), str(model), str(ids)]
        with process_of(command, log) as process:
            wait_ready("the stub of vLLM", port, process, log)
            yield f"http://127.0.0.1:{port}", process.pid


@contextmanager
def singletree_before_vllm(filler: Sequence[int], flags: Sequence[str] = ()) -> Iterator[Server]:
    """singletree with an engine in another process, as users run it: a server that speaks vLLM's wire."""
    with vllm_stub(filler) as (url, engine):
        where = ("--engine-url", url, "--engine", "vllm", "--model", str(peers.QWEN3))
        with singletree(flags=(*where, *flags)) as server:
            yield replace(server, engine=engine)


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
    return [
        *(sys.executable, "-c", start, "serve"),
        *("--model-name", MODEL, "--port", str(port), *flags),
    ]


@contextmanager
def dynamo(
    name: str,
    filler: Sequence[int],
    flags: Sequence[str] = (),
    *,
    model: Path = peers.QWEN3,
    names: Sequence[str] = (MODEL,),
    settings: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Dynamo's frontend and a worker that plays ``filler``; neither etcd nor NATS.

    Args:
        model: folder of the tokenizer and the chat template.
        names: of the model.
        settings: further variables of both environments.
    """
    port = free_port()
    with _folder() as folder:
        ids, log = folder / "filler.json", folder / "server.log"
        ids.write_text(json.dumps(list(filler)), encoding="utf-8")
        environment = {
            **os.environ,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            **(settings or {}),
        }
        worker = [
            *(str(peers.PYTHON), str(Path(__file__).with_name("dynamo_worker.py"))),
            *(str(model), ",".join(names), str(ids)),
        ]
        frontend = [
            *(
                str(peers.PYTHON),
                "-m",
                "dynamo.frontend",
                "--http-host",
                "127.0.0.1",
                "--http-port",
                str(port),
            ),
            *("--discovery-backend", "file", "--request-plane", "tcp", "--enable-anthropic-api", *flags),
        ]
        with (
            process_of(worker, folder / "worker.log", environment) as engine,
            process_of(frontend, log, environment) as process,
        ):
            wait_ready(name, port, process, log)
            yield Server(name, port, process.pid, engine.pid)


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
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for how, patience in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 8.0)):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def wait_ready(
    name: str,
    port: int,
    process: subprocess.Popen[bytes],
    log: Path,
    patience: float = START_SECONDS,
    key: str = "",
) -> None:
    """Wait until the server lists a model. Raises SystemExit with the end of ``log`` after ``patience`` seconds."""
    until = time.monotonic() + patience
    models = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers={"x-api-key": key})
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(models, timeout=5) as answer:
                if json.load(answer)["data"]:
                    return
        except (OSError, urllib.error.URLError, ValueError):
            pass
        time.sleep(0.2)
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise SystemExit(f"{name} did not start; the end of its log:\n{tail}")


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="singletree-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
