"""A benchmark that is killed leaves nothing: no server, no folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 60.0


def started_with(variable: str) -> list[int]:
    """Return the processes that have ``variable`` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
def test_a_killed_benchmark_ends_its_servers_and_removes_its_folder(
    tmp_path: Path, kill: signal.Signals
) -> None:
    """Also where the signal comes twice: to ``make``, which passes it on, and to its whole group."""
    if signal.getsignal(kill) is signal.SIG_IGN:
        pytest.skip("what starts these tests has the signal ignored, and its processes inherit that")
    command = [sys.executable, "-m", "benchmarks.check_servers", "singletree-scripted"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    benchmark = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    until = time.monotonic() + SECONDS
    while not any(log.stat().st_size for log in tmp_path.glob("*/server.log")):
        assert benchmark.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    assert len(started_with(f"TMPDIR={tmp_path}")) > 1
    benchmark.send_signal(kill)
    time.sleep(0.2)
    benchmark.send_signal(kill)
    assert benchmark.wait(SECONDS) == -signal.SIGINT
    assert started_with(f"TMPDIR={tmp_path}") == []
    assert list(tmp_path.iterdir()) == []
