"""Two real vLLM on a Ray cluster of this machine, which publish what their prefix caches hold. ``make engines``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engines import real_vllm
from ray_cluster.asking import MODEL, ask
from ray_cluster.real_ray import RayCluster, install_with_vllm, serving
from ray_cluster.trace_files import records_of
from server.serving import TEMPLATE

pytestmark = pytest.mark.engines  # it needs vLLM, too

SMALL = {"ray_actor_options": {"num_cpus": 0.1}}
BLOCK = 32
PATIENCE_SECONDS = 300


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RayCluster, Path]]:
    """A server replica and two engines; and the folder of the request records."""
    folder = tmp_path_factory.mktemp("ray")
    _, model = real_vllm.install()
    template = folder / "template.jinja"
    template.write_text(TEMPLATE.source, encoding="utf-8")
    arguments: dict[str, Any] = {
        "engine": "vllm",
        "model": str(model),
        "model_name": [MODEL],
        "chat_template": str(template),
        "context_window": 2048,
        "slots": 4,
        "engine_arguments": ["--enforce-eager", "--block-size", str(BLOCK)],
        "store": False,
        "trace_path": str(folder / "trace.jsonl"),
        "publish_kv_events": True,
        "engines": 2,
        # On a machine with GPUs, too: vLLM is its build for the CPU.
        "engine_options": {"ray_actor_options": {"num_cpus": 0.1}, "placement_group_bundles": [{"CPU": 0.1}]},
        "server_options": SMALL,
    }
    venv = install_with_vllm()
    with serving(folder, venv=venv, environment=real_vllm.environment(), **arguments) as running:
        yield running, folder


class Session:
    """A conversation that grows turn by turn."""

    def __init__(self, cluster: tuple[RayCluster, Path], name: str) -> None:
        self._cluster, self._folder = cluster
        self._name = name
        self._messages: list[dict[str, str]] = []
        self._turns = 0

    def turn(self) -> Mapping[str, Any]:
        """Play a turn, and return its record, with the server's own fields among the others."""
        self._turns += 1
        text = f"{self._name}, {self._turns}: tell me about the harbour. " + "Go on. " * 20
        self._messages.append({"role": "user", "content": text})
        answer = ask(
            self._cluster,
            self._messages,
            session=self._name,
            max_tokens=20,
            ignore_eos=True,
        )
        self._messages.append({"role": "assistant", "content": answer.text})
        record = records_of(self._folder, self._name, self._turns)[-1]
        return {**record, **record["singletree"]}


def test_the_router_knows_what_each_engine_has(cluster: tuple[RayCluster, Path]) -> None:
    """It knows so by the engines' events alone: also after the server was replaced, which forgets what it sent, and
    after an engine was replaced, which publishes somewhere else."""
    running, _ = cluster
    sessions = [Session(cluster, f"harbour-{number}") for number in range(4)]
    homes = [session.turn()["worker"] for session in sessions]
    assert set(homes) == {"engine-0", "engine-1"}
    for session, home in zip(sessions, homes, strict=True):
        turn = session.turn()
        assert turn["worker"] == home
        assert turn["predicted_cached_tokens"] == turn["cached_tokens"] > BLOCK

    running.replace("server", PATIENCE_SECONDS)
    for session, home in zip(sessions, homes, strict=True):
        turn = session.turn()
        assert turn["worker"] == home
        assert turn["predicted_cached_tokens"] == turn["cached_tokens"] > 4 * BLOCK

    running.replace("engine-0", PATIENCE_SECONDS)
    moved = sessions[homes.index("engine-0")]
    moved.turn()  # the server notices now, at the latest, that its engine has gone
    end = time.monotonic() + PATIENCE_SECONDS
    while (back := Session(cluster, f"new-{time.monotonic()}")).turn()["worker"] != "engine-0":
        assert time.monotonic() < end, "the engine that was replaced is not used again"
        time.sleep(2)
    running.replace("server", PATIENCE_SECONDS)
    turn = back.turn()
    assert turn["worker"] == "engine-0"
    assert turn["predicted_cached_tokens"] == turn["cached_tokens"] > BLOCK
