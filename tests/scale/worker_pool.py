"""``singletree serve`` in front of worker processes, which are killed and started again while it is used."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.worker_processes import WorkerProcess, free_port

from clients.served import MODEL, Server, wait_until_healthy


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
    told = ["--model", str(model), "--name", MODEL, "--script-dir", str(scripts), "--log", str(log)]
    told += ["--delay", str(delay)]
    workers = [WorkerProcess(free_port(), told, folder / f"worker-{i}.txt") for i in range(count)]
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
        wait_until_healthy(made, server)
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
