"""Starts llama.cpp in a child process, and ends it.

A process of its own, because llama.cpp ends its process on an internal error, prints where it likes, wants
OpenMP's settings in the environment before it is loaded, and must not share the interpreter lock with the
event loop. It costs nothing a token: the UNIX socket that carries them is needed within one process as well.
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

_WORKER = Path(__file__).with_name("llamacpp_worker.py")
_STOP_SECONDS = 5.0
_ERROR_LINES = 20  # of llama.cpp's log, kept for a failed start
_ERRORS_TOLD = 3
_LINE_BYTES = 1 << 20

# OpenMP threads that wait for each other spin. Without end (the default) a second busy process on the same
# cores slows decoding 10 to 25 times; not at all (OMP_WAIT_POLICY=passive) halves it on a quiet machine. This
# much keeps nine tenths of the speed when quiet and loses half when the cores are shared. 2 cores, 135M
# model, tokens/s of 1 and 4 streams: 92 and 159 quiet, 30 and 74 beside a busy process; with the default 101
# and 163, 4 and 8; with passive waiting 37 and 80, 46 and 82.
_SPIN = {"GOMP_SPINCOUNT": "1000"}
_SPIN_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


class LlamaProcess:
    """A running llama.cpp. Make one with ``spawn``."""

    def __init__(self, process: Process, ready: Mapping[str, Any], log: asyncio.Task[None] | None) -> None:
        self._process = process
        self._log = log
        self.pid: int = process.pid
        self.socket: str = ready["socket"]
        self.version: str = ready["version"]

    @classmethod
    async def spawn(cls, settings: Mapping[str, Any], *, verbose: bool) -> LlamaProcess:
        """Load the model; returns when it is loaded. llama.cpp's log goes to standard error if ``verbose``.

        Raises EngineFailed with llama.cpp's own last words.
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
        words: deque[str] = deque(maxlen=_ERROR_LINES)
        log = asyncio.create_task(_listen(process.stderr, words)) if process.stderr else None
        try:
            ready = await _exchange(process, settings)
            if "socket" not in ready:
                raise await _failure(process, ready, log, words)
        except BaseException:
            await _kill(process, log)
            raise
        return cls(process, ready, log)

    @property
    def ended(self) -> bool:
        """Whether it is known to run no more."""
        return self._process.returncode is not None

    async def death(self, patience: float) -> str | None:
        """How it ended, in words; None if it still runs after ``patience`` seconds."""
        try:
            code = await asyncio.wait_for(self._process.wait(), patience)
        except TimeoutError:
            return None
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def stop(self) -> None:
        """End it and remove its socket. Safe to call twice."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        except TimeoutError:
            pass
        finally:
            await _kill(self._process, self._log)
            shutil.rmtree(os.path.dirname(self.socket), ignore_errors=True)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's own choice of how OpenMP waits is left alone."""
    chosen = any(name in environ for name in _SPIN_SETTINGS)
    return {**environ} if chosen else {**environ, **_SPIN}


async def _exchange(process: Process, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The worker's answer; empty when it ended without one."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # It ended at once; what it wrote says why.
    line = await process.stdout.readline()
    answer = json.loads(line) if line else {}
    return answer if isinstance(answer, dict) else {}


async def _failure(
    process: Process, answer: Mapping[str, Any], log: asyncio.Task[None] | None, words: deque[str]
) -> EngineFailed:
    if process.stdin is not None:
        process.stdin.close()
    code = await process.wait()
    if log is not None:
        await log
    said = str(answer.get("error") or f"it ended with code {code}")
    # What went wrong comes first; what follows are its consequences.
    tail = "".join(f"\n  {line}" for line in list(words)[:_ERRORS_TOLD])
    return EngineFailed(f"llama.cpp could not load the model: {said}{tail}")


async def _listen(stderr: asyncio.StreamReader, words: deque[str]) -> None:
    """Keep the pipe empty, lest the worker block, and its last lines."""
    while True:
        try:
            line = await stderr.readline()
        except ValueError:  # longer than any log line should be
            continue
        if not line:
            return
        if text := line.decode(errors="replace").rstrip():
            words.append(text)


async def _kill(process: Process, log: asyncio.Task[None] | None) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
    if log is not None:
        log.cancel()
        await asyncio.wait((log,))
