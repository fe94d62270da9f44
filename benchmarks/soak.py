"""Serve the mixed traffic of agents while everything goes wrong, and look for what grows.

    python -m benchmarks.soak                   # five minutes
    python -m benchmarks.soak --seconds 3600

A real server with three API keys, an inspector, a trace and stores on disk stands in front of an engine without a
model. Sessions of a coding agent grow turn by turn on three APIs: streamed or not, stored, in the background, with
clients that hang up or read slowly. In each round the engine is killed and comes back, nothing can be written to the
disk for some seconds, and other clients send attacks and what is no request. The text of each answer is compared with
the script that the engine was given. After each round the server gets idle, and what it holds is read.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import resource
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from socket import SO_RCVBUF, SOL_SOCKET
from typing import Any, Literal

from benchmarks import peers, servers
from benchmarks.attacks import ATTACKS, send
from benchmarks.processor import resident_bytes, wait_idle
from benchmarks.stream_reader import post
from benchmarks.tool_session import library, tools
from engines.real_vllm import free_port
from singletree.checking.endpoint import Endpoint, NoAnswer, Refused
from singletree.checking.returned_turns import PROTOCOLS, Reply, ReturnedBlock, WireBody

CLIENTS = 12
ROUND_SECONDS = 18.0
MOST_AN_HOUR = 12.0
SWINGS = {"held": 8.0, "resident": 40.0}
"""MiB by which the memory may grow in an hour, and what it swings by in any time. What is held is what the server asked
for and did not free; free memory in pieces that the C library cannot return is resident, too."""
_WARM_UP = 0.4
"""The share of the first rounds, but of twelve at most, in which the caches fill."""
_WARM_ROUNDS = 12
_ANSWER_SECONDS = 30.0
_AFTER = 1.0  # seconds after a trouble in which it may still be felt
_KEYS = ("alice", "bob", "carol")
_KINDS = {"streamed": 60, "whole": 18, "hung up": 15, "slow": 4, "background": 3}
Kind = Literal["thought", "text", "call"]
_CALL = "<tool_call>\n%s\n</tool_call>"
_SMALL = ("--turn-memory", "--session-memory", "--request-memory", "--inspect-size")
_ID = re.compile(rb'"id": ?"(resp_\w+)"')
_GAUGE = re.compile(r"^singletree_generations_(in_flight|waiting) (\S+)$", re.MULTILINE)
_ATTACKS = (
    "gzip, 40",
    "gzip of 64 MB",
    "64 of 64",
    "regex of 20",
    "10,000 biases",
    "damaged PDFs",
    "1,900 names",
)
_NO_REQUESTS = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /v1/models HTTP/1.1\r\nHost: local",
    post("/v1/messages", b'{"model":"qwen3","max_tokens":9,"messages":[{"role":')[:-20],
    post("/v1/chat/completions", b"{", f"Authorization: Bearer {_KEYS[0]}\r\n"),
    post("/v1/responses", b'{"model":"none","input":"x"}', f"Authorization: Bearer {_KEYS[1]}\r\n"),
    post("/v1/responses", b'{"model":"qwen3","input":"x"}', "Authorization: Bearer wrong\r\n"),
)


class Troubles:
    """When the engine or the disk did not work: only then may a request fail."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    @contextlib.contextmanager
    def now(self) -> Iterator[None]:
        """Excuse what fails meanwhile."""
        began = time.monotonic()
        self._spans.append((began, inf))
        yield
        self._spans[-1] = began, time.monotonic() + _AFTER

    def excuse(self, began: float) -> bool:
        """Tell whether a request that began then, and failed now, met one."""
        return any(start <= time.monotonic() and began <= end for start, end in self._spans[-2:])


