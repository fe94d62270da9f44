"""``singletree serve`` in real processes, and clients that choose the process that answers them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

from engines.real_vllm import free_port

SECONDS_TO_START = 180
_ATTEMPTS = 200
_LOG_SECONDS = 30.0


class Answer(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """Return the body as a JSON value."""
        return json.loads(self.body)


class Group:
    """One running server.

    Attributes:
        url: where it listens.
        folder: has its scripts, log and output.
        process: the process that was started; with ``--workers`` the one that starts the others.
    """

    def __init__(self, folder: Path, port: int, process: subprocess.Popen[bytes]) -> None:
        self.folder, self.port, self.process = folder, port, process
        self.url = f"http://127.0.0.1:{port}"

    @property
    def output(self) -> str:
        """Return what it has printed."""
        return (self.folder / "output.txt").read_text(encoding="utf-8")

    def write_scripts(self, **texts: str) -> None:
        """Write scripts for the engine."""
        for name, text in texts.items():
            (self.folder / "scripts" / f"{name}.txt").write_text(text, encoding="utf-8")

    def plays(self) -> list[dict[str, Any]]:
        """Return the generations, the oldest first."""
        lines = (self.folder / "plays.jsonl").read_text(encoding="utf-8").splitlines()
        return sorted(map(json.loads, lines), key=lambda play: len(play["prompt_token_ids"]))

    def connect(self, number: int = 0) -> HTTPConnection:
        """Return a connection to the process ``number`` of the server; 0 for any."""
        for _ in range(_ATTEMPTS):
            connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
            if not number or self.process_of(connection) == number:
                return connection
            connection.close()
        raise AssertionError(f"no connection came to process {number}:\n{self.output}")

    def process_of(self, connection: HTTPConnection) -> int:
        """Return the number of the process that answers on ``connection``."""
        id = f"where-{uuid.uuid4().hex}"
        connection.request("GET", "/health", headers={"x-request-id": id})
        connection.getresponse().read()
        until = time.monotonic() + _LOG_SECONDS
        # The line is written after the answer.
        while not (found := re.search(rf"\[(\d+)\] GET /health 200 id={id}", self.output)):
            assert time.monotonic() < until, self.output
            time.sleep(0.01)
        return int(found[1])

    def children(self) -> list[int]:
        """Return the ids of the processes that the server has started."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(id) for id in path.read_text().split()]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


def ask(
    connection: HTTPConnection,
    path: str,
    body: Mapping[str, Any] | None = None,
    method: str = "",
    **headers: str,
) -> Answer:
    """Send a request and read the whole answer."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    data = None if body is None else json.dumps(body).encode()
    connection.request(
        method or ("GET" if body is None else "POST"),
        path,
        data,
        {"content-type": "application/json", **names},
    )
    answer = connection.getresponse()
    return Answer(answer.status, answer.read())


def command(folder: Path, port: int, *flags: str) -> list[str]:
    """Return the command line of a server with the scripted engine."""
    (folder / "scripts").mkdir(parents=True, exist_ok=True)
    given = {
        "--engine": "scripted",
        "--port": str(port),
        "--script-dir": str(folder / "scripts"),
        "--script-log": str(folder / "plays.jsonl"),
        "--log-level": "debug",
    }
    if "--store-url" not in flags:
        given["--store-path"] = str(folder / "responses.sqlite")
    words = [word for pair in given.items() for word in pair]
    return [sys.executable, "-m", "singletree", "serve", *words, *flags]


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Group]:
    """A server until the block ends; it ends in order, and leaves no process behind."""
    port = free_port()
    line = command(folder, port, *flags)
    with (folder / "output.txt").open("w") as output:
        # Unbuffered, as in a container: what is logged can be read at once.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(line, stdout=output, stderr=output, env=environment)
    group = Group(folder, port, process)
    try:
        wait_until_ready(group)
        yield group
    finally:
        children = group.children() if process.poll() is None else []
        if process.poll() is None:
            group.stop()
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def wait_until_ready(group: Group) -> None:
    """Wait until the server says that it is ready. Raises RuntimeError, with its output, when it does not."""
    until = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until and group.process.poll() is None:
        if "ready      http" in group.output:
            with urllib.request.urlopen(f"{group.url}/health", timeout=10):
                return
        time.sleep(0.05)
    raise RuntimeError(f"singletree serve did not come up:\n{group.output}")
