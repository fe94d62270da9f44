"""singletree on a Ray cluster of this machine: real Ray Serve, real llama.cpp, a real harness. ``make ray``."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from clients import install as harnesses
from clients.conftest import TOKENIZER, workspace
from clients.harness import PI
from clients.ran import perform
from clients.scenarios import ANSWER, COMMAND, PRINTED
from clients.scripts import HERMES
from clients.served import MODEL, Server
from clients.turns import Stage, read, shell, text_for_user, thought
from engines.real_vllm import ROOT
from ray_cluster.asking import dictated, forced_to
from ray_cluster.real_ray import RayCluster, serving
from singletree.prompts.tokenizer.huggingface import read_directory
from singletree.prompts.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.ray

__all__ = ["workspace"]

SMALL = {"ray_actor_options": {"num_cpus": 0.1}}
"""Ray counts two cores here; the replicas do not need one each."""

KEY = "the passphrase of two replicas"
STORY = "Tell me a long story about a harbour."
CONTINUED = "a turn continues after an engine failure"
PATIENCE_SECONDS = 120


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Two server replicas and two engines, each llama.cpp with a small model, as a file sets them."""
    folder = tmp_path_factory.mktemp("ray")
    settings = folder / "singletree.toml"
    settings.write_text(
        f'engine = "llamacpp"\nthreads = 1\nslots = 4\ncontext-window = 2048\ncapsule-key = ["{KEY}"]\n'
        f'router-mode = "round-robin"\nstore-path = "{folder / "responses.sqlite"}"\n',
        encoding="utf-8",
    )
    servers = {**SMALL, "num_replicas": 2}
    with serving(
        folder, config=str(settings), engines=2, engine_options=SMALL, server_options=servers
    ) as running:
        yield running


def ask(cluster: RayCluster, text: str, on_text: Callable[[int], None] | None = None, **more: Any) -> str:
    """Return the text of a streamed answer.

    Args:
        on_text: called after each piece of text, with the number of pieces so far.
    """
    body = {"model": "SmolLM2-135M-Instruct", "stream": True, "temperature": 0, "max_tokens": 80}
    body |= {"messages": [{"role": "user", "content": text}]} | more
    request = urllib.request.Request(
        f"{cluster.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    pieces: list[str] = []
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            if event["choices"] and (piece := event["choices"][0]["delta"].get("content")):
                pieces.append(piece)
                if on_text is not None:
                    on_text(len(pieces))
    return "".join(pieces)


def until_replaced(cluster: RayCluster, deployment: str) -> None:
    """Wait until Ray has started another replica for the one that was killed."""
    end = time.monotonic() + PATIENCE_SECONDS
    while len(cluster.replicas(deployment)) != 1:
        assert time.monotonic() < end, f"Ray did not replace {deployment}"
        time.sleep(0.2)


def test_tokens_stream_through_ray(cluster: RayCluster) -> None:
    seen: list[int] = []
    text = ask(cluster, STORY, seen.append)
    assert len(text) > 100
    assert len(seen) > 20, "the answer came in a few large pieces: it was not streamed"


def test_a_turn_goes_on_when_the_replica_of_its_engine_is_killed(cluster: RayCluster) -> None:
    for engine in ("engine-0", "engine-1"):
        # The engines take turns on each server replica, so of three streams one runs on each engine.
        begun = threading.Barrier(4, timeout=PATIENCE_SECONDS)

        def stream(number: int, begun: threading.Barrier = begun) -> str:
            def wait(pieces: int) -> None:
                if pieces == 10:
                    begun.wait()

            return ask(cluster, STORY, wait, **forced_to(dictated(number)))

        before = cluster.output().count(CONTINUED)
        with ThreadPoolExecutor(3) as pool:
            texts = [pool.submit(stream, number) for number in range(3)]
            begun.wait()
            cluster.kill_replica(engine)
            assert [text.result(PATIENCE_SECONDS) for text in texts] == [dictated(n) for n in range(3)]
        until_replaced(cluster, engine)
        end = time.monotonic() + PATIENCE_SECONDS
        while (
            cluster.output().count(CONTINUED) == before
        ):  # Ray prints the logs of its processes a bit later.
            assert time.monotonic() < end, f"no stream ran on {engine}"
            time.sleep(0.2)


def test_a_replica_that_was_replaced_is_used_again(cluster: RayCluster) -> None:
    cluster.kill_replica("engine-0")
    until_replaced(cluster, "engine-0")
    cluster.kill_replica("engine-1")
    # Only the new replica is left, or its successor.
    assert ask(cluster, STORY)


def test_refusals_keep_their_kind_across_replicas(cluster: RayCluster) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(cluster, STORY, structured_outputs={"grammar": "root ::= ("})
    assert refused.value.code == 400
    assert "grammar" in json.load(refused.value)["error"]["message"]


def test_a_client_that_leaves_frees_the_engine(cluster: RayCluster) -> None:
    """More long answers are left than the engines have slots; the next request does not wait for them."""
    for _ in range(10):

        class Left(Exception):
            pass

        def leave(pieces: int, left: type[Exception] = Left) -> None:
            raise left

        with pytest.raises(Left):
            ask(cluster, STORY, leave, max_tokens=1500, ignore_eos=True)
    assert ask(cluster, STORY, max_tokens=5)


def test_pi_works_on_a_ray_cluster(tmp_path: Path, workspace: Any) -> None:
    """A real harness reasons, runs a command, reads a file and answers; its prompts only grow."""
    if not harnesses.is_installed():
        subprocess.run(["python3", str(ROOT / "tests" / "clients" / "install.py")], check=True)
    model = harnesses.folder() / TOKENIZER
    scripts, plays, home = tmp_path / "scripts", tmp_path / "plays.jsonl", tmp_path / "home"
    scripts.mkdir()
    home.mkdir()
    arguments: dict[str, Any] = {
        "engine": "scripted",
        "model": str(model),
        "model_name": MODEL,
        "script_dir": str(scripts),
        "script_log": str(plays),
        "store_path": str(tmp_path / "responses.sqlite"),
        "engines": 2,
        "engine_options": {
            **SMALL,
            "placement_group_bundles": [{"CPU": 0.1}],
            "placement_group_strategy": "PACK",
        },
        "server_options": SMALL,
    }
    turns = (
        (thought("I run the command first."), shell(COMMAND)),
        (thought("Now the notes."), text_for_user("I read the notes."), read()),
        (thought("I know both."), text_for_user(ANSWER)),
    )
    tokenizer = Tokenizer(read_directory(model))
    with serving(tmp_path, **arguments) as running:
        server = Server(running.url, scripts, plays, running.log)
        stage = Stage(HERMES, PI, workspace.notes)
        done = perform(server, stage, turns, home, lambda text: len(tokenizer.encode(text)))
        done.went_well(ANSWER, generations=3)
        done.came_back(PI)
        assert PRINTED in done.added(1)
        assert workspace.secret in done.added(2)
