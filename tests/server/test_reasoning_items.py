"""Reasoning on Responses in the form of the native API: what clients get of it, and that all of it comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from protocols.test_responses_encode import FORMS
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.settings.config import Config
from singletree.stored_responses.store import Store
from singletree.testing.scripts import Script

from .carrying import INTERLEAVED, LAYOUT, capsules, kept_in, last_prompt
from .memory import events
from .serving import MODEL, TOKENIZER, Served, serving
from .test_websocket import connected
from .turn_stores import memory_in

PATH = "/v1/responses"
THOUGHT = "Which one? \n\nThis one."
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\nThis one."
ONLY = Script(f"<think>\n{THOUGHT} And so on.", cut_after=len(f"<think>\n{THOUGHT}") - 6)
CUT = THOUGHT[:-9]
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
PRIVATE = "singletree_reasoning"

Json = dict[str, Any]


@asynccontextmanager
async def remembering(
    scripts: dict[str, str | Script], store: Store | None = None, **settings: Any
) -> AsyncIterator[Served]:
    given = {"memory": TurnMemory(2**20), "layout": LAYOUT, "capsules": capsules()}
    async with serving(scripts, **(given | settings)) as served:
        served.service.store = store
        yield served


async def ask(served: Served, input: Any, **more: Any) -> Json:
    """The response object, however it is sent."""
    reply = await served.client.post(PATH, {"model": MODEL, "input": input, "tools": [TOOL], **more})
    assert reply.status == 200, reply.body
    whole: Json = events(reply.body)[-1][1]["response"] if more.get("stream") else reply.json
    return whole


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def unchanged(item: Json) -> Json:
    return item


def without_id(item: Json) -> Json:
    """As OpenClaw gives it back."""
    return {name: value for name, value in item.items() if name != "id"}


def sealed_alone(item: Json) -> Json:
    """As OpenCode gives it back, where it asked for a capsule."""
    return {"type": "reasoning", "summary": [], "encrypted_content": item.get("encrypted_content")}


def null_capsule(item: Json) -> Json:
    """As Codex gives it back, where it got none."""
    return {"encrypted_content": None, **item}


HABITS = [unchanged, without_id, sealed_alone, null_capsule]
ALL_FORMS = {**FORMS, "sealed": {"include": ["reasoning.encrypted_content"]}}


def given_back(items: list[Json], habit: Callable[[Json], Json]) -> list[Json]:
    turn = [habit(item) if item["type"] == "reasoning" else item for item in items]
    calls = [item for item in items if item["type"] == "function_call"]
    return [
        *turn,
        *({"type": "function_call_output", "call_id": c["call_id"], "output": "Sunny."} for c in calls),
    ]


@pytest.mark.parametrize("form", ALL_FORMS.values(), ids=ALL_FORMS)
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("stream", [False, True])
async def test_all_of_a_turn_comes_back_in_place(
    form: Json, habit: Callable[[Json], Json], stream: bool
) -> None:
    async with remembering({"a": INTERLEAVED, "b": "Fine."}) as served:
        asked = user("[[script:a,b]] How is it?")
        output = (await ask(served, [asked], stream=stream, **form))["output"]
        before = last_prompt(served)
        await ask(served, [asked, *given_back(output, habit)], stream=stream, **form)
        generated = TOKENIZER.encode(INTERLEAVED)
        assert kept_in(last_prompt(served), before, generated) == len(generated)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thought_alone_is_found_by_its_id(stream: bool) -> None:
    async with remembering({"a": ONLY, "b": "Fine."}) as served:
        output = (await ask(served, [user("[[script:a,b]] Well?")], stream=stream))["output"]
        assert output[0].keys() == {"id", "type", "status", "summary"}
        await ask(served, [user("[[script:a,b]] Well?"), *output, {"role": "developer", "content": "Go on."}])
        assert CUT in TOKENIZER.decode(last_prompt(served))


async def test_a_thought_is_found_by_its_id_after_a_restart(tmp_path: Path) -> None:
    asked = user("[[script:a,b]] Well?")
    seals, path = capsules(), tmp_path / "turns"
    memory = memory_in(path)
    async with remembering({"a": ONLY, "b": "Fine."}, memory=memory, capsules=seals) as served:
        output = (await ask(served, [asked]))["output"]
    memory.close()
    memory = memory_in(path)
    async with remembering({"a": ONLY, "b": "Fine."}, memory=memory, capsules=seals) as served:
        await ask(served, [asked, *output, {"role": "developer", "content": "Go on."}])
        assert CUT in TOKENIZER.decode(last_prompt(served))
    memory.close()


async def test_two_turns_of_the_same_words_have_different_ids() -> None:
    """As a sampler makes them: one prompt, one answer, two thoughts."""
    memory, asked, made = TurnMemory(2**20), user("[[script:a,b]] Well?"), []
    for thought in ("By luck.", "By reason."):
        async with remembering({"a": f"<think>\n{thought}\n</think>\n\nYes."}, memory=memory) as served:
            made.append((thought, (await ask(served, [asked]))["output"]))
    async with remembering({"b": "Fine."}, memory=memory) as served:
        for thought, output in made:
            await ask(served, [asked, *output, {"role": "developer", "content": "Go on."}])
            assert thought in TOKENIZER.decode(last_prompt(served))


@pytest.mark.parametrize("memory", [None, TurnMemory(0)], ids=["no memory", "full memory"])
@pytest.mark.parametrize("form", ALL_FORMS.values(), ids=ALL_FORMS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_turn_keeps_its_thought(memory: TurnMemory | None, form: Json, stream: bool) -> None:
    store = Store(None, 2**30)
    async with remembering({"a": INTERLEAVED, "b": "Fine."}, store, memory=memory) as served:
        first = await ask(served, "[[script:a,b]] How is it?", stream=stream, **form)
        results = given_back(first["output"], unchanged)[len(first["output"]) :]
        second = await ask(served, results, previous_response_id=first["id"], stream=stream, **form)
        prompt = TOKENIZER.decode(last_prompt(served))
        assert "I need the weather.\n\nAnd more." in prompt
        assert "Now the other." in prompt
        again = await served.client.get(f"{PATH}/{first['id']}")
        assert again.json == first
        listed = await served.client.get(f"{PATH}/{second['id']}/input_items?order=asc&limit=100")
        assert listed.json["data"][1 : 1 + len(first["output"])] == first["output"]
        assert PRIVATE not in listed.body.decode() + again.body.decode()
    store.close()


async def test_a_stored_turn_comes_back_by_its_tokens_on_another_replica() -> None:
    store = Store(None, 2**30)
    scripts: dict[str, str | Script] = {"a": INTERLEAVED, "b": "Fine."}
    async with remembering(scripts, store) as served:
        first = await ask(served, "[[script:a,b]] How is it?")
        before = last_prompt(served)
    results = given_back(first["output"], unchanged)[len(first["output"]) :]
    async with remembering(scripts, store) as served:
        await ask(served, results, previous_response_id=first["id"])
        generated = TOKENIZER.encode(INTERLEAVED)
        assert kept_in(last_prompt(served), before, generated) == len(generated)
    store.close()


async def test_the_items_of_a_conversation_are_in_the_native_form() -> None:
    store = Store(None, 2**30)
    async with remembering({"a": ANSWER, "b": "Fine."}, store, memory=None) as served:
        conversation = (await served.client.post("/v1/conversations", {})).json["id"]
        made = await ask(served, "[[script:a,b]] Well?", conversation=conversation)
        path = f"/v1/conversations/{conversation}/items"
        listed = (await served.client.get(f"{path}?order=asc")).json["data"]
        assert listed[1:] == made["output"]
        assert (await served.client.get(f"{path}/{made['output'][0]['id']}")).json == made["output"][0]
        reference = {"type": "item_reference", "id": made["output"][0]["id"]}
        await ask(served, [user("[[script:b]] Well?"), reference, {"role": "developer", "content": "Go on."}])
        assert THOUGHT in TOKENIZER.decode(last_prompt(served))
    store.close()


async def test_the_form_is_the_same_in_the_background_and_on_a_websocket() -> None:
    store = Store(None, 2**30)
    async with remembering({"a": ANSWER}, store) as served:
        asked = {"model": MODEL, "input": "[[script:a]] Well?"}
        id = (await served.client.post(PATH, asked | {"background": True})).json["id"]
        made = (await served.client.get(f"{PATH}/{id}")).json
        while made["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            made = (await served.client.get(f"{PATH}/{id}")).json
        assert made["output"][0].keys() == {"id", "type", "status", "summary"}
        async with connected(served) as connection:
            connection.create("[[script:a]] Well?")
            output = (await connection.response())["output"]
            assert output[0].keys() == {"id", "type", "status", "summary"}
    store.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_flag_shows_the_reasoning_to_every_client(stream: bool) -> None:
    async with remembering({"a": ANSWER}, config=Config(raw_reasoning=True)) as served:
        [thought, _] = (await ask(served, "[[script:a]] Well?", stream=stream))["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": THOUGHT}]


async def test_a_thought_is_shown_while_it_is_made_where_a_summary_was_asked_for() -> None:
    async with remembering({"a": Script(ANSWER, chunk=1)}) as served:
        asked = {"model": MODEL, "input": "[[script:a]] Well?", "stream": True}
        reply = await served.client.post(PATH, asked | {"reasoning": {"summary": "auto"}})
    reported = [data for name, data in events(reply.body) if name == "response.reasoning_summary_text.delta"]
    assert len(reported) > 5
    assert "".join(data["delta"] for data in reported) == THOUGHT


async def test_a_private_field_that_a_client_sends_is_read_as_reasoning_or_refused() -> None:
    async with remembering({"b": "Fine."}) as served:
        damaged: list[Any] = [5, {"text": 1}, {"text": "x"}, {}, None, []]
        for kept in damaged:
            item = {"type": "reasoning", "summary": [], PRIVATE: kept}
            asked = {"model": MODEL, "input": [user("[[script:b]]"), item, user("[[script:b]]")]}
            reply = await served.client.post(PATH, asked)
            assert reply.status in (200, 400), json.dumps(item)
