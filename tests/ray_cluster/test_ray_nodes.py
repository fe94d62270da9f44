"""A Ray cluster of two nodes on this machine: a node is killed under load, and turns are routed. ``make ray``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ray_cluster.asking import Answer, BrokenAnswer, ask, dictated, forced_to
from ray_cluster.real_ray import RayCluster, serving
from ray_cluster.trace_files import records_of

pytestmark = pytest.mark.ray

ENGINE = {"ray_actor_options": {"num_cpus": 0.1, "resources": {"engine": 1}}}
SERVER = {"ray_actor_options": {"num_cpus": 0.1, "resources": {"front": 1}}, "num_replicas": 2}
NODES = {"head": {"engine": 1, "front": 2}, "second": {"engine": 1}}
PATIENCE_SECONDS = 180
STREAMS = 6


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, traces: Path) -> Iterator[RayCluster]:
    """Two server replicas on the head, an engine on each node: llama.cpp with a small model."""
    folder = tmp_path_factory.mktemp("ray")
    settings = folder / "singletree.toml"
    settings.write_text(
        f'engine = "llamacpp"\nthreads = 1\nslots = 6\ncontext-window = 2048\n'
        'capsule-key = ["a passphrase of the nodes"]\n'
        f'store-path = "{folder / "responses.sqlite"}"\ntrace-path = "{traces / "trace.jsonl"}"\n',
        encoding="utf-8",
    )
    with serving(
        folder, nodes=NODES, config=str(settings), engines=2, engine_options=ENGINE, server_options=SERVER
    ) as running:
        yield running


def test_requests_of_a_session_go_to_one_engine_from_both_server_replicas(
    cluster: RayCluster, traces: Path
) -> None:
    sessions = [f"harbour-{number}" for number in range(8)]

    def play(session: str) -> None:
        messages: list[dict[str, str]] = []
        for number in range(4):
            messages.append(
                {"role": "user", "content": f"{session}, {number}: tell me more. " + "Go on. " * 8}
            )
            # Few tokens, so that no engine's speed is known: a slow one would be drained, and its sessions would move.
            answer = ask(cluster, messages, session=session, max_tokens=4)
            messages.append({"role": "assistant", "content": answer.text})

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(play, sessions))
    played = {session: records_of(traces, session, 4) for session in sessions}
    cached = seen = 0
    for session, turns in played.items():
        assert len({turn["singletree"]["worker"] for turn in turns}) == 1, session
        seen += sum(turn["input_tokens"] for turn in turns[:-1])
        cached += sum(turn["cached_tokens"] for turn in turns[1:])
    # Not all: a replica renders the turns that the other one generated from their text, because this client carries no
    # capsules and the replicas share no turn memory here.
    assert cached > 0.8 * seen
    assert {turn["singletree"]["worker"] for turns in played.values() for turn in turns} == {
        "engine-0",
        "engine-1",
    }
    assert len({turn["file"] for turns in played.values() for turn in turns}) == 2
    assert any(len({turn["file"] for turn in turns}) == 2 for turns in played.values())


def test_a_long_beginning_is_read_once_by_each_engine(cluster: RayCluster, traces: Path) -> None:
    """Sessions of many names send one long preamble: they are spread, and go only where it was read, but once."""
    preamble = {
        "role": "system",
        "content": "Rules of the harbour. " + "A ship that arrives waits outside. " * 80,
    }
    names = [f"preamble-{number}" for number in range(10)]
    for number, name in enumerate(names):
        ask(cluster, [preamble, {"role": "user", "content": f"Rule {number}?"}], session=name, max_tokens=2)
    turns = [records_of(traces, name, 1)[0] for name in names]
    again = [turn for turn in turns if turn["cached_tokens"] > 0.9 * turn["input_tokens"]]
    read = [turn["singletree"]["worker"] for turn in turns if turn not in again]
    assert len(read) == len(set(read)), "an engine read it twice"
    sent = set[tuple[str, str]]()
    for turn in turns:
        # Each replica of the server knows what it has sent itself.
        known = (turn["file"], turn["singletree"]["worker"])
        if known in sent:
            assert abs(turn["singletree"]["predicted_cached_tokens"] - turn["cached_tokens"]) <= 32
        sent.add(known)
    assert len(turns) > 2 * len(sent), "the prediction decided for most of them"


def test_a_node_killed_under_load_loses_no_turn(cluster: RayCluster, traces: Path) -> None:
    """Streams run on both nodes, half of them under a grammar, when one node loses its power. Each client reads one
    unbroken turn. A node that joins takes the place of the lost one."""
    assert cluster.nodes is not None
    begun = threading.Barrier(STREAMS + 1, timeout=PATIENCE_SECONDS)

    def stream(number: int) -> Answer:
        def wait(pieces: int) -> None:
            if pieces == 5:
                begun.wait()

        asked = [{"role": "user", "content": f"Stream {number}: say it."}]
        more = forced_to(dictated(number)) if number % 2 else {"ignore_eos": True, "max_tokens": 200}
        return ask(cluster, asked, wait, session=f"stream-{number}", **more)

    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(stream, number) for number in range(STREAMS)]
        begun.wait()
        assert cluster.nodes.kill("second") > 1
        for number, answer in enumerate(answers):
            done = answer.result(PATIENCE_SECONDS)
            if number % 2:
                assert done.text == dictated(number)
                assert done.finish == "stop"
            else:
                assert (done.tokens, done.finish) == (200, "length")
    turns = [records_of(traces, f"stream-{number}", 1)[0]["singletree"] for number in range(STREAMS)]
    moved = [turn for turn in turns if turn["failovers"]]
    assert moved, "no stream ran on the node that was killed"
    assert len(moved) < STREAMS, "no stream ran on the node that was left"
    assert {turn["worker"] for turn in turns} == {moved[0]["worker"]}

    cluster.nodes.start("third", NODES["second"])
    end = time.monotonic() + PATIENCE_SECONDS
    number = 0
    while True:
        ask(cluster, [{"role": "user", "content": "Hello."}], session=f"back-{number}", max_tokens=2)
        if records_of(traces, f"back-{number}", 1)[0]["singletree"]["worker"] != moved[0]["worker"]:
            break
        assert time.monotonic() < end, "the engine on the new node is not used"
        number += 1
        time.sleep(0.5)


def test_a_server_replica_killed_under_load_loses_no_turn(cluster: RayCluster) -> None:
    """The connections that it held break, and each client repeats its request, as the harnesses do."""
    begun = threading.Barrier(STREAMS + 1, timeout=PATIENCE_SECONDS)
    breaks: list[str] = []

    def stream(number: int) -> str:
        waited = False

        def wait(pieces: int) -> None:
            nonlocal waited
            if pieces == 5 and not waited:
                waited = True
                begun.wait()

        asked = [{"role": "user", "content": f"Stream {number}: say it again."}]
        for _ in range(10):
            try:
                answer = ask(cluster, asked, wait, session=f"again-{number}", **forced_to(dictated(number)))
                return answer.text
            except BrokenAnswer as error:
                breaks.append(str(error))
                time.sleep(1)
        raise AssertionError(f"stream {number} was given up: {breaks}")

    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(stream, number) for number in range(STREAMS)]
        begun.wait()
        cluster.kill_replica("server")
        for number, answer in enumerate(answers):
            assert answer.result(PATIENCE_SECONDS) == dictated(number)
    assert breaks, "no stream ran on the replica that was killed"
