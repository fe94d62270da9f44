"""Real Redis and PostgreSQL servers on loopback, from Debian's packages, in folders of their own."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engines.real_vllm import free_port

_SECONDS_TO_START = 60


def install(package: str, program: str) -> str:
    """Return the path of ``program``; install Debian's ``package`` if it is missing, or skip the test."""
    found = _find(program)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        line = ["apt-get", "install", "-y", "--no-install-recommends", package]
        subprocess.run(line, env=environment, capture_output=True, check=False)
        found = _find(program)
    if found is None:
        pytest.skip(f"{program} is not installed, and apt-get cannot install {package} here")
    return found


def _find(program: str) -> str | None:
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))
    return shutil.which(program) or (str(versions[-1]) if versions else None)


class Database:
    """A running database server."""

    def __init__(
        self, url: str, line: Sequence[str], is_ready: Callable[[], bool], user: int | None = None
    ) -> None:
        self.url, self._line, self._is_ready, self._user = url, line, is_ready, user
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self._process = subprocess.Popen(
            self._line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=self._user
        )
        until = time.monotonic() + _SECONDS_TO_START
        while time.monotonic() < until and self._process.poll() is None:
            if self._is_ready():
                return
            time.sleep(0.05)
        raise RuntimeError(f"{self._line[0]} did not start")

    def stop(self) -> None:
        """Stop it."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=60)

    def freeze(self) -> None:
        """Let it take connections and answer nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def redis(folder: Path) -> Iterator[Database]:
    """A Redis server until the block ends."""
    program, port = install("redis-server", "redis-server"), free_port()
    line = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    database = Database(f"redis://127.0.0.1:{port}/0", line, lambda: _pongs(port))
    database.start()
    try:
        yield database
    finally:
        database.thaw()
        database.stop()


def _pongs(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


@contextmanager
def postgres() -> Iterator[Database]:
    """A PostgreSQL server until the block ends. It refuses to run as root, so it gets the user of its package."""
    with TemporaryDirectory(prefix="postgres-") as folder:
        yield from _postgres(Path(folder))


def _postgres(folder: Path) -> Iterator[Database]:
    initialize, program = install("postgresql", "initdb"), install("postgresql", "postgres")
    port, user = free_port(), None
    data = folder / "data"
    data.mkdir()
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres").pw_uid
        for each in (folder, data):
            os.chown(each, user, -1)
    line = [initialize, "-D", str(data), "-U", "singletree", "-A", "trust", "-N", "-E", "UTF8"]
    made = subprocess.run(line, capture_output=True, user=user, cwd=data, text=True)
    assert made.returncode == 0, made.stderr
    settings = [
        "-c",
        "listen_addresses=127.0.0.1",
        "-c",
        f"unix_socket_directories={data}",
        "-c",
        "fsync=off",
    ]
    line = [program, "-D", str(data), "-p", str(port), *settings]
    asks = [install("postgresql", "pg_isready"), "-h", "127.0.0.1", "-p", str(port)]
    database = Database(
        f"postgresql://singletree@127.0.0.1:{port}/postgres",
        line,
        lambda: subprocess.run(asks, capture_output=True, check=False).returncode == 0,
        user,
    )
    database.start()
    try:
        yield database
    finally:
        database.thaw()
        database.stop()
