"""Conversations that are shortened: the model's summary, sealed for the client to carry, in place of what it did."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from conformance.sdk import openai_sdk
from singletree.server.capsules import Capsules
from singletree.server.settings.config import Config
from singletree.stored_responses.store import Store
from singletree.testing.scripts import Script

from .carrying import capsules, server
from .memory import events
from .serving import MODEL, Served, serving
from .test_stored import CALL, PATH, TOOLS, refused
from .test_websocket import connected

COMPACT = "/v1/responses/compact"
TRIGGER = {"type": "compaction_trigger"}
SUMMARY = "I listed the folder: notes.txt."
WRITTEN = f"<think>\nWhat mattered?\n</think>\n\n{SUMMARY}"
SCRIPTS = {"call": CALL, "sum": WRITTEN, "end": "Done."}
HEAD = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "List. [[script:call,sum,end]]"},
]

Items = list[dict[str, Any]]


async def ask(served: Served, input: Sequence[Any], path: str = PATH, **more: Any) -> dict[str, Any]:
    # Nothing is remembered here, so the client carries the reasoning itself, and capsules for a test of theirs.
    include = ["reasoning.content", "reasoning.encrypted_content"]
    body = {"model": MODEL, "input": [*input], "tools": TOOLS, "include": include, **more}
    reply = await served.client.post(path, body)
    assert reply.status == 200, reply.body
    return dict(events(reply.body)[-1][1]["response"] if more.get("stream") else reply.json)


async def loop(served: Served, **more: Any) -> Items:
    """The items of a conversation that stands in the middle of a tool loop."""
    output = (await ask(served, HEAD, **more))["output"]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "notes.txt"}
    return [*HEAD, *output, result]


def prompt(served: Served, number: int = -1) -> str:
    return served.model.tokenizer.decode(served.engine.log[number].prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_trigger_is_answered_with_one_item_that_stands_for_what_was_done(stream: bool) -> None:
    async with serving(SCRIPTS, capsules=capsules()) as served:
        answer = await loop(served, stream=stream)
        made = await ask(served, [*answer, TRIGGER], stream=stream)
        assert [item["type"] for item in made["output"]] == ["compaction"]
        assert made["status"] == "completed"
        assert made["usage"]["output_tokens"] > 0
        assert SUMMARY not in json.dumps(made)
        first, second = served.engine.log
        begun = list(first.prompt_token_ids) + list(first.token_ids)
        assert list(second.prompt_token_ids)[: len(begun)] == begun  # C25: all of the cache is hit
        await ask(served, [*HEAD, *made["output"]], stream=stream)
        shown = prompt(served)
        assert shown.index("Be brief.") < shown.index("List. ") < shown.index(SUMMARY)
        # What was not cut off before the summary is not shown twice either.
        await ask(served, [*answer, TRIGGER, *made["output"]], stream=stream)
        assert prompt(served) == shown
        assert "notes.txt\n" not in shown


async def test_it_is_no_break_of_the_prefix() -> None:  # C25
    async with server({**SCRIPTS}, capsules()) as served:
        answer = await loop(served, prompt_cache_key="s")
        made = await ask(served, [*answer, TRIGGER], prompt_cache_key="s")
        await ask(served, [*HEAD, *made["output"]], prompt_cache_key="s")
        session = served.service.sessions.get("s")
        assert session is not None
        assert [step.course for step in session.steps] == ["first", "appended", "first"]


async def test_a_later_summary_takes_the_place_of_an_earlier_one() -> None:
    async with serving(SCRIPTS, capsules=capsules()) as served:
        answer = await loop(served)
        first = await ask(served, [*answer, TRIGGER])
        second = await ask(served, [*answer, TRIGGER])
        await ask(served, [*HEAD, *first["output"], {"role": "user", "content": "And?"}, *second["output"]])
        assert prompt(served).count(SUMMARY) == 1
        await ask(served, [*HEAD, *first["output"], {"role": "user", "content": "And?"}])
        assert prompt(served).index(SUMMARY) < prompt(served).index("And?")


async def test_any_server_with_the_key_can_open_it() -> None:
    async with serving(SCRIPTS, capsules=capsules()) as served:
        made = await ask(served, [*await loop(served), TRIGGER])
    async with serving(SCRIPTS, capsules=capsules(salt=b"2" * 16)) as replica:
        await ask(replica, [*HEAD, *made["output"]])
        assert SUMMARY in prompt(replica)
        counted = await replica.client.post(
            "/v1/responses/input_tokens", {"model": MODEL, "input": [*HEAD, *made["output"]], "tools": TOOLS}
        )
        assert counted.json["input_tokens"] == len(replica.engine.log[-1].prompt_token_ids)


@pytest.mark.parametrize("strict", [False, True])
async def test_one_that_was_changed_is_refused_by_a_strict_server_and_ignored_by_others(strict: bool) -> None:
    async with serving(SCRIPTS, capsules=capsules(strict=strict)) as served:
        answer = await loop(served)
        [item] = (await ask(served, [*answer, TRIGGER]))["output"]
        sealed = item["encrypted_content"]
        item = item | {"encrypted_content": sealed[:-5] + ("A" if sealed[-5] != "A" else "B") + sealed[-4:]}
        reply = await served.client.post(PATH, {"model": MODEL, "input": [*answer, item], "tools": TOOLS})
        if strict:
            assert "send the compaction item back unchanged" in refused(
                reply, 400, None, f"input.{len(answer)}.encrypted_content"
            )
            return
        assert reply.status == 200
        assert "does not see the summary" in reply.headers["x-singletree-warning"]
        assert "notes.txt" in prompt(served), "what it stood for is not taken away"


@pytest.mark.parametrize("sealing", [None, capsules(b"o" * 32, strict=True)], ids=["no key", "other key"])
async def test_one_of_another_server_is_ignored(sealing: Capsules | None) -> None:
    async with serving(SCRIPTS, capsules=capsules()) as served:
        answer = await loop(served)
        made = await ask(served, [*answer, TRIGGER])
    async with serving(SCRIPTS, capsules=sealing) as served:
        await ask(served, [*answer, *made["output"]])
        assert SUMMARY not in prompt(served)
        for foreign in ("gAAAAABo", "\ud83d\ude00", ""):
            await ask(served, [*answer, {"type": "compaction", "encrypted_content": foreign}])


async def test_a_capsule_of_a_thought_is_no_summary() -> None:
    async with server({**SCRIPTS}, capsules(strict=True)) as served:
        answer = await loop(served)
        thought = next(item for item in answer if item.get("type") == "reasoning")
        item = {"type": "compaction", "encrypted_content": thought["encrypted_content"]}
        reply = await served.client.post(PATH, {"model": MODEL, "input": [*answer, item], "tools": TOOLS})
        assert reply.status == 400


@pytest.mark.parametrize(
    ("written", "summary"),
    [
        ("<think>\nOnly thought.\n</think>\n\n", "Only thought."),
        (CALL, '{"name": "ls"'),
        (Script("A long summary that is cut", cut_after=12), "A long summa"),
    ],
    ids=["thoughts", "a call", "cut"],
)
async def test_what_the_model_wrote_is_made_use_of(written: Any, summary: str) -> None:
    async with serving({"call": CALL, "sum": written, "end": "Done."}, capsules=capsules()) as served:
        made = await ask(served, [*await loop(served), TRIGGER])
        assert (made["status"], len(made["output"])) == ("completed", 1)
        await ask(served, [*HEAD, *made["output"]])
        assert summary in prompt(served)


@pytest.mark.parametrize("written", ["", Script("So", fail_after=1)], ids=["nothing", "failure"])
async def test_without_a_summary_it_fails(written: Any) -> None:  # C39
    async with serving({"call": CALL, "sum": written, "end": ""}, capsules=capsules()) as served:
        answer = await loop(served)
        body = {"model": MODEL, "input": [*answer, TRIGGER], "tools": TOOLS}
        assert (await served.client.post(PATH, body)).status >= 500
        streamed = await served.client.post(PATH, {**body, "stream": True})
        if streamed.status == 200:
            assert events(streamed.body)[-1][0] == "response.failed"


async def test_a_server_that_seals_nothing_says_so() -> None:
    async with serving(SCRIPTS) as served:
        reply = await served.client.post(PATH, {"model": MODEL, "input": [*HEAD, TRIGGER]})
        assert "cryptography" in refused(reply, 400, None, None)


async def test_what_was_stored_is_shortened_where_the_item_stands() -> None:  # C30
    async with serving(SCRIPTS, capsules=capsules()) as served:
        served.service.store = Store(None, 2**30)
        first = await ask(served, HEAD)
        result = {
            "type": "function_call_output",
            "call_id": first["output"][-1]["call_id"],
            "output": "notes.txt",
        }
        made = await ask(served, [result, TRIGGER], previous_response_id=first["id"])
        await ask(served, [{"role": "user", "content": "Go on."}], previous_response_id=made["id"])
        shown = prompt(served)
        assert SUMMARY in shown
        assert "<tool_response>" not in shown
        await ask(served, [*HEAD, *made["output"], {"role": "user", "content": "Go on."}])
        assert prompt(served) == shown
        served.service.store.close()


async def test_over_a_websocket_too() -> None:
    async with serving(SCRIPTS, capsules=capsules()) as served, connected(served) as connection:
        connection.create(HEAD)
        first = await connection.response()
        result = {
            "type": "function_call_output",
            "call_id": first["output"][-1]["call_id"],
            "output": "notes.txt",
        }
        connection.create([result, TRIGGER], previous_response_id=first["id"])
        made = await connection.response()
        assert [item["type"] for item in made["output"]] == ["compaction"]
        connection.create([*HEAD, *made["output"]])
        assert (await connection.response())["status"] == "completed"
        assert SUMMARY in prompt(served)


async def test_the_endpoint_gives_the_conversation_to_go_on_with() -> None:
    async with serving(SCRIPTS, capsules=capsules()) as served, openai_sdk(served.client) as sdk:
        answer: Any = await loop(served, prompt_cache_key="s")
        # It has no field for tools: those of the session stand in the prompt all the same.
        made = await sdk.responses.compact(model=MODEL, input=answer, prompt_cache_key="s")
        assert made.object == "response.compaction"
        assert [item.type for item in made.output] == ["message", "message", "compaction"]
        assert made.usage.input_tokens == len(served.engine.log[-1].prompt_token_ids)
        before, asked = list(served.engine.log)[-2:]
        begun = list(before.prompt_token_ids) + list(before.token_ids)
        assert list(asked.prompt_token_ids)[: len(begun)] == begun
        window: Any = [item.model_dump(exclude_none=True, warnings=False) for item in made.output]
        assert [item.get("role") for item in window] == ["developer", "user", None]
        await sdk.responses.create(model=MODEL, input=[*window, {"role": "user", "content": "And?"}])
        shown = prompt(served)
        assert shown.index("List. ") < shown.index(SUMMARY) < shown.index("And?")


async def test_the_endpoint_is_one_of_the_responses_api() -> None:
    async with serving(config=Config(api_key=("secret",)), capsules=capsules()) as served:
        refused(
            await served.client.post(COMPACT, {"model": MODEL, "input": "Hi"}), 401, "invalid_api_key", None
        )
        headers = {"authorization": "Bearer secret"}
        refused(await served.client.post(COMPACT, {"model": MODEL}, headers), 400, None, "input")
        reply = await served.client.post(COMPACT, {"model": "none", "input": "Hi"}, headers)
        refused(reply, 404, "model_not_found", "model")


async def test_the_error_for_a_threshold_names_the_alternative() -> None:
    async with serving(SCRIPTS) as served:
        wanted = [{"type": "compaction", "compact_threshold": 1000}]
        reply = await served.client.post(PATH, {"model": MODEL, "input": HEAD, "context_management": wanted})
        assert reply.status == 200
        assert "compaction_trigger" in reply.headers["x-singletree-warning"]
