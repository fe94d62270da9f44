"""Sessions of recorded shape on four engines, behind singletree and behind Dynamo with its ThunderAgent plugin.

    python -m benchmarks.admission [--blocks N] [--scale S] [--sessions N] [--rows NAMES]

In real time, over HTTP: the same four engines (``simulated_vllm``) behind each front end, with the same prompts as
token ids on ``/v1/completions``. Counted by the engines: tokens of prompts, and those in the cache. Needs Dynamo
(``python -m benchmarks.peers``) and singletree's packages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks import simulated_vllm
from benchmarks.peers import PYTHON, QWEN3

_ENGINES, _PORT, _FRONT = 4, 19100, 19090
_TOOL_SECONDS, _START_SECONDS = 3.0, 20.0
_HERE = Path(__file__).resolve().parent

_PLUGIN = """\
request_classifier:
  type: thunderagent
worker_selection:
  aggregated: thunderagent
  instances:
    - name: thunderagent
      type: thunderagent
"""
"""Dynamo's documentation of the plugin has this file."""

_AFFINITY = ("--router-session-affinity-ttl-secs", "1800", "--router-session-affinity-mode")
_ROWS: Mapping[str, tuple[str, ...]] = {
    "singletree": (),
    "dynamo": (),
    "dynamo affinity": (*_AFFINITY, "hard"),
    "dynamo thunderagent": (*_AFFINITY, "soft", "--router-policy-config", "thunderagent.yaml"),
    "dynamo thunderagent never final": (*_AFFINITY, "soft", "--router-policy-config", "thunderagent.yaml"),
}
"""What each front end is started with. No harness says which of its requests is the last of a session."""


@dataclass(slots=True)
class Outcome:
    """What one front end did."""

    firsts: list[float] = field(default_factory=list)
    says_when_it_ends: bool = True
    failed: int = 0
    seconds: float = 0.0
    prompt: int = 0
    cached: int = 0

    def row(self, name: str) -> str:
        """Return a row of the table."""
        firsts = sorted(self.firsts)
        p50, p90 = (firsts[int(len(firsts) * share)] for share in (0.5, 0.9))
        return (
            f"| {name} | {self.cached / self.prompt:.1%} | {statistics.fmean(firsts):.2f} s | {p50:.2f} s "
            f"| {p90:.2f} s | {firsts[-1]:.1f} s | {self.seconds:.0f} s | {self.failed} |"
        )


def _turns(number: int, scale: float) -> Iterator[tuple[list[int], int, float]]:
    """Yield prompt, tokens to generate and the pause before, for each request of session ``number``."""
    shapes = json.loads((_HERE / "agent_shapes.json").read_text(encoding="utf-8"))
    shape, random = shapes[number % len(shapes)], Random(number)
    shared = _tokens(Random(shape["harness"]), int(shape["shared"] * scale))
    whole: list[list[int]] = []
    for at, request in enumerate(shape["requests"]):
        length, known = int(request["prompt"] * scale), shared
        if request["follows"] is not None:
            known = whole[request["follows"]][: int(request["matched"] * scale)]
        elif length < len(shared):
            known = []
        prompt = known[:length] + _tokens(random, length - len(known))
        size = max(2, int(request["generated"] * scale))
        whole.append(prompt + simulated_vllm.turn_of(prompt, size))
        yield prompt, size, random.expovariate(1 / _TOOL_SECONDS) if at else 0.0


def _tokens(random: Random, length: int) -> list[int]:
    return [random.randrange(1, simulated_vllm.IDS) for _ in range(max(0, length))]


async def _session(client: httpx.AsyncClient, number: int, begins: float, scale: float, to: Outcome) -> None:
    await asyncio.sleep(begins)
    turns = [*_turns(number, scale)]
    for at, (prompt, size, pause) in enumerate(turns, 1):
        await asyncio.sleep(pause)
        headers = {"x-dynamo-session-id": f"session-{number}"}
        if at == len(turns) and to.says_when_it_ends:
            headers["x-dynamo-session-final"] = "true"
        body: dict[str, Any] = {
            "model": "simulated",
            "prompt": prompt,
            "max_tokens": size,
            "ignore_eos": True,
            "stream": True,
        }
        began, first = time.monotonic(), None
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                to.failed += 1
                print(number, answer.status_code, (await answer.aread())[:300], file=sys.stderr)
                continue
            async for line in answer.aiter_lines():
                if first is None and line.startswith("data: {"):
                    first = time.monotonic() - began
        if first is None:
            to.failed += 1
        else:
            to.firsts.append(first)


