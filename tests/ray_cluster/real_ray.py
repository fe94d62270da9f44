"""Ray in an environment of its own, and singletree on a Ray cluster that is started on this machine: ``make ray``.

``python tests/ray_cluster/real_ray.py`` installs Ray 2.60 and what singletree needs beside it (600 MB, once), into
``$SINGLETREE_PEERS`` or ``~/.cache/singletree-peers``.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.real_vllm import LINTERS, PEERS, ROOT, free_port, pip, run_quietly

RAY = "2.60.0"
READY_SECONDS = 300
STOP_SECONDS = 60
MARK = "SINGLETREE_RAY_CLUSTER"
"""Environment variable by which all processes of one cluster are found: Ray starts them in sessions of their own."""


@dataclass(frozen=True)
class RayCluster:
    """A cluster of one node that serves singletree. ``mark`` is in the environment of all its processes."""

    url: str
    mark: str
    log: Path

    def replicas(self, deployment: str) -> list[int]:
        """Return the process ids of the replicas of a deployment."""
        return [
            pid for pid, title in _processes(self.mark) if f"ServeReplica:singletree:{deployment}" in title
        ]

    def kill_replica(self, deployment: str) -> None:
        """End the replica of a deployment as a crash of its machine does."""
        [pid] = self.replicas(deployment)
        os.kill(pid, signal.SIGKILL)

    def output(self) -> str:
        """Return what Ray and the replicas have printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def _processes(mark: str) -> Iterator[tuple[int, str]]:
    """Yield the process id and the title of all processes of the cluster."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                yield int(folder.name), (folder / "cmdline").read_bytes().decode(errors="replace")


def install() -> Path:
    """Return the environment with Ray; make it if it is missing."""
    venv = PEERS / "ray"
    ready = venv / f".ready-{RAY}"
    if not ready.exists():
        print(f"Installing Ray {RAY} into {venv} ...", flush=True)
        run_quietly(sys.executable, "-m", "venv", venv)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"]
        tests = [each for each in extras["dev"] if not each.startswith(LINTERS)]
        engines = [*extras["serve"], *extras["llamacpp"], *extras["routing"]]
        pip(venv, "install", *project["dependencies"], *engines, *tests, f"ray[serve]=={RAY}")
        ready.touch()
    return venv


@contextlib.contextmanager
def serving(folder: Path, **arguments: Any) -> Iterator[RayCluster]:
    """Run ``serve run`` with a configuration file on a cluster of its own, until the block is left.

    Args:
        folder: takes the configuration file and the log.
        arguments: of ``singletree.ray:app``.
    """
    venv, port, mark = install(), free_port(), secrets.token_hex(8)
    application = {"name": "singletree", "import_path": "singletree.ray:app", "route_prefix": "/"}
    settings = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [{**application, "args": arguments}],
    }
    file = folder / "serve.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    log = folder / "serve.log"
    # A socket's path may have 107 characters, and Ray's are long.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as work:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTHON"))},
            "PYTHONPATH": str(ROOT / "src"),
            "RAY_TMPDIR": work,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "OMP_NUM_THREADS": "1",
            MARK: mark,
        }
        with log.open("wb") as out:
            command = [str(venv / "bin" / "serve"), "run", str(file)]
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environment, cwd=folder, start_new_session=True
            )
        cluster = RayCluster(f"http://127.0.0.1:{port}", mark, log)
        try:
            _wait_until_ready(cluster, process)
            yield cluster
        finally:
            _stop(process, mark)


def _wait_until_ready(cluster: RayCluster, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{cluster.url}/health", timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(
        f"singletree did not start on Ray within {READY_SECONDS} s:\n{cluster.output()[-5000:]}"
    )


def _stop(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the application and, if that takes too long, all processes of its cluster."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    for pid, _ in _processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(STOP_SECONDS)


if __name__ == "__main__":
    install()
