"""``singletree serve`` as a process of its own, with the scripted engine, on a free loopback port."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from clients.harness import SINGLETREE

MODEL = "scripted-qwen3"
SECONDS_TO_START = 180

TURNS = ("/v1/messages", "/v1/chat/completions", "/v1/responses")
"""Routes on which a turn is asked for."""

_ANSWERS = re.compile(
    r'singletree_requests_total\{route="(?P<route>[^"]*)",status="(?P<status>\d+)"\} (?P<count>\S+)'
)


class Play(NamedTuple):
    """One generation of the scripted engine: the prompt it was given and what it said, as text and tokens."""

    script: str
    prompt: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish: str | None


class Server(NamedTuple):
    """A running server. ``scripts`` is the folder that it plays from; ``output`` what it printed."""

    url: str
    scripts: Path
    log: Path
    output: Path

    def plays(self, scripts: Sequence[str] | None) -> list[Play]:
        """The generations of ``scripts``, or of all, oldest first."""
        lines = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
        records: list[dict[str, Any]] = [json.loads(line) for line in lines]
        wanted = [record for record in records if scripts is None or record["script"] in scripts]
        return [Play(**{field: record[field] for field in Play._fields}) for record in wanted]

    def answers(self, *routes: str) -> Counter[str]:
        """How many requests on ``routes`` it has answered, by HTTP status."""
        counted: Counter[str] = Counter()
        for line in self._told("/metrics").decode().splitlines():
            if (found := _ANSWERS.match(line)) and found["route"] in routes:
                counted[found["status"]] += int(float(found["count"]))
        return counted

    def session(self, key: str) -> list[dict[str, Any]]:
        """The steps of a session, oldest first."""
        return list(json.loads(self._told(f"/v1/singletree/sessions/{key}"))["steps"])

    def sessions(self) -> list[str]:
        """The names of the sessions that it knows, the one used last first."""
        return [session["id"] for session in json.loads(self._told("/v1/singletree/sessions"))["data"]]

    def _told(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
            return bytes(answer.read())


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(model: Path, folder: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """A server that runs until the block ends. ``folder`` takes its scripts, log and output."""
    port = free_port()
    server = Server(
        f"http://127.0.0.1:{port}", folder / "scripts", folder / "plays.jsonl", folder / "output.txt"
    )
    server.scripts.mkdir(parents=True)
    command = [str(SINGLETREE), "serve", "--engine", "scripted"]
    told = ["--model", str(model), "--model-name", MODEL, "--port", str(port)]
    watched = ["--script-dir", str(server.scripts), "--script-log", str(server.log)]
    watched += ["--store-path", str(folder / "responses.sqlite")]
    with server.output.open("w") as output:
        process = subprocess.Popen([*command, *told, *watched, *flags], stdout=output, stderr=output)
    try:
        wait_until_healthy(server, process)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_until_healthy(server: Server, process: subprocess.Popen[bytes]) -> None:
    """Until ``/health`` answers. Raises RuntimeError, with what the server printed, when it does not."""
    until = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"singletree serve did not come up:\n{server.output.read_text()}")
