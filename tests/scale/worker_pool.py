"""``singletree serve`` in front of worker processes, which are killed and started again while it is used."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from clients.served import MODEL, Server
from engines.real_vllm import ROOT, free_port, wait_until_ready

_SCRIPT = ROOT / "tests" / "engines" / "scripted_worker.py"
_START_SECONDS = 90.0


class WorkerProcess:
    """A scripted worker on one port, which is killed and started again while a server uses it.

    Args:
        port: the port, the same after each start.
        flags: further flags of ``scripted_worker.py``.
        output: file to which it prints.
    """

    def __init__(self, port: int, flags: Sequence[str], output: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, str(_SCRIPT), "--port", str(port), *flags]
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; it answers some seconds later."""
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        """Wait until it answers. Raises RuntimeError with what it printed if it does not."""
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until and self._process is not None and self._process.poll() is None:
            if self.answers():
                return
            time.sleep(0.1)
        raise RuntimeError(f"a worker did not start:\n{self._output.read_text(errors='replace')[-2000:]}")

    def answers(self) -> bool:
        """Return whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class WorkerPool(NamedTuple):
    """A server and the workers behind it; ``log`` has a line for each generation that a worker began."""

    server: Server
    workers: Sequence[WorkerProcess]
    log: Path


@contextmanager
def serving_on_workers(
    model: Path, folder: Path, flags: Sequence[str] = (), *, count: int = 3, delay: float = 0.01
) -> Iterator[WorkerPool]:
    """A server on ``count`` workers until the block ends. ``folder`` takes scripts, logs and output."""
    scripts, log = folder / "scripts", folder / "generations.jsonl"
    scripts.mkdir(parents=True)
    arguments = ["--model", str(model), "--name", MODEL, "--script-dir", str(scripts), "--log", str(log)]
    arguments += ["--delay", str(delay)]
    workers = [WorkerProcess(free_port(), arguments, folder / f"worker-{i}.txt") for i in range(count)]
    server: subprocess.Popen[bytes] | None = None
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.wait()
        port = free_port()
        made = Server(f"http://127.0.0.1:{port}", scripts, log, folder / "output.txt")
        command = [sys.executable, "-c", "from singletree.cli import main; main()", "serve"]
        command += ["--engine-url", ",".join(worker.url for worker in workers), "--model", str(model)]
        command += ["--model-name", MODEL, "--port", str(port), "--store-path", str(folder / "store.sqlite")]
        with made.output.open("w") as output:
            server = subprocess.Popen([*command, *flags], stdout=output, stderr=output)
        wait_until_ready(made.url, server, made.output, "singletree serve")
        yield WorkerPool(made, workers, log)
    finally:
        if server is not None:
            server.terminate()
            server.wait(timeout=60)
        for worker in workers:
            worker.kill()


@contextmanager
def killing(workers: Sequence[WorkerProcess], every: float) -> Iterator[list[str]]:
    """Kill one worker after the other while the block runs, and start it again; never the last one that answers.

    Yields the URLs of those that were killed.
    """
    over, killed = threading.Event(), list[str]()

    def kill() -> None:
        number = 0
        while not over.wait(every):
            worker = workers[number % len(workers)]
            if any(each.answers() for each in workers if each is not worker):
                number += 1
                killed.append(worker.url)
                worker.kill()
                over.wait(every / 3)
                worker.start()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()
