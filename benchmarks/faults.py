"""Kills workers under load, and compares every stream with the scripted truth.

    python -m benchmarks.faults                 # 64 streams, a worker killed every 5 s, 5 minutes
    python -m benchmarks.faults --seconds 60

``singletree serve`` runs in front of three workers over vLLM's wire. Streams of all three APIs, and some that are
forced by a grammar to make a call, follow one another without a pause. A worker is killed at an interval and started
again. Counted are the streams that were lost, those whose text or number of tokens is not the scripted one, and what
is left in the server at the end: generations, open files, memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import peers
from benchmarks.worker_processes import WorkerProcess, free_port
from singletree.prompts.tokenizer.tokenizer import Tokenizer, load_tokenizer

MODEL = "qwen3"
_START_SECONDS = 120.0
_STREAM_SECONDS = 300.0
_IDLE_SECONDS = 5.0
_NAMES = (
    "harbour",
    "lantern",
    "meadow",
    "granite",
    "willow",
    "copper",
    "saddle",
    "thimble",
    "orchard",
    "gravel",
)
_TOOL = {
    "name": "note",
    "description": "Keeps a note.",
    "input_schema": {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client received: its text or the arguments of its call, its token count, how it ended."""

    text: str
    tokens: int
    end: str


@dataclass(slots=True)
class Tally:
    """What was counted.

    Attributes:
        streams: how many ended well, by kind.
        lost: errors of the others.
        wrong: descriptions of streams that differ from the truth.
        kills: how many workers were killed.
        tokens: how many tokens the streams that ended well have.
        longest: the longest silence between two pieces of a text, in seconds. A call is sent in one piece.
    """

    streams: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kills: int = 0
    tokens: int = 0
    longest: float = 0.0


