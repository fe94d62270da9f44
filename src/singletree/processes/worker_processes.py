"""Run one server in several processes (``--workers``): start them, restart those that die, and stop them in order.

Each process listens on the same port with SO_REUSEPORT, so that the kernel gives each of them the same share of the
connections. With one listening socket for all, the process that happens to wake first accepts most of them: of 64
connections that were opened at once, the busier of two processes got 87 % (with SO_REUSEPORT 55 %), of connections
opened one after another up to 100 % (61 % of 8). A keep-alive connection stays with its process, so that mattered more
than a connection lost when a process dies before it has accepted it.

This process does not serve. It holds the port, so that no other program gets it between two starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from singletree.engines.lifetime import RestartBackoff
from singletree.errors import BadConfiguration, EngineFailed, Overloaded, SingletreeError, WeightsUnavailable
from singletree.server.http.run import choose_address, describe_ready, stop_signals
from singletree.server.settings.config import WEIGHTLESS_ENGINES, Config

_KEY_BYTES = 32
_LONGEST_PATH = 80
"""Longest path of the shared folder; the path of a Unix socket has at most 107 characters."""

_KILL_SECONDS = 20.0
"""How long a process may take to end, in addition to ``--drain-seconds``, before it is killed."""

_LONGEST_SLEEP = 0.5
"""How long a restart that has to wait sleeps at once, so that it does not hold up the end of the server."""

_FAILURES: dict[str, type[SingletreeError]] = {
    each.__name__: each for each in (BadConfiguration, WeightsUnavailable, EngineFailed)
}
_CHILD = "from singletree.processes.served_process import main; main()"

HASH_SEED = "PYTHONHASHSEED"
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


async def run_workers(config: Config, report: Callable[[str], None]) -> bool:
    """Serve with ``config.workers`` processes, as ``run_server`` does in one.

    Raises BadConfiguration also where the engine cannot be shared by processes.
    """
    check_shareable(config)
    address, port = choose_address(config.host, config.port)
    folder = Path(tempfile.mkdtemp(prefix="singletree-"))
    try:
        if len(str(folder)) > _LONGEST_PATH:
            raise BadConfiguration(
                f"the folder for temporary files is too long for sockets ({folder}); set TMPDIR to a shorter one"
            )
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((address, port))
            return await ProcessGroup(for_processes(config, address, port, folder), folder, report).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_shareable(config: Config) -> None:
    """Raise BadConfiguration if several processes cannot serve with ``config``."""
    if not hasattr(socket, "SO_REUSEPORT") or sys.platform == "win32":
        raise BadConfiguration("--workers needs an operating system with SO_REUSEPORT; leave it out")
    for one in config.each_model or (config,):
        # Each process would load the weights, and have a prefix cache of its own.
        if not one.engine_url and one.engine not in WEIGHTLESS_ENGINES:
            raise BadConfiguration(
                f"--workers {config.workers} needs an engine that its processes can share: start llama-server, vLLM or "
                "SGLang as a server and name it with --engine-url, or leave --workers out"
            )


def for_processes(config: Config, address: str, port: int, folder: Path) -> Config:
    """Return the settings of processes that listen on ``address`` and ``port`` and share ``folder`` while they run."""
    key = config.capsule_key or (secrets.token_hex(_KEY_BYTES),)
    shared: dict[str, Any] = {"shared_folder": folder, "capsule_key": key, "host": address, "port": port}
    each = tuple(replace(one, **shared) for one in config.each_model)
    return replace(config, **shared, each_model=each)


class ProcessGroup:
    """The processes of one server, which share ``folder``."""

    def __init__(self, config: Config, folder: Path, report: Callable[[str], None]) -> None:
        self._config = config
        self._report = report
        self._metrics = folder / "metrics"
        self._metrics.mkdir()
        # Equal in all processes: sessions move between them with hashes of their messages.
        seed = os.environ.get(HASH_SEED) or str(secrets.randbelow(2**32))
        self._environment = {**os.environ, METRICS_FOLDER: str(self._metrics), HASH_SEED: seed}
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._loaded = {number: asyncio.Event() for number in range(1, config.workers + 1)}
        self._ready = {number: asyncio.Event() for number in self._loaded}
        self._has_opened = asyncio.Event()
        self._opening: set[asyncio.Task[None]] = set()
        self._stopping = self._serves = False
        self._failure: SingletreeError | None = None

    async def run(self) -> bool:
        """Run the processes until a signal stops them, and return whether it was SIGINT. Raises what kept the first one
        from starting.
        """
        with stop_signals() as signalled:
            watching = [asyncio.create_task(self._keep_running(1))]
            try:
                starting = asyncio.create_task(self._start(watching))
                stopped = asyncio.create_task(signalled.acquire())
                await _first_of(starting, stopped, watching[0])
                if starting.done():
                    starting.result()
                    await _first_of(stopped, *watching)
                starting.cancel()
                await self._stop(watching, signalled)
            finally:
                self._stopping = True
                for child in self._children.values():
                    with contextlib.suppress(ProcessLookupError):
                        child.kill()
                await asyncio.gather(*watching, return_exceptions=True)
        if self._failure is not None:
            raise self._failure
        return signalled.first == signal.SIGINT

    async def _start(self, watching: list[asyncio.Task[None]]) -> None:
        # The first one alone: it downloads what is missing, and an error is reported once.
        await self._loaded[1].wait()
        watching += [asyncio.create_task(self._keep_running(number)) for number in self._loaded if number > 1]
        for loaded in self._loaded.values():
            await loaded.wait()
        self._has_opened.set()
        for ready in self._ready.values():
            await ready.wait()
        self._serves = True
        for line in describe_ready(self._config, self._config.port):
            self._report(line)

    async def _stop(self, watching: list[asyncio.Task[None]], signalled: asyncio.Semaphore) -> None:
        """Let all processes finish; a further signal is passed on, and then ends what runs at once."""
        self._stopping = True
        ending = asyncio.create_task(asyncio.wait(watching))
        self._signal()
        deadline = asyncio.get_running_loop().time() + self._config.drain_seconds + _KILL_SECONDS
        while not ending.done() and (left := deadline - asyncio.get_running_loop().time()) > 0:
            again = asyncio.create_task(signalled.acquire())
            await _first_of(again, ending, seconds=left)
            if again.done():
                self._signal()
            again.cancel()

    def _signal(self) -> None:
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)

    async def _keep_running(self, number: int) -> None:
        backoff = RestartBackoff()
        while not self._stopping:
            try:
                backoff.check()
            except Overloaded as pause:
                await asyncio.sleep(min(pause.retry_after, _LONGEST_SLEEP))
                continue
            backoff.record_start()
            status = await self._run_once(number)
            if not self._stopping:
                backoff.record_death()
                self._report(f"WARNING    process {number} ended with status {status} and is started again")

    async def _run_once(self, number: int) -> int:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _CHILD,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # a signal of the terminal goes to this process only
        )
        self._children[number] = child
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            settings = pickle.dumps((self._config, number))
            # The pipe stays open: when it closes, this process has died, and the child ends.
            child.stdin.write(len(settings).to_bytes(8, "big") + settings)
            if self._stopping:
                child.terminate()
            async for line in child.stdout:
                self._take(number, child.stdin, json.loads(line))
        finally:
            self._children.pop(number, None)
            status = await child.wait()
            self._ready[number].clear()
            _forget_live_metrics(child.pid, self._metrics)
        return status

    def _take(self, number: int, orders: asyncio.StreamWriter, message: dict[str, str]) -> None:
        if "line" in message:
            line = message["line"]
            if line.startswith("ready"):
                if self._serves:
                    self._report(f"process    {number} serves again")
                self._ready[number].set()
            elif (number == 1 and not self._has_opened.is_set()) or line.startswith("WARNING"):
                self._report(line)
        elif "loaded" in message:
            self._loaded[number].set()
            opening = asyncio.create_task(self._open(orders))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)
        elif "failed" in message:
            failure = _FAILURES.get(message["failed"], EngineFailed)(message["message"])
            if self._has_opened.is_set():
                self._report(f"WARNING    process {number}: {failure.message}")
            else:
                self._failure = failure
                self._stopping = True
                self._signal()

    async def _open(self, orders: asyncio.StreamWriter) -> None:
        await self._has_opened.wait()
        with contextlib.suppress(ConnectionError):  # it has died meanwhile
            orders.write(b"listen\n")
            await orders.drain()


async def _first_of(*tasks: asyncio.Task[Any], seconds: float | None = None) -> None:
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


def _forget_live_metrics(pid: int, folder: Path) -> None:
    """Remove the gauges of a process that has ended. Its counters stay: they count what has happened."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]