async def _measure(name: str, sessions: int, scale: float) -> Outcome:
    outcome, random = Outcome(says_when_it_ends=not name.endswith("never final")), Random(3)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{_FRONT}", timeout=1800, limits=limits
    ) as client:
        for _ in range(240):
            await asyncio.sleep(0.5)
            try:
                if "simulated" in (await client.get("/v1/models")).text:
                    break
            except httpx.HTTPError:
                continue
        else:
            raise SystemExit(f"{name} was not ready after two minutes")
        await asyncio.sleep(5)  # until the router follows the events of each engine
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(sessions):
                group.create_task(_session(client, number, random.random() * _START_SECONDS, scale, outcome))
        outcome.seconds = time.monotonic() - began
        for number in range(_ENGINES):
            counted = (await client.get(f"http://127.0.0.1:{_PORT + number}/counted")).json()
            outcome.prompt += counted["prompt"]
            outcome.cached += counted["cached"]
    return outcome


def _run(name: str, blocks: int, sessions: int, scale: float) -> Outcome:
    processes = list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "thunderagent.yaml").write_text(_PLUGIN, encoding="utf-8")
        environment = os.environ | {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_FILE_KV": f"{folder}/store",
            "HF_HUB_OFFLINE": "1",
        }
        Path(folder, "store").mkdir()

        def start(command: Sequence[str | Path], log: str) -> None:
            with Path(folder, log).open("wb") as out:
                processes.append(
                    subprocess.Popen(
                        [*map(str, command)],
                        stdout=out,
                        stderr=out,
                        cwd=folder,
                        env=environment,
                        start_new_session=True,
                    )
                )

        try:
            events = [f"ipc://{folder}/{number}" for number in range(_ENGINES)]
            for number, endpoint in enumerate(events):
                own = (PYTHON, simulated_vllm.__file__, _PORT + number, endpoint, blocks)
                start(
                    [*map(str, own), *([str(QWEN3)] if name != "singletree" else [])], f"engine-{number}.log"
                )
            time.sleep(3)
            if name == "singletree":
                urls = ",".join(f"http://127.0.0.1:{_PORT + number}" for number in range(_ENGINES))
                start(
                    [
                        Path(sys.executable).parent / "singletree",
                        *(
                            "serve",
                            "--port",
                            str(_FRONT),
                            "--engine-url",
                            urls,
                            "--kv-events",
                            ",".join(events),
                        ),
                        *("--router-mode", "kv", "--model-path", str(QWEN3), "--model-name", "simulated"),
                    ],
                    "front.log",
                )
            else:
                start(
                    [
                        PYTHON,
                        *("-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(_FRONT)),
                        *("--discovery-backend", "file", "--request-plane", "tcp", "--router-mode", "kv"),
                        *_ROWS[name],
                    ],
                    "front.log",
                )
            return asyncio.run(_measure(name, sessions, scale))
        finally:
            for process in processes:
                os.killpg(process.pid, signal.SIGTERM)
            for process in processes:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
            shutil.copytree(
                folder,
                f"build/admission/{name}",
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("[0-9]", "store"),
            )


def main() -> None:
    """Measure the rows one after the other, and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--blocks", type=int, default=7000, help="of each engine, before scaling")
    arguments.add_argument("--scale", type=float, default=0.25)
    arguments.add_argument("--sessions", type=int, default=32)
    arguments.add_argument("--rows", default=",".join([*_ROWS][:-1]))
    chosen = arguments.parse_args()
    print(
        "| front end | cached | TTFT mean | p50 | p90 | worst | all done | failed |\n|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    for name in chosen.rows.split(","):
        blocks = int(chosen.blocks * chosen.scale)
        print(_run(name, blocks, chosen.sessions, chosen.scale).row(name), flush=True)


if __name__ == "__main__":
    main()
