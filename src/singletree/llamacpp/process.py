"""Starts and ends llama.cpp in a child process.

It has a process of its own because llama.cpp ends its process on an internal error, prints to the standard streams,
reads OpenMP's settings from the environment when it is loaded, and must not share the interpreter lock with the
event loop. This adds no cost for a token: the UNIX socket that carries tokens is needed within one process as well.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from singletree.errors import EngineFailed

_WORKER = Path(__file__).with_name("worker.py")
_STOP_SECONDS = 5.0
_LOG_LINES_KEPT = 20  # of llama.cpp's log, for the message of a failed start
_LOG_LINES_SHOWN = 3
_LINE_BYTES = 1 << 20

# OpenMP threads that wait for each other spin. If they spin without end (the default), a second busy process on the
# same cores makes decoding 10 to 25 times slower; if they do not spin at all (OMP_WAIT_POLICY=passive), decoding is
# half as fast on an idle machine. This spin count keeps nine tenths of the speed on an idle machine and loses half
# when the cores are shared. Measured with 2 cores, a 135M model, tokens/s of 1 and of 4 streams: 92 and 159 idle, 30
# and 74 beside a busy process; with the default 101 and 163, 4 and 8; with passive waiting 37 and 80, 46 and 82.
_SPIN = {"GOMP_SPINCOUNT": "1000"}
_SPIN_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


class LlamaProcess:
    """A running llama.cpp process. Create one with ``spawn``.

    Attributes:
        socket: the path of the socket on which it serves.
        states: the folder in which it saves states of slots; only its owner may enter it.
        state_settings: the settings that change a state, as text.
    """

    def __init__(self, process: Process, ready: Mapping[str, Any], log: asyncio.Task[None] | None) -> None:
        self._process = process
        self._log = log
        self.pid: int = process.pid
        self.socket: str = ready["socket"]
        self.states = Path(ready["states"])
        self.version: str = ready["version"]
        self.state_settings: str = ready["state_settings"]

    @classmethod
    async def spawn(cls, settings: Mapping[str, Any], *, verbose: bool) -> LlamaProcess:
        """Start the process, and return when the model is loaded.

        With ``verbose``, llama.cpp's log goes to standard error. Raises EngineFailed with lines of llama.cpp's log.
        """
        process = await asyncio.create_subprocess_exec(
            # -P: the folder of the worker must not shadow other modules.
            *(sys.executable, "-P", str(_WORKER)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=None if verbose else PIPE,
            env=_environment(os.environ),
            limit=_LINE_BYTES,
            start_new_session=True,
        )
        log_lines: deque[str] = deque(maxlen=_LOG_LINES_KEPT)
        log = asyncio.create_task(_read_log(process.stderr, log_lines)) if process.stderr else None
        try:
            ready = await _exchange(process, settings)
            if "socket" not in ready:
                raise await _failure(process, ready, log, log_lines)
        except BaseException:
            await _kill(process, log)
            raise
        return cls(process, ready, log)

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def exit_reason(self, seconds: float) -> str | None:
        """Describe how the process ended; return None if it still runs after that many ``seconds``."""
        try:
            code = await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            return None
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def stop(self) -> None:
        """End the process and remove its socket. Safe to call twice."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        except TimeoutError:
            pass
        finally:
            await _kill(self._process, self._log)
            for folder in (os.path.dirname(self.socket), self.states):
                shutil.rmtree(folder, ignore_errors=True)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with our OpenMP settings, unless the user has set any of them."""
    chosen = any(name in environ for name in _SPIN_SETTINGS)
    return {**environ} if chosen else {**environ, **_SPIN}


async def _exchange(process: Process, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Send the settings and return the worker's answer; empty when it ended without one."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # It ended at once; its output has the reason.
    line = await process.stdout.readline()
    answer = json.loads(line) if line else {}
    return answer if isinstance(answer, dict) else {}


async def _failure(
    process: Process, answer: Mapping[str, Any], log: asyncio.Task[None] | None, log_lines: deque[str]
) -> EngineFailed:
    if process.stdin is not None:
        process.stdin.close()
    code = await process.wait()
    if log is not None:
        await log
    reason = str(answer.get("error") or f"the process ended with exit code {code}")
    # The first lines show the cause, later ones its consequences.
    tail = "".join(f"\n  {line}" for line in list(log_lines)[:_LOG_LINES_SHOWN])
    return EngineFailed(f"llama.cpp could not load the model: {reason}{tail}")


async def _read_log(stderr: asyncio.StreamReader, log_lines: deque[str]) -> None:
    """Read the pipe so that the worker never blocks, and keep its last lines."""
    while True:
        try:
            line = await stderr.readline()
        except ValueError:  # longer than any log line should be
            continue
        if not line:
            return
        if text := line.decode(errors="replace").rstrip():
            log_lines.append(text)


async def _kill(process: Process, log: asyncio.Task[None] | None) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
    if log is not None:
        log.cancel()
        await asyncio.wait((log,))
