"""``singletree serve`` as a process of its own, with an engine that plays scripts, on a free loopback port."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from clients.harness import SINGLETREE
from engines import real_vllm
from engines.scripted_turns import LOG, SCRIPTS
from engines.tiny_checkpoint import make_tiny_checkpoint

MODEL = "scripted-qwen3"

SAMPLER = "engines.scripted_sampler:ScriptedSampler"
"""What ``scripted_sampler`` is called; only vLLM's environment can import it."""

TURNS = ("/v1/messages", "/v1/chat/completions", "/v1/responses")
"""Routes on which a turn is asked for."""

_ANSWERS = re.compile(
    r'singletree_requests_total\{route="(?P<route>[^"]*)",status="(?P<status>\d+)"\} (?P<count>\S+)'
)
_DISPATCHED = re.compile(r"singletree_tool_call_dispatch_seconds_(count|sum)\{.*\} (\S+)")


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
        for line in self._get("/metrics").decode().splitlines():
            if (found := _ANSWERS.match(line)) and found["route"] in routes:
                counted[found["status"]] += int(float(found["count"]))
        return counted

    def wait_until_idle(self, seconds: float = 5.0) -> None:
        """Waits until no generation runs, ``seconds`` at most: that a client has left is noticed a moment later."""
        until = time.monotonic() + seconds
        while b"singletree_generations_in_flight 0" not in self._get("/metrics") and time.monotonic() < until:
            time.sleep(0.05)

    def dispatched(self) -> tuple[float, float]:
        """How many calls of tools it has sent, and the seconds from the last token of each until it was sent."""
        found: Counter[str] = Counter()
        for name, value in _DISPATCHED.findall(self._get("/metrics").decode()):
            found[name] += float(value)  # type: ignore[assignment]
        return found["count"], found["sum"]

    def explain(self, key: str) -> list[dict[str, Any]]:
        """The steps of a session, as ``singletree explain`` prints them."""
        return explain(self.url, key)

    def session(self, key: str) -> list[dict[str, Any]]:
        """The steps of a session, oldest first."""
        return list(json.loads(self._get(f"/v1/singletree/sessions/{key}"))["steps"])

    def sessions(self) -> list[str]:
        """The names of the sessions that it knows, the one used last first."""
        return [session["id"] for session in json.loads(self._get("/v1/singletree/sessions"))["data"]]

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
            return bytes(answer.read())


def explain(url: str, session: str) -> list[dict[str, Any]]:
    """The steps of a session that ``singletree explain`` prints, oldest first."""
    command = [str(SINGLETREE), "explain", session, "--base-url", url, "--json"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    return list(json.loads(done.stdout)["steps"])


@contextmanager
def serving(model: Path, folder: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """A server that runs until the block ends. ``folder`` takes its scripts, log and output."""
    watched = ["--script-dir", str(folder / "scripts"), "--script-log", str(folder / "plays.jsonl")]
    with playing(folder, ["--engine", "scripted", "--model", str(model), *watched, *flags]) as server:
        yield server


@contextmanager
def serving_scripted_vllm(tokenizer: Path, folder: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """The same with a real vLLM inside, which samples the scripts; its model has made-up weights."""
    python, environment = real_vllm.program()
    model = make_tiny_checkpoint(folder / "tiny-qwen2", tokenizer)
    vllm = ["--enforce-eager", "--load-format", "dummy", "--logits-processors", SAMPLER]
    environment |= played_from(folder)
    arguments = ["--engine", "vllm", "--model", str(model), "--slots", "8", *flags, "--", *vllm]
    with playing(
        folder, arguments, program=(str(python), "-m", "singletree"), environment=environment
    ) as server:
        yield server


def played_from(folder: Path) -> dict[str, str]:
    """What the process of an engine whose sampler plays scripts reads in its environment."""
    return {SCRIPTS: str(folder / "scripts"), LOG: str(folder / "plays.jsonl")}


@contextmanager
def playing(folder: Path, expected: Sequence[str], **more: Any) -> Iterator[Server]:
    """A server with the flags ``expected``, which keeps all it has in ``folder``."""
    port = real_vllm.free_port()
    url = f"http://127.0.0.1:{port}"
    server = Server(url, folder / "scripts", folder / "plays.jsonl", folder / "output.txt")
    server.scripts.mkdir(parents=True, exist_ok=True)
    stored = ["--store-path", str(folder / "responses.sqlite")]
    with running(["--model-name", MODEL, *stored, *expected], port, server.output, **more):
        yield server


@contextmanager
def running(
    flags: Sequence[str],
    port: int,
    output: Path,
    *,
    program: Sequence[str] = (str(SINGLETREE),),
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """``singletree serve`` on a loopback port, until the block ends; it prints to ``output``."""
    command = [*program, "serve", "--port", str(port), *flags]
    with output.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        real_vllm.wait_until_ready(f"http://127.0.0.1:{port}", process, output, "singletree serve")
        yield process
    finally:
        real_vllm.stop_server(process)
