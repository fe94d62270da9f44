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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import real_vllm
from engines.real_vllm import LINTERS, PEERS, ROOT, free_port, pip, run_quietly

RAY = "2.60.0"
READY_SECONDS = 200
STOP_SECONDS = 60
MARK = "SINGLETREE_RAY_CLUSTER"
"""Environment variable by which all processes of one cluster are found: Ray starts them in sessions of their own."""
NODE = "SINGLETREE_RAY_NODE"
"""The same for those of one node."""


@dataclass(frozen=True)
class RayCluster:
    """A cluster that serves singletree. ``mark`` is in the environment of all its processes.

    Attributes:
        nodes: starts and kills further nodes; None where the cluster has only its own.
    """

    url: str
    mark: str
    log: Path
    nodes: RayNodes | None = None

    def replicas(self, deployment: str) -> list[int]:
        """Return the process ids of the replicas of a deployment."""
        return [
            pid for pid, title in _processes(self.mark) if f"ServeReplica:singletree:{deployment}" in title
        ]

    def kill_replica(self, deployment: str) -> None:
        """End a replica of a deployment as a crash does."""
        pid, *_ = self.replicas(deployment)
        os.kill(pid, signal.SIGKILL)

    def replace(self, deployment: str, seconds: float) -> None:
        """Kill the only replica of a deployment, and wait until Ray has started another one, and it answers."""
        [killed] = self.replicas(deployment)
        os.kill(killed, signal.SIGKILL)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if killed not in self.replicas(deployment) and self.replicas(deployment) and self.answers():
                return
            time.sleep(0.5)
        raise AssertionError(f"Ray did not replace {deployment} within {seconds:g} s")

    def answers(self) -> bool:
        """Return whether a server replica answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False

    def output(self) -> str:
        """Return what Ray and the replicas have printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")


class RayNodes:
    """The nodes of a cluster on this machine, each with a raylet and workers of its own.

    Args:
        environment: of their processes; has the cluster's mark.
        log: takes their output.
    """

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._environment = environment
        self._log = log
        self.address = f"127.0.0.1:{free_port()}"

    def start(self, name: str, resources: Mapping[str, float], *, is_head: bool = False) -> None:
        """Start a node that has the custom ``resources``, and wait until it has joined."""
        ray = str(install() / "bin" / "ray")
        place = (
            ["--head", "--port", self.address.rpartition(":")[2]] if is_head else ["--address", self.address]
        )
        command = [ray, "start", *place, "--node-ip-address", "127.0.0.1", "--num-cpus", "4"]
        command += ["--resources", json.dumps(resources), "--object-store-memory", str(10**8)]
        # Two nodes of one machine would take the same ports.
        command += ["--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0"]
        command += ["--include-dashboard", "false"] if is_head else []
        with self._log.open("ab") as out:
            started = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**self._environment, NODE: name},
                timeout=READY_SECONDS,
                check=False,
            )
        if started.returncode:
            text = self._log.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"the node {name} did not start:\n{text[-3000:]}")

    def kill(self, name: str) -> int:
        """End all processes of a node as a power cut does; return how many there were."""
        found = [pid for pid, _ in _processes(name, NODE)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)


def _processes(mark: str, name: str = MARK) -> Iterator[tuple[int, str]]:
    """Yield the process id and the title of all processes whose variable ``name`` is ``mark``."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{name}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
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


def install_with_vllm() -> Path:
    """Return an environment with Ray and vLLM; make it if it is missing. It has the packages of both others."""
    ray, (vllm, _) = install(), real_vllm.install_in_process()
    venv = PEERS / "ray-vllm"
    ready = venv / f".ready-{RAY}-{real_vllm.VLLM}"
    if not ready.exists():
        run_quietly(sys.executable, "-m", "venv", "--without-pip", venv)
        [own] = (venv / "lib").glob("python3*/site-packages")
        folders = [next((each / "lib").glob("python3*/site-packages")) for each in (ray, vllm)]
        (own / "ray_and_vllm.pth").write_text("".join(f"{each}\n" for each in folders), encoding="utf-8")
        ready.touch()
    return venv


@contextlib.contextmanager
def serving(
    folder: Path,
    nodes: Mapping[str, Mapping[str, float]] | None = None,
    venv: Path | None = None,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Iterator[RayCluster]:
    """Run ``serve run`` with a configuration file on a cluster of its own, until the block is left.

    Args:
        folder: takes the configuration file and the log.
        nodes: the custom resources of each node by its name, the head first; None for the one that Ray starts itself.
        venv: an environment with Ray; None for that of ``install``.
        environment: further variables of all processes.
        arguments: of ``singletree.ray:app``.
    """
    venv, port, mark = venv or install(), free_port(), secrets.token_hex(8)
    application = {"name": "singletree", "import_path": "singletree.ray:app", "route_prefix": "/"}
    settings = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [{**application, "args": arguments}],
    }
    file = folder / "serve.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    log = folder / "serve.log"
    # A socket's path may have 107 characters, and Ray's are long.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as work:
        variables = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTHON"))},
            "PYTHONPATH": str(ROOT / "src"),
            "RAY_TMPDIR": work,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "OMP_NUM_THREADS": "1",
            MARK: mark,
            **(environment or {}),
        }
        command, several = [str(venv / "bin" / "python"), "-m", "ray.serve.scripts", "run", str(file)], None
        try:
            if nodes is not None:
                several = RayNodes(variables, folder / "nodes.log")
                for number, (name, resources) in enumerate(nodes.items()):
                    several.start(name, resources, is_head=number == 0)
                command[-1:-1] = ["--address", several.address]
            with log.open("wb") as out:
                process = subprocess.Popen(
                    command, stdout=out, stderr=out, env=variables, cwd=folder, start_new_session=True
                )
            try:
                cluster = RayCluster(f"http://127.0.0.1:{port}", mark, log, several)
                _wait_until_ready(cluster, process)
                yield cluster
            finally:
                _end(process)
        finally:
            _kill_all(mark)


def _wait_until_ready(cluster: RayCluster, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if cluster.answers():
            return
        time.sleep(0.5)
    raise RuntimeError(
        f"singletree did not start on Ray within {READY_SECONDS} s:\n{cluster.output()[-5000:]}"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the application; kill it if that takes too long."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
        return
    process.kill()
    process.wait(STOP_SECONDS)


def _kill_all(mark: str) -> None:
    """Kill what is left of a cluster."""
    for pid, _ in _processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    install()