class Line:
    """A connector (`checking.endpoint`) that keeps the last answer, and may read it slowly.

    Attributes:
        slow: whether to read a little at a time, and to let the network hold no more.
        kept: the last answer as bytes.
    """

    def __init__(self, port: int) -> None:
        self._port, self.slow, self.kept, self.status = port, False, bytearray(), 0

    def open(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Line:
        connection = self._connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        with _closed_without_answer(self._connection):
            connection.connect()
            if self.slow:
                connection.sock.setsockopt(SOL_SOCKET, SO_RCVBUF, 4096)
            connection.request(method, path, body or None, dict(headers))
            self._response = connection.getresponse()
        self.status, self.kept = self._response.status, bytearray()
        return self

    def read(self) -> bytes:
        if self.slow:
            time.sleep(0.05)
        with _closed_without_answer(self._connection):
            data = self._response.read1(4096 if self.slow else 65_536)
        self.kept += data
        return data

    def close(self) -> None:
        self._response.close()
        self._connection.close()


@contextlib.contextmanager
def _closed_without_answer(connection: HTTPConnection) -> Iterator[None]:
    try:
        yield
    except (OSError, HTTPException) as error:
        connection.close()
        raise NoAnswer(error) from None


class Client:
    """An agent: one session after the other, on one API and with one key.

    Attributes:
        done: how many turns ended, by kind.
        excused: why turns failed in a trouble.
        wrong: what was not as it should be, in words.
        expected: the kinds and texts of the turn that its last message asks for.
    """

    def __init__(self, port: int, number: int, troubles: Troubles) -> None:
        self._number, self._troubles = number, troubles
        self._random, self._serial = Random(number), count()
        self._protocol = PROTOCOLS[number % 3]
        self._stores = self._protocol.name == "responses" and number % 2 == 1
        self._line = Line(port)
        self._endpoint = Endpoint(self._line, key=_KEYS[number // 3 % len(_KEYS)], model=servers.MODEL)
        self.done: Counter[str] = Counter()
        self.excused: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.expected: list[tuple[Kind, str]] = []
        self._begin()

    def _begin(self) -> None:
        self._left, self._last = self._random.randint(4, 25), ""
        self._session = f"{self._number}-{next(self._serial)}"
        question = f"Find out why test {self._session} fails.\n{self._script()}"
        system = {"role": "system", "content": f"You are coding agent {self._session}. {self._text(4000)}"}
        self._turns: list[WireBody] = [system, {"role": "user", "content": question}]

    def work(self, until: float) -> None:
        """Send turns until then."""
        before = 0.0
        while (began := time.monotonic()) < until:
            # The answer that a turn goes on from is not stored where that met a trouble.
            since, before = before if self._last else began, began
            try:
                self._turn()
            except (NoAnswer, Refused, Wrong) as error:
                is_excused = not isinstance(error, Wrong) and self._troubles.excuse(since)
                self.done["failed by a trouble" if is_excused else "wrong"] += 1
                if is_excused:
                    self.excused[re.sub(r"\w*\d\w*", "N", str(error))[:160]] += 1
                if not is_excused:
                    self.wrong.append(f"{self._protocol.name}, session {self._session}: {error}")
                self._begin()
                time.sleep(0.2)

    def _turn(self) -> None:
        kind = self._random.choices([*_KINDS], [*_KINDS.values()])[0]
        kind = "whole" if kind == "background" and not self._stores else kind
        self._line.slow = kind == "slow"
        more: dict[str, Any] = {"store": self._stores} if self._protocol.name == "responses" else {}
        if self._last:
            more["previous_response_id"] = self._last
        if kind == "background":
            more["background"] = True
        settings = {**self._protocol.settings, **more}
        body = self._endpoint.request(
            self._protocol, self._turns, tools=tools(self._number)[:8], tokens=4000, **settings
        )
        headers = {"x-session-id": self._session} if self._number % 2 else {}
        if kind in ("whole", "background"):
            blocks = self._whole(body, headers)
        else:
            until = self._random.randrange(1, 60) if kind == "hung up" else None
            reader = self._endpoint.stream(self._protocol, body, headers, until=until)
            blocks = reader.blocks
            self.compare(blocks, is_whole=until is None and not reader.error)
            if reader.error:
                raise NoAnswer(reader.error)
            if reader.problems:
                raise Wrong("; ".join(reader.problems))
        self.done[f"{self._protocol.name}{', stored' * self._stores}: {kind}"] += 1
        if kind != "hung up":  # A harness sends the same turn again.
            self._grow(blocks)

    def _whole(self, body: WireBody, headers: Mapping[str, str]) -> list[ReturnedBlock]:
        answer = self._endpoint.turn(self._protocol, body, headers).json
        while answer.get("status") in ("queued", "in_progress"):
            time.sleep(0.1)
            answer = self._stored(answer["id"]).json
        if answer.get("status") == "failed":
            raise NoAnswer(str(answer["error"]))
        blocks = self._protocol.blocks(answer)
        self.compare(blocks, is_whole=True)
        return blocks

    def _stored(self, id: str, key: str | None = None) -> Any:
        answer = self._endpoint.get(f"/v1/responses/{id}", key)
        if answer.status != 200:
            raise Refused(answer)
        return answer

    def compare(self, blocks: Sequence[ReturnedBlock], *, is_whole: bool) -> None:
        """Raise Wrong unless ``blocks`` are those of the script, or its beginning."""
        found = [_plain(block.kind, block.text) for block in blocks]
        expected = [_plain(*each) for each in self.expected]
        last = len(found) - 1
        same = len(found) <= len(expected) and all(
            kind == wanted and (text == whole or (at == last and not is_whole and whole.startswith(text)))
            for at, ((kind, text), (wanted, whole)) in enumerate(zip(found, expected, strict=False))
        )
        if not same or (is_whole and len(found) != len(expected)):
            raise Wrong(f"the script was {expected}, and {'all' if is_whole else 'the beginning'} is {found}")

    def _grow(self, blocks: list[ReturnedBlock]) -> None:
        self._left -= 1
        if self._left <= 0:
            self._end()
            return
        result = f"{self._text(int(min(20_000, self._random.lognormvariate(7.3, 1.2))))}\n{self._script()}"
        written = self._protocol.written(blocks, Reply(result=result, next=result))
        if self._stores:
            self._last = _ID.findall(self._line.kept)[0].decode()
            is_new = ("function_call_output", "user")
            self._turns = [each for each in written if {each["type"], each.get("role")} & set(is_new)]
        else:
            self._turns += written

    def _end(self) -> None:
        if self._stores:
            id = _ID.findall(self._line.kept)[0].decode()
            self._stored(id)
            others = next(key for key in _KEYS if key != self._endpoint.key)
            if self._endpoint.get(f"/v1/responses/{id}", others).status != 404:
                raise Wrong(f"{others} can read a response of {self._endpoint.key}")
        self._begin()

    def _script(self) -> str:
        """Make up the next turn, and return what makes the engine write it."""
        thought, text = self._text(self._random.randint(20, 200)), self._text(self._random.randint(20, 500))
        self.expected = [("thought", thought), ("text", f"{text} \u00e9\u6f22\u5b57\U0001f642")]
        played = f"<think>\n{thought}\n</think>\n\n{self.expected[1][1]}"
        if self._random.random() < 0.8:
            name = tools(self._number)[self._random.randrange(8)][0]
            arguments = {"path": f"src/{self._session}.py", "pattern": self._text(80)}
            self.expected.append(("call", json.dumps(arguments)))
            played += "\n" + _CALL % json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"[[echo@{self._random.choice((0, 0.002, 0.005, 0.02))}:{played}]]"

    def _text(self, size: int) -> str:
        begin = self._random.randrange(len(library()) - size)
        return " ".join(re.sub(r"[^ -~]|[\[\]<>{}\\`]", " ", library()[begin : begin + size]).split()) or "-"


class Wrong(Exception):
    """The server did what it must never do."""


def _plain(kind: str, text: str) -> tuple[str, str]:
    return kind, json.dumps(json.loads(text or "{}")) if kind == "call" else text.strip()


@dataclass(frozen=True, slots=True)
class Reading:
    """What an idle server holds.

    Attributes:
        hours: since the start.
        memory: MiB that are held, and that are resident with its children.
        counts: of tasks, threads that its pools may have and others, files, generations, and sockets but for those that
            wait for the engine's next turn.
        objects: that Python's collector knows, by type.
    """

    hours: float
    memory: Mapping[str, float]
    counts: Mapping[str, int]
    objects: Mapping[str, int]


def growth(readings: Sequence[Reading]) -> tuple[dict[str, float], list[str]]:
    """Return by how many MiB an hour the memory grew after the warm-up, and what grew, in words."""
    rest = readings[min(_WARM_ROUNDS, int(len(readings) * _WARM_UP)) :]
    hours = rest[-1].hours - rest[0].hours
    slopes = {name: theil_sen([(each.hours, each.memory[name]) for each in rest]) for name in SWINGS}
    found = [
        f"{name} memory: {slope:+.0f} MiB an hour, {slope * hours:+.1f} MiB in {hours * 60:.0f} minutes"
        for name, slope in slopes.items()
        if slope * hours > SWINGS[name] + MOST_AN_HOUR * hours
    ]
    third = max(1, len(rest) // 3)
    for name in rest[0].counts:
        before, after = ([each.counts[name] for each in part] for part in (rest[:third], rest[-third:]))
        if min(after) > max(before):
            found.append(f"{name}: {before} to begin with, {after} at the end")
    if found:
        more = Counter(
            {kind: rest[-1].objects.get(kind, 0) - rest[0].objects.get(kind, 0) for kind in rest[-1].objects}
        )
        found += [f"objects: {number:+,} of {kind}" for kind, number in more.most_common(12) if number > 50]
    return slopes, found


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs, which a few odd readings do not move."""
    return statistics.median(
        (y - v) / (x - u) for i, (x, y) in enumerate(points) for u, v in points[:i] if x != u
    )


class Soak:
    """A server, its engine and its clients."""

    def __init__(self, server: servers.Server, engine: contextlib.ExitStack, port: int, report: Path) -> None:
        self._server, self._engine, self._engine_port, self._report = server, engine, port, report
        self._troubles, self._random, self._began = Troubles(), Random(0), time.monotonic()
        self.clients = [Client(server.port, number, self._troubles) for number in range(CLIENTS)]
        self.statuses: Counter[str] = Counter()

    def start_engine(self) -> None:
        """Start the engine, at its port."""
        self._pid = self._engine.enter_context(servers.vllm_stub(self._engine_port)).pid

    def round(self) -> Reading:
        """Let the clients work for a round, and return what the server holds then."""
        until = time.monotonic() + ROUND_SECONDS
        with ThreadPoolExecutor(CLIENTS + 2) as pool:
            works = [pool.submit(client.work, until) for client in self.clients]
            works += [pool.submit(self._attack, until), pool.submit(self._disturb)]
            for work in works:
                work.result()
        wait_idle(self._server.pid)
        return self._read()

    def _attack(self, until: float) -> None:
        chosen = [each for each in ATTACKS if any(name in each.name for name in _ATTACKS)]
        requests = [each.request(f"Authorization: Bearer {_KEYS[2]}\r\n") for each in chosen]
        for request in self._random.sample([*requests, *_NO_REQUESTS], len(requests) + len(_NO_REQUESTS)):
            if time.monotonic() < until:
                self.statuses[send(self._server.port, request, 5.0)] += 1

    def _disturb(self) -> None:
        time.sleep(ROUND_SECONDS * 0.25)
        with self._troubles.now():
            os.kill(self._pid, signal.SIGKILL)
            self._engine.close()
            time.sleep(self._random.uniform(0.1, 3))
            self.start_engine()
        time.sleep(ROUND_SECONDS * 0.15)
        with self._troubles.now():
            # Nothing can be written to a file; sockets have no such limit.
            limits = resource.prlimit(self._server.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self._server.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
            time.sleep(ROUND_SECONDS * 0.15)
            resource.prlimit(self._server.pid, resource.RLIMIT_FSIZE, limits)

    def _read(self) -> Reading:
        process = Path(f"/proc/{self._server.pid}")
        open_files = [os.readlink(each) for each in (process / "fd").iterdir() if os.path.lexists(each)]
        # Connections to the engine that wait for the next turn are as many as the last burst took.
        connections = (process / "net/tcp").read_text(encoding="ascii")
        idle = len(re.findall(rf":{self._engine_port:04X} 01 ", connections))
        sockets = sum(each.startswith("socket:") for each in open_files)
        self._report.unlink(missing_ok=True)
        os.kill(self._server.pid, signal.SIGUSR1)
        until = time.monotonic() + _ANSWER_SECONDS
        while not self._report.exists():
            if time.monotonic() > until:
                raise SystemExit(f"the server wrote no counts within {_ANSWER_SECONDS:.0f} s of SIGUSR1")
            time.sleep(0.05)
        shown = json.loads(self._report.read_bytes())
        metrics = Endpoint(Line(self._server.port)).get("/metrics").body.decode()
        threads = len([*(process / "task").iterdir()]) + shown["room of pools"]
        counts = {"tasks": shown["tasks"], "threads": threads}
        counts |= {"sockets": sockets - idle, "files": len(open_files) - sockets}
        counts |= {f"generations {name}": int(float(number)) for name, number in _GAUGE.findall(metrics)}
        memory = {"held": shown["held"] / 2**20, "resident": resident_bytes(self._server.pid) / 2**20}
        return Reading((time.monotonic() - self._began) / 3600, memory, counts, shown["objects"])


def soak(seconds: float) -> list[str]:
    """Let a server work for so long, print what it holds after each round, and return what is wrong."""
    began, port, readings = time.monotonic(), free_port(), list[Reading]()
    with tempfile.TemporaryDirectory(prefix="singletree-soak-") as name, contextlib.ExitStack() as engine:
        folder, report = Path(name), Path(name) / "counts.json"
        digests = {key: hashlib.sha256(key.encode()).hexdigest() for key in _KEYS}
        keys = "".join(f'[{key}]\nsha256 = "{digest}"\n' for key, digest in digests.items())
        (folder / "keys.toml").write_text(keys, encoding="utf-8")
        flags = [
            *servers.before_vllm(f"http://127.0.0.1:{port}"),
            *("--key-file", str(folder / "keys.toml"), "--store-path", str(folder / "responses.sqlite")),
            *("--turn-memory-path", str(folder / "turns.sqlite"), "--capsule-key", "5" * 64),
            *("--trace-path", str(folder / "trace.jsonl"), "--trace-limit", "4MiB", "--inspect"),
            *("--store-limit", "16MiB"),
            *(word for flag in _SMALL for word in (flag, "1MiB")),
        ]
        start = f"from benchmarks.counted_server import main; main({str(report)!r})"
        engine.enter_context(servers.vllm_stub(port))
        with servers.singletree(flags=flags, start=start, key=_KEYS[0]) as server:
            engine.close()
            run = Soak(server, engine, port, report)
            run.start_engine()
            while time.monotonic() - began < seconds or len(readings) < 4:
                readings.append(run.round())
                _show(run, readings[-1])
            log = server.log.read_text(encoding="utf-8", errors="replace")
    slopes, found = growth(readings)
    turns = sum((client.done for client in run.clients), Counter[str]())
    memory = ", ".join(f"{name} {slope:+.1f}" for name, slope in slopes.items())
    minutes = (time.monotonic() - began) / 60
    print(f"{sum(turns.values()):,} turns in {minutes:.1f} minutes; memory, MiB an hour: {memory}")
    print("\n".join(f"  {number:>7,}  {kind}" for kind, number in sorted(turns.items())))
    print(f"  answers to attacks and to what is no request: {dict(run.statuses)}")
    for error, number in sum((client.excused for client in run.clients), Counter[str]()).most_common(8):
        print(f"  {number:>7,}  in a trouble: {error}")
    wrong = [each for client in run.clients for each in client.wrong]
    found += [f"{len(wrong)} wrong answers, such as: {each[:1000]}" for each in wrong[:5]]
    # A line of the log that the full disk refused is no fault of the server.
    if failures := re.findall(r"(?<!Logging error ---\n)Traceback \(most.{,3000}", log, re.DOTALL):
        found.append(f"{len(failures)} or more tracebacks in the log, such as: {failures[0]}")
    return found


def _show(run: Soak, reading: Reading) -> None:
    counts = ", ".join(f"{number} {name}" for name, number in reading.counts.items())
    memory = ", ".join(f"{size:.1f} MiB {name}" for name, size in reading.memory.items())
    turns = sum(client.done.total() for client in run.clients)
    print(
        f"{reading.hours * 60:5.1f} min {turns:>7,} turns  {memory}; {counts}, "
        f"{sum(reading.objects.values()):,} objects",
        flush=True,
    )


def main() -> None:
    """Run it, and end with 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long; the last round is finished")
    options = parser.parse_args()
    peers.ensure_tokenizer()
    found = soak(options.seconds)
    print("\n".join(found) or "nothing grew, and no answer was wrong")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
