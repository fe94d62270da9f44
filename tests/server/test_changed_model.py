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

from singletree.checking.returned_turns import PROTOCOLS, Mutation, TurnProtocol, as_given, no_thoughts
from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.families import get
from singletree.parsing.render_turn import render_turn
from singletree.server.http.app import App
from singletree.server.http.service import Service
from singletree.server.models.catalog import load_models
from singletree.server.settings.config import Config
from singletree.server.telemetry.tracing import Tracing

from .memory import Client

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
