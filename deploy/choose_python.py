"""Print the Python that ``make`` installs with: ``python3``, or one of the same version that runs code much faster.

    python3 deploy/choose_python.py

Some builds of Python are not optimized (those of pyenv, unless it is told otherwise). They take up to twice the time of
a distribution's Python for the same code, and a server on them 1.1 to 1.3 times the CPU. The candidates are those on
PATH with the minor version of ``python3``: the packages of requirements.lock may not exist for another one. The reason
of a choice other than ``python3`` goes to standard error.
"""

from __future__ import annotations

import os
import subprocess
import sys

_CLEARLY_FASTER = 1.25
"""The ratio of times from which another Python than ``python3`` is chosen. Nearer ones could be noise."""

_ROUNDS = 5
"""How often each is measured, in turn. The shortest time counts: whatever else runs only makes one longer."""

_SECONDS = 30
"""Time for a candidate to answer."""

_PROBE = """
import bz2, ctypes, ensurepip, lzma, sqlite3, ssl, sys, time, venv, zlib
class Point:
    __slots__ = ("x",)
    def __init__(self, x):
        self.x = x
    def moved(self, by):
        return Point(self.x + by)
def work():
    began, point, seen = time.process_time(), Point(0), {}
    for step in range(20000):
        point = point.moved(step)
        seen["x"] = [point.x, step]
    return time.process_time() - began
print(*sys.version_info[:2], min(work() for _ in range(5)), getattr(sys, "_base_executable", "") or sys.executable)
"""


def main() -> None:
    """Print the path of the chosen Python, or ``python3`` if that one cannot be measured."""
    preferred = measure("python3")
    if preferred is None:
        print("python3")
        return
    version, seconds, own = preferred
    times = {own: [seconds]}
    for candidate in candidates(version):
        found = measure(candidate)
        if found and found[0] == version:
            times.setdefault(found[2], []).append(found[1])
    for _ in range(_ROUNDS if len(times) > 1 else 0):
        for path, measured in times.items():
            again = measure(path)
            if again:
                measured.append(again[1])
    fastest = min(times, key=lambda path: min(times[path]))
    ratio = min(times[own]) / min(times[fastest])
    if ratio < _CLEARLY_FASTER:
        print(own)
        return
    reason = f"{fastest} runs code {ratio:.1f} times as fast as {own}, so it is used"
    print(f"{reason} (make PYTHON=python3 uses the other).", file=sys.stderr)
    print(fastest)


def measure(python: str) -> tuple[str, float, str] | None:
    """Return the minor version of ``python``, the seconds that it takes for some code, and its real path.

    Returns:
        None if it does not start, or lacks a module that an installation needs.
    """
    command = [python, "-I", "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        major, minor, seconds, path = done.stdout.strip().split(" ", 3)
        return f"{major}.{minor}", float(seconds), os.path.realpath(path)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def candidates(version: str) -> list[str]:
    """Return the files on PATH that are named like a Python of ``version``, each once."""
    found = {}
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        for name in ("python3", f"python{version}"):
            path = os.path.join(folder, name)
            if os.access(path, os.X_OK):
                found.setdefault(os.path.realpath(path), path)
    return list(found.values())


if __name__ == "__main__":
    main()
