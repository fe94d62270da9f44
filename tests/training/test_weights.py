"""A trainer changes the weights: turns wait, each token has its version, and no prefix of old weights is used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.wire_servers import DIALECTS, DialectTransport, started
from server.inspecting import LAYOUT
from server.memory import Client, Exchange
from server.serving import TOKENIZER, Served, body, serving
from singletree.conversation import Sampling
from singletree.engines.engine import GenerationJob
from singletree.engines.lifetime import ReconnectingEngine
from singletree.errors import InvalidRequest
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.remote.engine import RemoteEngine
from singletree.server.settings.config import Config
from singletree.testing.scripted_engine import ScriptedEngine
from singletree.training.exports import FORMS
from singletree.training.graph import check_session, read_session
from singletree.training.weights import WeightsEngine

END = TOKENIZER.added_tokens["<|im_end|>"]
CHAT = "/v1/chat/completions"


def scripted() -> ScriptedEngine:
    return ScriptedEngine(TOKENIZER.encode, TOKENIZER.decode, end_token_id=END)


@asynccontextmanager
async def training(folder: Path, **more: Any) -> AsyncIterator[tuple[Served, ScriptedEngine]]:
    """A server with a trainer, and the engine behind it."""
    engine = scripted()
    config = Config(capture=folder, **more)
    memory = TurnMemory(2**20)
    watched = WeightsEngine(engine, [engine], folder)
    async with serving(config=config, engine=watched, memory=memory, layout=LAYOUT) as served:
        yield served, engine
        served.service.capture.close()  # type: ignore[union-attr]


async def _turn(client: Client, session: str, messages: list[dict[str, Any]]) -> None:
    sent = {"messages": messages, "model": "alias"}
    reply = await client.post(f"/sessions/{session}{CHAT}", sent)
    assert reply.status == 200, reply.body
    messages += [reply.json["choices"][0]["message"], {"role": "user", "content": "go on [[gen:9:1]]"}]


async def _version(client: Client, name: str) -> dict[str, Any]:
    reply = await client.post("/update_weight_version", {"new_version": name})
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json
    return found


def _weights(folder: Path, session: str) -> list[list[tuple[Any, int, int]]]:
    """The versions of each call of a session, as ranges of its completion, which they cover."""
    graph = read_session(folder / f"{session}.jsonl")
    assert check_session(graph) == []
    for call in graph.calls.values():
        assert call.end is not None
        if call.end.weights:
            assert call.end.weights[0][1] == 0
            assert call.end.weights[-1][2] == len(call.completion)
    return [call.end.weights for call in graph.calls.values() if call.end is not None]


async def test_a_session_that_spans_an_update_has_both_versions(tmp_path: Path) -> None:
    async with training(tmp_path) as (served, engine):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi [[gen:5:1]]"}]
        for name in ("", "step 1", "step 2", "step 2"):
            if name:
                assert (await _version(served.client, name))["weight_version"] == name
            await _turn(served.client, "a", messages)
        lengths = [len(played.token_ids) for played in engine.log]
        assert _weights(tmp_path, "a") == [
            [],
            [("step 1", 0, lengths[1])],
            [("step 2", 0, lengths[2])],
            [("step 2", 0, lengths[3])],
        ]
        salts = [played.cache_salt for played in engine.log]
        assert salts[0] == ""
        assert len({*salts}) == 4  # Whoever gives a version gave new weights, even if it has an old name.
        # No prefix of other weights is used, although each prompt goes on from the last one.
        assert [played.cached_tokens for played in engine.log] == [0, 0, 0, 0]
        await _turn(served.client, "a", messages)
        assert engine.log[-1].cached_tokens == len(engine.log[-2].prompt) + lengths[-1]
        graph = read_session(tmp_path / "a.jsonl")
        (document,) = FORMS["singletree"](graph)
        assert {name for call in document["calls"] for name, _, _ in call["weights"]} == {"step 1", "step 2"}


async def _streaming(served: Served, session: str, prompt: str) -> tuple[Any, Exchange]:
    sent = body(CHAT, prompt, stream=True)
    opened = served.client.open("POST", f"/sessions/{session}{CHAT}", sent)
    exchange, _ = await opened.__aenter__()
    await exchange.read()
    return opened, exchange


@pytest.mark.parametrize("logprobs", [True, False], ids=["pulled", "pushed"])
async def test_a_turn_that_spans_an_update_has_both_versions(logprobs: bool, tmp_path: Path) -> None:
    async with training(tmp_path, capture_logprobs=logprobs) as (served, engine):
        await _version(served.client, "one")
        opened, exchange = await _streaming(served, "a", "[[gen:40:1:0.005]]")
        await _version(served.client, "two")
        await exchange.rest()
        await opened.__aexit__(None, None, None)
        [[first, second]] = _weights(tmp_path, "a")
        assert (first[0], second[0]) == ("one", "two")
        assert 0 < first[2] == second[1] < second[2] == len(engine.log[0].token_ids)


async def test_turns_wait_while_weights_are_changed(tmp_path: Path) -> None:
    async with training(tmp_path) as (served, engine):
        client = served.client
        opened, exchange = await _streaming(served, "a", "[[gen:30:1:0.005]]")
        pausing = asyncio.create_task(client.post("/pause", {}))
        await asyncio.sleep(0.02)
        assert (await client.get("/is_paused")).json | {"running": 1} == {
            "weight_version": None, "is_paused": True, "running": 1, "salts": True,
        }  # fmt: skip
        later = asyncio.create_task(client.post(f"/sessions/b{CHAT}", body(CHAT, "hi")))
        assert b"[DONE]" in await exchange.rest()
        await opened.__aexit__(None, None, None)
        assert (await pausing).json["running"] == 0
        await asyncio.sleep(0.05)
        assert not later.done()
        assert len(engine.log) == 1
        await _version(client, "new")
        assert (await client.post("/resume", {})).json["is_paused"] is False
        assert (await later).status == 200
        assert _weights(tmp_path, "a") == [[]]
        assert [name for [(name, _, _)] in _weights(tmp_path, "b")] == ["new"]


async def test_turns_that_are_aborted_can_be_tried_again(tmp_path: Path) -> None:
    async with training(tmp_path) as (served, engine):
        client = served.client
        opened, exchange = await _streaming(served, "a", "[[gen:3000:1:0.01]]")
        whole = asyncio.create_task(client.post(f"/sessions/b{CHAT}", body(CHAT, "[[gen:3000:1:0.01]]")))
        await asyncio.sleep(0.1)
        assert len(engine.log) == 2
        assert (await client.post("/pause?mode=abort", {})).json["running"] == 0
        assert b"the weights of the model are changed" in await exchange.rest()
        await opened.__aexit__(None, None, None)
        assert (await whole).status == 503
        await client.post("/resume", {})
        await client.post("/admin/flush", {})
        graph = read_session(tmp_path / "a.jsonl")
        assert [graph.masked(call) for call in graph.calls.values()] == ["cut"]


async def test_an_engine_that_holds_nothing_is_not_paused(tmp_path: Path) -> None:
    async with training(tmp_path) as (served, _):
        refused = await served.client.post("/pause?mode=keep", {})
        assert refused.status == 400
        assert b"mode=wait" in refused.body
        assert (await served.client.post("/pause?mode=later", {})).status == 400
        assert (await served.client.post("/update_weight_version", {"new_version": ""})).status == 400
        assert (await served.client.get("/is_paused")).json["is_paused"] is False


async def test_weights_are_those_of_all_keys(tmp_path: Path) -> None:
    async with training(tmp_path, api_key=("one", "two")) as (served, _):
        for path in ("/pause", "/resume", "/update_weight_version"):
            reply = await served.client.post(path, {"new_version": "x"}, headers={"x-api-key": "one"})
            assert reply.status == 403, path
            assert b"--capture-key" in reply.body


async def test_old_prefixes_are_not_used_after_a_restart(tmp_path: Path) -> None:
    job = GenerationJob(TOKENIZER.encode("hello [[gen:2:1]]"), Sampling(), "r")
    salts = []
    for names in ((), ("one",), ()):
        inner = scripted()
        engine = WeightsEngine(inner, [inner], tmp_path)
        await engine.start()
        for name in names:
            await engine.name_weights(name)
        async for chunk in engine.generate(job):
            assert bool(chunk.weight_versions) == bool(names and (chunk.token_ids or chunk.finish))
        salts.append(inner.log[0].cache_salt)
        await engine.close()
    assert salts[0] == ""
    assert len({*salts}) == 3


@pytest.mark.parametrize(
    ("dialect", "paths"),
    [
        ("vllm-completions", ["/update_weight_version", "/pause?mode=keep", "/resume"]),
        ("sglang-incremental", ["/update_weight_version", "/pause_generation", "/continue_generation"]),
    ],
)
async def test_an_engine_is_asked_to_hold_its_generations(
    dialect: str, paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await started(DialectTransport(DIALECTS[dialect]))
    asked: list[tuple[str, Any]] = []

    async def answer(path: str, sent: bytes) -> tuple[int, bytes]:
        asked.append((path, json.loads(sent or b"{}")))
        return 200 if len(asked) < 4 else 404, b"{}"

    monkeypatch.setattr(worker, "_ask", answer)

    async def connect() -> RemoteEngine:
        return worker

    connected = ReconnectingEngine("a", connect)
    await connected.start()
    engine = WeightsEngine(connected, [connected], tmp_path)
    await engine.name_weights("v1")
    await engine.pause("keep")
    assert engine.state()["is_paused"]
    await engine.resume()
    assert [path for path, _ in asked] == paths
    assert asked[0][1]["new_version"] == "v1"
    assert asked[1][1].get("mode", "retract") == "retract"
    with pytest.raises(InvalidRequest, match="HTTP 404; use mode=wait"):
        await engine.pause("keep")
    assert not engine.state()["is_paused"]
    await engine.close()
