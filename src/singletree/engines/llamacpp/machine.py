"""Counts the processors and the memory that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

KV_SHARE = 8
"""By default the KV cache of llama.cpp takes at most this part of the memory: 1/8."""

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


def usable_cores() -> int:
    """Return how many physical cores this process may use, at least 1.

    Hyper-threads of one core count once: a second thread on a core slows matrix products down. CPU affinity and
    the quota of the container are respected where the system reports them.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_read(Path(_SIBLINGS.format(cpu))) or str(cpu) for cpu in allowed}
    quota = _cpu_quota()
    return max(1, min(len(cores), int(quota)) if quota else len(cores))


def usable_memory() -> int:
    """Return the physical memory in bytes, or the limit of the container if that is less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read(_MEMORY_LIMIT)
    return min(physical, int(limit)) if limit.isdigit() else physical


def _cpu_quota() -> float | None:
    """Return how many processors' time the container may use; None for no limit."""
    quota, _, period = _read(_CPU_QUOTA).partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
