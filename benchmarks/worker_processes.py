"""Worker processes that are killed and started again while a server uses them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

_WORKER = Path(__file__).resolve().parent.parent / "tests" / "engines" / "scripted_worker.py"
_START_SECONDS = 120.0


class WorkerProcess:
    """A scripted worker on one port.

    Args:
        port: the port, the same after each start.
        flags: further flags of ``scripted_worker.py``.
        output: file to which it prints.
    """

    def __init__(self, port: int, flags: Sequence[str], output: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, str(_WORKER), "--port", str(port), *flags]
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; it answers some seconds later."""
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        """Wait until it answers. Raises RuntimeError with what it printed if it does not."""
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until and self._process is not None and self._process.poll() is None:
            if self.answers():
                return
            time.sleep(0.1)
        raise RuntimeError(f"a worker did not start:\n{self._output.read_text(errors='replace')[-2000:]}")

    def answers(self) -> bool:
        """Return whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop the process, with its connections open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)


def free_port() -> int:
    """Return a loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
