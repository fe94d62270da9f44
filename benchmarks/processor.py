"""Processor time of other processes, and how busy the machine was meanwhile."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_LOOP = b"x" * (1 << 20)
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_IDLE_SECONDS = 0.02  # of CPU in a second; Dynamo's frontend takes 4 ms


def children(pid: int) -> list[int]:
    """The processes that ``pid`` started and that still run, at any depth."""
    try:
        direct = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return []
    return [process for child in map(int, direct) for process in (child, *children(child))]


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process and its children, those that have ended included.

    The figures of /proc/PID/stat, from the clock behind it: its own figures go in steps of 10 ms.
    """
    return sum(_of_threads(process) + _of_reaped(process) for process in (pid, *children(pid)))


def _of_threads(pid: int) -> float:
    # A process's clock as clock_getcpuclockid(3) makes its number: https://man7.org/linux/man-pages/man2/clock_getres.2.html
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def _of_reaped(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    except OSError:
        return 0.0
    # cutime and cstime, fields 16 and 17 of proc_pid_stat(5); the first two are before the bracket.
    return (int(fields[13]) + int(fields[14])) * _TICK


def resident_bytes(pid: int) -> int:
    """Memory of a process and its children."""
    page = os.sysconf("SC_PAGE_SIZE")
    return sum(
        int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]) * page
        for process in (pid, *children(pid))
    )


def wait_idle(pid: int, patience: float = 60.0) -> None:
    """Wait until a process and its children have done nothing for a second, such as to load in the background."""
    until = time.monotonic() + patience
    before = cpu_seconds(pid)
    while time.monotonic() < until:
        time.sleep(1.0)
        now = cpu_seconds(pid)
        if now - before < _IDLE_SECONDS:
            return
        before = now


def busy_seconds() -> float:
    """Processor time of the whole machine since it started, stolen time included."""
    first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, first[1:9])
    return (user + nice + system + irq + softirq + steal) * _TICK


def calibrate() -> float:
    """CPU seconds of a fixed piece of work: how fast this core is now, beside whatever else runs."""
    began = time.thread_time()
    for _ in range(24):
        hashlib.blake2b(_LOOP).digest()
    return time.thread_time() - began


class Spent(NamedTuple):
    """What was spent between two looks: seconds on a clock, and of processor time.

    Attributes:
        cpu: of each watched process, in the order in which they were given.
        others: of everything that was not watched, this process not included.
    """

    wall: float
    cpu: tuple[float, ...]
    others: float


class Watch:
    """Looks at the clocks when made; ``stop`` looks again."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._began = self._look()

    def stop(self) -> Spent:
        """What was spent since."""
        wall, client, busy, *cpu = (now - then for now, then in zip(self._look(), self._began, strict=True))
        return Spent(wall, tuple(cpu), max(0.0, busy - client - sum(cpu)))

    def _look(self) -> tuple[float, ...]:
        cpu = [cpu_seconds(pid) for pid in self._pids]
        return time.perf_counter(), time.process_time(), busy_seconds(), *cpu


def machine() -> str:
    """The machine in one line."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cpu = next(names, platform.machine())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"{cpu}, {os.cpu_count()} cores, {pages / 2**30:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )
