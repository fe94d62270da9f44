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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
        missed = {
            "p99": self.share(0.99) > P99_SECONDS,
            "max": max(self.health) > WORST_SECONDS,
            "memory": self.growth > GROWTH_MIB,
        }
        return ", ".join(name for name, is_missed in missed.items() if is_missed)


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


def try_attack(attack: Attack, patience: float = 120.0) -> Effect:
    """Start a server, send the attack, and return what it did."""
    request = attack.request()
    with servers.singletree() as server:
        read_streams(server.port, [post("/v1/chat/completions", _FIRST)], b"{")
        wait_idle(server.pid)
        watch = HealthWatch(server.port)
        watch.start()
        time.sleep(0.5)
        loop, cpu, before = _loop_seconds(server.pid), cpu_seconds(server.pid), _memory(server.pid, "VmRSS")
        for each in before:
            Path(f"/proc/{each}/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew.
        began = time.perf_counter()
        with ThreadPoolExecutor(attack.at_once) as pool:
            answers = list(pool.map(lambda _: send(server.port, request, patience), range(attack.at_once)))
        seconds = time.perf_counter() - began
        time.sleep(0.5)
        peaks = _memory(server.pid, "VmHWM")
        growth = sum(max(0.0, peaks[each] - before.get(each, 0.0)) for each in peaks)
        loop, cpu = _loop_seconds(server.pid) - loop, cpu_seconds(server.pid) - cpu
        return Effect(answers, watch.stop(), loop, cpu, growth, seconds)


def send(port: int, request: bytes, patience: float) -> str:
    """Send ``request``, and return the status of the answer; "-" for none."""
    answer = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=patience) as connection,
    ):
        with contextlib.suppress(ConnectionError):  # it may have answered before it read all
            connection.sendall(request)
        answer = connection.recv(_PIECE)
        while connection.recv(_PIECE):
            pass
    return answer[9:12].decode("ascii", "replace") or "-"


def _loop_seconds(pid: int) -> float:
    """Return the CPU seconds of the first thread of a process, which runs the event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


def _memory(pid: int, name: str) -> dict[int, float]:
    """Return a figure of /proc/PID/status of a process and of its children, in MiB by process."""
    sizes = {}
    for each in (pid, *children(pid)):
        lines = Path(f"/proc/{each}/status").read_text(encoding="ascii").splitlines()
        sizes[each] = next(
            (int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), 0.0
        )
    return sizes


def main() -> None:
    """Try the attacks, and print what each did."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument("words", nargs="*", help="only attacks with one of these in their names")
    words = parser.parse_args().words
    peers.ensure_tokenizer()
    chosen = [each for each in ATTACKS if not words or any(word in each.name for word in words)]
    print(
        f"{'attack':<42}{'status':>9}{'p50 ms':>8}{'p99 ms':>9}{'max ms':>9}{'loop s':>8}{'CPU s':>8}{'MiB':>7}"
    )
    missed = 0
    for attack in chosen:
        effect = try_attack(attack)
        missed += bool(effect.misses)
        p50, p99, worst = (1000 * effect.share(part) for part in (0.5, 0.99, 1.0))
        print(
            f"{attack.name:<42}{','.join(sorted({*effect.statuses})):>9}{p50:>8.1f}{p99:>9.1f}{worst:>9.1f}"
            f"{effect.loop:>8.2f}{effect.cpu:>8.2f}{effect.growth:>7.0f}  "
            f"{'misses: ' + effect.misses if effect.misses else ''}",
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
