"""A session whose requests name one model and then another: each gets the other's turns in its own format."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from protocols import grammar_chat
from singletree.checking.returned_turns import PROTOCOLS, Mutation, TurnProtocol, as_given, no_thoughts
from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.families import get
from singletree.parsing.render_turn import render_turn
from singletree.server.http.app import App
from singletree.server.http.service import Call, Service
from singletree.server.models.catalog import load_models
from singletree.server.settings.config import Config
from singletree.server.telemetry import Tracing

from .memory import GRAMMARS, Client

TEMPLATES = Path(__file__).parents[1] / "families" / "templates"
MODELS: Mapping[str, str] = {"alpha": "qwen3", "beta": "seed_oss", "gamma": "kimi_k2"}
"""Models by name, each with its family."""
NAMED = {"x-singletree-session": "task"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "where": {"type": "object"}}}


class Stage(NamedTuple):
    """A server of ``MODELS``; ``folder`` has the log of each engine."""

    client: Client
    folder: Path
    service: Service

    def plays(self, model: str) -> list[dict[str, Any]]:
        """What the engine of ``model`` was given and generated, oldest first."""
        log = self.folder / f"{model}.jsonl"
        return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]

    async def steps(self) -> list[dict[str, Any]]:
        return list((await self.client.get("/v1/singletree/sessions/task")).json["steps"])


def turn_of(number: int) -> tuple[Part, ...]:
    call = ToolCall("weather", f'{{"city": "Öbb {number}", "where": {{"at": [1, {number}]}}}}')
    return (
        Reasoning(f"Thought {number}."),
        Text(f"Words {number}."),
        replace(call, id=f"functions.weather:{number}"),
    )


@asynccontextmanager
async def stage(folder: Path, turns: int, **settings: Any) -> AsyncIterator[Stage]:
    """A server whose models write turn after turn of a task, each in its own format."""
    configs = []
    for model, family in MODELS.items():
        scripts = folder / model
        scripts.mkdir()
        for number in range(turns):
            text = render_turn(get(family), turn_of(number))
            (scripts / f"s{number}.txt").write_text(text, encoding="utf-8")
        configs.append(
            Config(
                engine="scripted",
                model_name=(model,),
                chat_template=TEMPLATES / f"{family}.jinja",
                script_dir=scripts,
                script_log=folder / f"{model}.jsonl",
                **settings,
            )
        )
    config = Config(each_model=tuple(configs), **settings)
    catalog = await load_models(config, lambda _: None)
    try:
        service = Service(config, catalog, Tracing())
        yield Stage(Client(App(service)), folder, service)
    finally:
        await catalog.close()


class Harness:
    """A client that sends the conversation with each request; ``turns`` is how many the task has."""

    def __init__(self, protocol: TurnProtocol, habit: Mutation, turns: int) -> None:
        self.protocol, self.habit = protocol, habit
        self.question = f"[[script:{','.join(f's{number}' for number in range(turns))}]] go"
        self.history: list[dict[str, Any]] = []

    def request(self, model: str) -> dict[str, Any]:
        user = {"role": "user", "content": self.question}
        tools = [self.protocol.tool("weather", "tells the weather", SCHEMA)]
        messages = [user, *self.history]
        return {"model": model, self.protocol.history: messages, "tools": tools, **self.protocol.settings}

    async def go_on(self, client: Client, model: str, headers: Mapping[str, str] = NAMED) -> Any:
        answer = await client.post(self.protocol.path, self.request(model), headers)
        assert answer.status == 200, answer.body
        self.history += self.protocol.turn(self.habit(self.protocol.blocks(answer.json)), False)
        return answer.json


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("habit", [as_given, no_thoughts], ids=["with thoughts", "without thoughts"])
async def test_the_model_changes_after_every_turn(
    protocol: TurnProtocol, habit: Mutation, tmp_path: Path
) -> None:
    turns = 9
    async with stage(tmp_path, turns) as served:
        harness = Harness(protocol, habit, turns)
        for number, model in zip(range(turns), cycle(MODELS), strict=False):
            await harness.go_on(served.client, model)
            play = served.plays(model)[-1]
            assert play["script"] == f"s{number}"
            for earlier in range(number):
                # What any model wrote stands in this model's format: also what the client has left out.
                shown = render_turn(get(MODELS[model]), turn_of(earlier)[:2])
                assert shown in play["prompt"], (number, earlier)
        steps = await served.steps()
        for model in MODELS:
            plays, own = served.plays(model), [step for step in steps if step["model"] == model]
            for before, after in pairwise(plays):
                whole = before["prompt_token_ids"] + before["token_ids"]
                assert after["prompt_token_ids"][: len(whole)] == whole
            # Each model finds its own turns in place: its prompts begin with all of its last prompt and turn.
            assert [step["course"] for step in own] == ["first", "appended", "appended"]
            assert [step["lost_tokens"] for step in own] == [0, 0, 0]


async def test_a_key_gets_nothing_of_what_a_model_wrote_for_another_key(tmp_path: Path) -> None:
    chat = PROTOCOLS[1]
    async with stage(tmp_path, 3, api_key=("one", "two")) as served:
        mine, yours = (NAMED | {"x-api-key": key} for key in ("one", "two"))
        harness = Harness(chat, no_thoughts, 3)
        await harness.go_on(served.client, "alpha", mine)
        request = harness.request("beta")
        for headers, is_shown in ((yours, False), (mine, True)):
            assert (await served.client.post(chat.path, request, headers)).status == 200
            assert ("Thought 0." in served.plays("beta")[-1]["prompt"]) is is_shown


async def moved(served: Stage, **move: str | None) -> list[dict[str, str]]:
    answer = await served.client.post("/v1/singletree/moves", move)
    assert answer.status == 200, answer.body
    return list(answer.json["data"])


FORK = "/v1/singletree/sessions/task/fork"
SHOWN = "/v1/singletree/sessions/task/turns"


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
async def test_a_session_is_forked_at_any_of_its_turns(protocol: TurnProtocol, tmp_path: Path) -> None:
    async with stage(tmp_path, 4) as served:
        harness = Harness(protocol, no_thoughts, 4)
        for _ in range(3):
            await harness.go_on(served.client, "alpha")
        for turn in (1, 2, 3):
            answer = await served.client.post(FORK, {"model": "beta", "at": turn})
            assert answer.status == 200, answer.body
            message = answer.json["choices"][0]["message"]
            assert message["content"].strip() == f"Words {turn - 1}."
            assert message["tool_calls"][0]["function"]["name"] == "weather"
            [*_, play] = served.plays("beta")
            for number in range(turn - 1):
                assert render_turn(get("seed_oss"), turn_of(number)[:2]) in play["prompt"]
            assert f"Words {turn - 1}." not in play["prompt"]
            assert '"name": "weather"' in play["prompt"]
            assert play["prompt"].count("<|im_start|>user") == 1
        # The session itself goes on as if nothing had happened; each fork is a session of its own.
        await harness.go_on(served.client, "alpha")
        assert [step["course"] for step in await served.steps()] == ["first", *["appended"] * 3]
        listed = (await served.client.get("/v1/singletree/sessions")).json["data"]
        assert {each["id"] for each in listed} == {"task", *(f"task@{turn}:beta" for turn in (1, 2, 3))}


async def test_a_fork_goes_on_with_the_messages_of_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GRAMMARS, FORK, grammar_chat.check)
    chat = PROTOCOLS[1]
    async with stage(tmp_path, 3) as served:
        await Harness(chat, as_given, 3).go_on(served.client, "alpha")
        first = await served.client.post(FORK, {"model": "beta"})
        added = chat.turn(chat.blocks(first.json), False)
        second = await served.client.post(FORK, {"model": "beta", "messages": added, "stream": True})
        assert second.status == 200, second.body
        before, after = served.plays("beta")
        whole = before["prompt_token_ids"] + before["token_ids"]
        assert after["prompt_token_ids"][: len(whole)] == whole


async def test_the_turns_of_a_session_are_shown(tmp_path: Path) -> None:
    async with stage(tmp_path, 3) as served:
        harness = Harness(PROTOCOLS[0], no_thoughts, 3)
        for model in ("alpha", "beta"):
            await harness.go_on(served.client, model)
        shown = (await served.client.get(SHOWN)).json
        assert (shown["model"], shown["steps"]) == ("beta", 1)
        assert [turn["text"].strip() for turn in shown["data"]] == ["Words 0.", "Words 1."]
        assert [call["name"] for turn in shown["data"] for call in turn["calls"]] == ["weather"] * 2


async def test_what_cannot_be_forked_is_refused_with_the_cure(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as served:
        assert (await served.client.get(SHOWN)).status == 404
        await Harness(PROTOCOLS[1], as_given, 2).go_on(served.client, "alpha")
        for at in (0, 2):
            refused = await served.client.post(FORK, {"model": "beta", "at": at})
            assert (refused.status, "has turns 1 to 1" in refused.body.decode()) == (400, True)
        assert (await served.client.post(FORK, {"model": "nope"})).status == 404
        for path in (SHOWN, FORK):
            method = "GET" if path is SHOWN else "POST"
            other = await served.client.request(method, path.replace("task", "other"), {"model": "beta"})
            assert (other.status, "does not exist" in other.body.decode()) == (404, True)
        for model in MODELS:
            served.service.catalog.get(model).prompt_cache._shared.drop(0)
        gone = await served.client.get(SHOWN)
        assert (gone.status, "no longer in memory" in gone.body.decode()) == (404, True)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
async def test_a_live_session_moves_and_comes_back(protocol: TurnProtocol, tmp_path: Path) -> None:
    async with stage(tmp_path, 6) as served:
        harness = Harness(protocol, no_thoughts, 6)
        await harness.go_on(served.client, "alpha")
        assert await moved(served, session="task", to="beta") == [
            {"session": "task", "from": "", "to": "beta"}
        ]
        for _ in range(2):
            # The client asks for the name that it knows, and is answered under it.
            assert (await harness.go_on(served.client, "alpha"))["model"] == "alpha"
        sub = await served.client.post(
            protocol.path, harness.request("alpha"), {"x-singletree-session": "task/sub"}
        )
        other = await served.client.post(
            protocol.path, harness.request("alpha"), {"x-singletree-session": "task2"}
        )
        assert (sub.status, other.status) == (200, 200)
        assert await moved(served, session="task") == []
        await harness.go_on(served.client, "alpha")
        steps = await served.steps()
        assert [step["model"] for step in steps] == ["alpha", "beta", "beta", "alpha"]
        assert [step["course"] for step in steps] == ["first", "first", "appended", "appended"]
        assert (await served.client.get("/v1/singletree/sessions/task/sub")).json["model"] == "beta"
        assert (await served.client.get("/v1/singletree/sessions/task2")).json["model"] == "alpha"


async def test_a_drained_model_is_asked_no_more(tmp_path: Path) -> None:
    chat = PROTOCOLS[1]
    async with stage(tmp_path, 3) as served:
        await moved(served, **{"from": "alpha", "to": "beta"})
        await moved(served, session="task", to="alpha")
        answer = await served.client.post(chat.path, Harness(chat, as_given, 3).request("ALPHA"))
        assert (answer.status, answer.json["model"]) == (200, "ALPHA")
        await Harness(chat, as_given, 3).go_on(served.client, "gamma")
        assert not (served.folder / "alpha.jsonl").exists()
        assert len(served.plays("beta")) == 2
        counted = await served.client.post(
            "/v1/messages/count_tokens", Harness(PROTOCOLS[0], as_given, 3).request("alpha")
        )
        assert counted.json["input_tokens"] == len(served.plays("beta")[0]["prompt_token_ids"])
        for wrong in ({}, {"to": "beta"}, {"from": "nope", "to": "beta"}, {"from": "alpha", "to": "nope"}):
            assert (await served.client.post("/v1/singletree/moves", wrong)).status in (400, 404)
        assert await moved(served, **{"from": "alpha"}) == [{"session": "task", "from": "", "to": "alpha"}]


async def test_without_keys_only_this_machine_forks_and_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path, 2) as served:
        await Harness(PROTOCOLS[1], as_given, 2).go_on(served.client, "alpha")
        monkeypatch.setattr(Call, "_is_local", lambda call: False)
        assert (await served.client.get(SHOWN)).status == 403
        assert (await served.client.get("/v1/singletree/moves")).status == 403
        assert (await served.client.post(FORK, {"model": "beta"})).status == 403
        assert (
            await served.client.post("/v1/singletree/moves", {"from": "alpha", "to": "beta"})
        ).status == 403


async def test_a_key_forks_and_moves_its_own_sessions_only(tmp_path: Path) -> None:
    chat = PROTOCOLS[1]
    async with stage(tmp_path, 3, api_key=("one", "two"), admin_key=("root",)) as served:
        one, two, root = (NAMED | {"x-api-key": key} for key in ("one", "two", "root"))
        await Harness(chat, as_given, 3).go_on(served.client, "alpha", one)
        for headers, status in ((one, 200), (two, 404), (root, 404), ({}, 401)):
            assert (await served.client.get(SHOWN, headers)).status == status
            assert (await served.client.post(FORK, {"model": "beta"}, headers)).status == status
        moves = "/v1/singletree/moves"
        assert (await served.client.post(moves, {"session": "task", "to": "beta"}, two)).status == 200
        assert (await served.client.post(moves, {"session": "task", "to": "gamma"}, root)).status == 200
        assert (await served.client.get(moves, one)).json["data"] == []
        await Harness(chat, as_given, 3).go_on(served.client, "alpha", one)
        assert len(served.plays("alpha")) == 2
        # What the operator drains is drained for all.
        assert (await served.client.post(moves, {"from": "alpha", "to": "gamma"}, root)).status == 200
        await Harness(chat, as_given, 3).go_on(served.client, "alpha", one)
        assert len(served.plays("gamma")) == 1


async def test_a_summary_that_one_model_wrote_is_read_by_another(tmp_path: Path) -> None:
    async with stage(tmp_path, 1) as served:
        asked = {"role": "user", "content": "[[script:s0]] go"}
        made = await served.client.post("/v1/responses/compact", {"model": "alpha", "input": [asked]})
        assert made.status == 200, made.body
        again = [*made.json["output"], {"role": "user", "content": "And?"}]
        assert (await served.client.post("/v1/responses", {"model": "beta", "input": again})).status == 200
        assert "Words 0." in served.plays("beta")[-1]["prompt"]