class Truth:
    """Scripts and what they should come to.

    Args:
        tokenizer: counts tokens.
        words: about how many words a stream has.
    """

    def __init__(self, tokenizer: Tokenizer, words: int) -> None:
        self._tokenizer = tokenizer
        self._words = words
        self._random = random.Random(7)

    def next(self, kind: str) -> tuple[str, str, int]:
        """Return a prompt, the text that the client should receive, and the number of generated tokens."""
        count = self._random.randint(self._words // 2, self._words)
        text = " ".join(f"{i} {self._random.choice(_NAMES)}" for i in range(count))
        played = text
        if kind == "grammar":
            call = {"name": "note", "arguments": {"text": text}}
            played = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        tokens = len(self._tokenizer.encode(played)) + 1  # the end token
        return f"Please. [[echo:{played}]]", text, tokens


KINDS = ("messages", "chat", "responses", "grammar")


def request_of(kind: str, prompt: str) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request."""
    if kind == "responses":
        return "/v1/responses", {"model": MODEL, "input": prompt, "stream": True}
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "max_tokens": 20_000,
    }
    if kind == "chat":
        return "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
    if kind == "grammar":
        body |= {"tools": [_TOOL], "tool_choice": {"type": "any"}}
    return "/v1/messages", body


class Reader:
    """Puts an answer together from its events."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._arguments: list[str] = []
        self._tokens = 0
        self._end = ""

    def feed(self, event: dict[str, Any]) -> None:
        """Take one event. Raises RuntimeError for an error event."""
        kind = event.get("type", "")
        if kind in ("error", "response.failed") or event.get("error"):
            raise RuntimeError(json.dumps(event)[:300])
        if kind == "content_block_delta":
            delta = event["delta"]
            self._text.append(delta.get("text", ""))
            self._arguments.append(delta.get("partial_json", ""))
        elif kind == "message_delta":
            self._end, self._tokens = event["delta"]["stop_reason"], event["usage"]["output_tokens"]
        elif kind == "response.output_text.delta":
            self._text.append(event["delta"])
        elif kind == "response.completed":
            self._end, self._tokens = "stop", event["response"]["usage"]["output_tokens"]
        for choice in event.get("choices", ()):
            self._text.append(choice["delta"].get("content") or "")
            self._end = choice.get("finish_reason") or self._end
        if usage := event.get("usage"):
            self._tokens = usage.get("completion_tokens", self._tokens)

    def answer(self) -> Answer:
        """Return what was received. Raises RuntimeError for a stream without an end."""
        if not self._end:
            raise RuntimeError("the stream ended without its last event")
        if arguments := "".join(self._arguments):
            return Answer(str(json.loads(arguments)["text"]), self._tokens, self._end)
        return Answer("".join(self._text), self._tokens, self._end)


async def read_stream(
    session: aiohttp.ClientSession, url: str, kind: str, prompt: str, tally: Tally
) -> Answer:
    """Ask for one stream and read it to its end."""
    path, body = request_of(kind, prompt)
    reader = Reader()
    async with session.post(url + path, json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
        last = time.monotonic()
        async for line in response.content:
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if kind != "grammar":
                    tally.longest = max(tally.longest, now - last)
                last = now
                event = json.loads(line[6:])
                reader.feed(event)
    return reader.answer()


async def one_client(number: int, url: str, until: float, truth: Truth, tally: Tally) -> None:
    """Ask for one stream after the other."""
    kind = KINDS[number % len(KINDS)]
    timeout = aiohttp.ClientTimeout(total=_STREAM_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while time.monotonic() < until:
            prompt, text, tokens = truth.next(kind)
            try:
                answer = await read_stream(session, url, kind, prompt, tally)
            except (RuntimeError, ValueError, aiohttp.ClientError, TimeoutError) as error:
                tally.lost.append(f"{kind}: {type(error).__name__}: {error}")
                continue
            if (answer.text, answer.tokens) != (text, tokens):
                at = next((i for i, (a, b) in enumerate(zip(answer.text, text, strict=False)) if a != b), -1)
                tally.wrong.append(
                    f"{kind}: {answer.tokens} tokens for {tokens}, {len(answer.text)} characters for {len(text)}, "
                    f"different at {at}: {answer.text[max(0, at - 20) : at + 20]!r}"
                )
            tally.streams[kind] += 1
            tally.tokens += answer.tokens


async def kill_in_turn(workers: Sequence[WorkerProcess], every: float, tally: Tally) -> None:
    """Kill one worker after the other, and start it again; never the last one that answers."""
    number = 0
    while True:
        await asyncio.sleep(every)
        worker = workers[number % len(workers)]
        others = [each for each in workers if each is not worker]
        if not any([await asyncio.to_thread(each.answers) for each in others]):
            continue
        number += 1
        worker.kill()
        tally.kills += 1
        await asyncio.sleep(every / 3)
        worker.start()


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds: open files, resident memory in MiB, threads."""

    files: int
    memory: float
    threads: int


def footprint(pid: int) -> Footprint:
    """Return what the process holds now."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return Footprint(files, int(fields["VmRSS"].split()[0]) / 1024, int(fields["Threads"]))


async def metric(url: str, name: str) -> float:
    """Return the value of a metric of the server."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        text = await response.text()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


async def measure(options: argparse.Namespace, folder: Path) -> bool:
    """Run workers, server and clients, print what was counted, and return whether nothing was lost."""
    flags = ["--model", str(options.model), "--name", MODEL, "--delay", str(options.delay)]
    workers = [WorkerProcess(free_port(), flags, folder / f"worker-{i}.log") for i in range(options.workers)]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server: subprocess.Popen[bytes] | None = None
    log = folder / "server.log"
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            await asyncio.to_thread(worker.wait)
        command = [sys.executable, "-c", "from singletree.cli import main; main()", "serve"]
        command += ["--engine-url", ",".join(worker.url for worker in workers), "--model", str(options.model)]
        command += ["--model-name", MODEL, "--port", str(port), "--router-mode", options.router_mode]
        command += ["--store-path", str(folder / "responses.sqlite")]
        server = _started(command, log)
        await _until_healthy(url, server, log)
        return await _load(options, url, server, workers)
    finally:
        if server is not None:
            server.send_signal(signal.SIGTERM)
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        for worker in workers:
            worker.kill()
        if options.log:
            print(_end_of(log))


async def _load(
    options: argparse.Namespace, url: str, server: subprocess.Popen[bytes], workers: Sequence[WorkerProcess]
) -> bool:
    tally, truth = Tally(), Truth(load_tokenizer(options.model), options.words)
    warm = Tally()
    warm_up = [one_client(i, url, time.monotonic() + 1, truth, warm) for i in range(options.streams)]
    await asyncio.gather(*warm_up)
    await asyncio.sleep(_IDLE_SECONDS)
    before = footprint(server.pid)
    until = time.monotonic() + options.seconds
    killing = asyncio.create_task(kill_in_turn(workers, options.every, tally))
    clients = [one_client(i, url, until, truth, tally) for i in range(options.streams)]
    halfway = asyncio.create_task(_halfway(server.pid, options.seconds / 2))
    await asyncio.gather(*clients)
    killing.cancel()
    middle = await halfway
    await asyncio.sleep(_IDLE_SECONDS)
    after = footprint(server.pid)
    left = await metric(url, "singletree_generations_in_flight")
    print(f"{options.streams} streams at once, {options.workers} workers, {tally.kills} kills")
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(tally.streams.items()))
    print(f"streams    {sum(tally.streams.values())} ended ({kinds}), {tally.tokens} tokens")
    print(f"lost       {len(tally.lost)}")
    print(f"wrong      {len(tally.wrong)}: tokens or text differ from the script")
    print(f"silence    {tally.longest:.1f} s at most")
    print(f"left       {left:g} generations")
    print(f"files      {before.files} before, {after.files} after; threads {before.threads}, {after.threads}")
    print(
        f"memory     {before.memory:.0f} MiB before, {middle.memory:.0f} in the middle, {after.memory:.0f} after"
    )
    for line in (*tally.lost[:10], *tally.wrong[:10]):
        print(f"  {line}")
    return not (tally.lost or tally.wrong or left)


async def _halfway(pid: int, seconds: float) -> Footprint:
    await asyncio.sleep(seconds)
    return footprint(pid)


async def _until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < until and server.poll() is None:
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-20_000:]


def _started(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def main() -> None:
    """Run the benchmark; the exit status is 1 if a stream was lost or differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument(
        "--words", type=int, default=120, help="pairs of number and word in a stream, at most"
    )
    parser.add_argument("--delay", type=float, default=0.05, help="seconds between a worker's tokens")
    parser.add_argument("--router-mode", default="kv")
    parser.add_argument(
        "--model", type=Path, default=peers.QWEN3, help="folder of a tokenizer in Qwen3's format"
    )
    parser.add_argument("--log", action="store_true", help="print the end of the server's log")
    parser.add_argument("--quick", action="store_true", help="half a minute")
    options = parser.parse_args()
    if options.quick:
        options.seconds = min(options.seconds, 30.0)
    if options.model == peers.QWEN3 and not peers.has_tokenizer():
        peers.install_tokenizer()
    with tempfile.TemporaryDirectory(prefix="singletree-faults-") as folder:
        succeeded = asyncio.run(measure(options, Path(folder)))
    raise SystemExit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
