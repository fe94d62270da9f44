"""Sends each of `benchmarks.attacks` to a server while a second client asks ``/health`` every 10 ms.

    python -m benchmarks.hostile                   # all attacks, a server for each
    python -m benchmarks.hostile stop gzip         # those with one of these words in their names

For each attack it prints how long ``/health`` took, the CPU seconds of the server and of its event loop's thread, and
by how much its memory grew. It fails if one attack misses the goal. Times mean something only on an idle machine; CPU
seconds of the loop's thread always do: while it works, it answers nobody.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from benchmarks import peers, servers
from benchmarks.attacks import ATTACKS, Attack
from benchmarks.processor import children, cpu_seconds, wait_idle
from benchmarks.stream_reader import post, read_streams

P99_SECONDS, WORST_SECONDS, GROWTH_MIB = 0.05, 0.25, 256.0
_INTERVAL = 0.01
_HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_FIRST = b'{"model":"qwen3","messages":[{"role":"user","content":"%b [[gen:4:1:0]]"}]}' % (
    b"lorem ipsum " * 3000
)
"""Long enough for the server to load its faster encoder, which it does once."""
_PIECE = 2**16
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Effect:
    """What an attack did.

    Attributes:
        statuses: of the answers, "-" for none.
        health: seconds that each ``/health`` took, in order.
        loop: CPU seconds of the thread of the event loop.
        cpu: CPU seconds of all threads and child processes.
        growth: MiB that the server took at most, beyond what it had before.
        seconds: until the last answer.
    """

    statuses: Sequence[str]
    health: Sequence[float]
    loop: float
    cpu: float
    growth: float
    seconds: float

    def share(self, part: float) -> float:
        """Return the time within which ``part`` of the answers of ``/health`` came."""
        ordered = sorted(self.health)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))]

    @property
    def misses(self) -> str:
        """Return which parts of the goal it misses, in words."""
        found = []
        if self.share(0.99) > P99_SECONDS:
            found.append("p99")
        if max(self.health) > WORST_SECONDS:
            found.append("max")
        if self.growth > GROWTH_MIB:
            found.append("memory")
        return ", ".join(found)


class HealthWatch(Thread):
    """Asks ``/health`` every 10 ms until it is stopped. While one answer is late, the next ones are late, too."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._ended = Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        """Ask."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=600) as connection:
            while not self._ended.is_set():
                began = time.perf_counter()
                connection.sendall(_HEALTH)
                if not connection.recv(_PIECE).startswith(b"HTTP/1.1 200"):
                    raise SystemExit("/health failed")
                took = time.perf_counter() - began
                # Those that were due meanwhile would have waited for the rest of it.
                self.seconds.append(took)
                self.seconds.extend(took - _INTERVAL * n for n in range(1, int(took / _INTERVAL) + 1))
                self._ended.wait(max(0.0, _INTERVAL - took))

    def stop(self) -> list[float]:
        """Return what the answers took, in seconds."""
        self._ended.set()
        self.join()
        return self.seconds


def try_attack(attack: Attack, flags: Sequence[str], patience: float) -> Effect:
    """Start a server, send the attack, and return what it did."""
    request = attack.request()
    with servers.singletree(flags=flags) as server:
        read_streams(server.port, [post("/v1/chat/completions", _FIRST)], b"{")
        wait_idle(server.pid)
        watch = HealthWatch(server.port)
        watch.start()
        time.sleep(0.5)
        loop, cpu = _loop_seconds(server.pid), cpu_seconds(server.pid)
        with _peak(server.pid) as growth:
            began = time.perf_counter()
            answers = [""] * attack.at_once
            clients = [
                Thread(target=send, args=(server.port, request, patience, answers, number), daemon=True)
                for number in range(attack.at_once)
            ]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            seconds = time.perf_counter() - began
            time.sleep(0.5)
        loop, cpu = _loop_seconds(server.pid) - loop, cpu_seconds(server.pid) - cpu
        return Effect(answers, watch.stop(), loop, cpu, growth[0], seconds)


def send(port: int, request: bytes, patience: float, answers: list[str], number: int) -> None:
    """Send ``request``, and put the status of the answer into ``answers[number]``; "-" for none."""
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=patience) as connection:
            with contextlib.suppress(ConnectionError):  # it may have answered before it read all
                connection.sendall(request)
            answer = connection.recv(_PIECE)
            while connection.recv(_PIECE):
                pass
    except OSError:
        pass
    answers[number] = answer[9:12].decode("ascii", "replace") or "-"


def _loop_seconds(pid: int) -> float:
    """Return the CPU seconds of the first thread of a process, which runs the event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


@contextlib.contextmanager
def _peak(pid: int) -> Iterator[list[float]]:
    """Measure by how many MiB a process and its children grow at most; yield a list that has it at the end."""
    growth: list[float] = []
    before = {each: _memory(each, "VmRSS") for each in (pid, *children(pid))}
    for each in before:
        Path(f"/proc/{each}/clear_refs").write_text("5", encoding="ascii")
    yield growth
    after = {each: _memory(each, "VmHWM") for each in (pid, *children(pid))}
    growth.append(sum(max(0.0, after[each] - before.get(each, 0.0)) for each in after))


def _memory(pid: int, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    """Try the attacks, and print what each did."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument("words", nargs="*", help="only attacks with one of these in their names")
    parser.add_argument("--model", type=Path, help="its tokenizer and template; by default Qwen3's")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for one attack")
    parser.add_argument("--quick", action="store_true", help="without those that take many connections")
    options = parser.parse_args()
    if options.model is None:
        peers.ensure_tokenizer()
    flags = ("--engine", "scripted", "--model", str(options.model or peers.QWEN3))
    chosen = [
        each for each in ATTACKS if not options.words or any(word in each.name for word in options.words)
    ]
    if options.quick:
        chosen = [each for each in chosen if each.at_once == 1]
    print(
        f"{'attack':<42}{'status':>9}{'p50 ms':>8}{'p99 ms':>9}{'max ms':>9}{'loop s':>8}{'CPU s':>8}{'MiB':>7}"
    )
    missed = 0
    for attack in chosen:
        effect = try_attack(attack, flags, options.patience)
        misses = effect.misses
        missed += bool(misses)
        statuses = ",".join(sorted(set(effect.statuses)))
        times = (1000 * each for each in (effect.share(0.5), effect.share(0.99), max(effect.health)))
        p50, p99, worst = times
        print(
            f"{attack.name:<42}{statuses:>9}{p50:>8.1f}{p99:>9.1f}{worst:>9.1f}{effect.loop:>8.2f}"
            f"{effect.cpu:>8.2f}{effect.growth:>7.0f}  {'misses: ' + misses if misses else ''}",
            flush=True,
        )
    print(
        f"goal: p99 {1000 * P99_SECONDS:.0f} ms, max {1000 * WORST_SECONDS:.0f} ms, memory {GROWTH_MIB:.0f} MiB; "
        f"{missed} of {len(chosen)} attacks miss it"
    )
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
