"""The capsule behind the last call of a streamed turn: where it leaves, where it does not, and what it brings back."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from singletree.conversation import Text, Tool, ToolCall, Turn
from singletree.server.capsules import PREFIX
from singletree.server.turn.round_trip import survives_round_trip
from singletree.testing.scripts import Script

from .carrying import (
    CALL,
    FUNCTION,
    INTERLEAVED,
    ONE,
    PATHS,
    THOUGHT,
    Client,
    Items,
    capsules,
    carried,
    kept_in,
    last_prompt,
    moved,
    rewritten,
    server,
    without_words,
)
from .memory import events
from .serving import MODEL, TOKENIZER

AS_PRINTED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "París", "days": 3}}\n</tool_call>'
SEALED = ("redacted_thinking", "reasoning")


def at_the_end(items: Items) -> list[str]:
    """The capsule behind the last call."""
    return carried([item for item in items[-1:] if item["type"] in SEALED])


async def items_of(path: str, messages: str, **more: Any) -> Items:
    client = Client(path, "[[script:a]] How is it?", stream=True)
    async with server({"a": Script(messages, chunk=3)}) as served:
        return await client.ask(served, **more)


@pytest.mark.parametrize("path", PATHS)
async def test_it_leaves_behind_a_call_that_the_template_prints_in_another_way(path: str) -> None:
    items = await items_of(path, ONE)
    [capsule] = at_the_end(items)
    assert capsule.startswith(PREFIX)
    span = capsules().open(capsule)
    assert span is not None
    assert span.is_last
    assert TOKENIZER.decode(span.token_ids) == ONE[ONE.index("</think>") + len("</think>") :]


@pytest.mark.parametrize("path", PATHS)
async def test_a_call_that_comes_back_by_itself_has_none(path: str) -> None:
    """The template prints arguments that were written again as its model was trained to write them."""
    assert at_the_end(await items_of(path, f"{THOUGHT}\n\n{AS_PRINTED}")) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_on_chat_arguments_that_javascript_wrote_need_no_capsule(stream: bool) -> None:
    output = f"<think>\nI need the weather.\n</think>\n\n{AS_PRINTED}"
    tokens, kept, _ = await chat(output, stream=stream, keep=False)
    assert kept == tokens


@pytest.mark.parametrize("path", PATHS)
async def test_a_turn_without_calls_has_none(path: str) -> None:
    """Clients read the last block as the answer."""
    assert at_the_end(await items_of(path, f"{THOUGHT}\n\nFine.")) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("output", [f"{ONE}\nAnd that was it.", f"{CALL}\n{THOUGHT}\n\nSo be it."])
async def test_words_behind_a_call_are_sealed_with_it(output: str, stream: bool) -> None:
    """Clients read no answer there: they have a call to run."""
    for path in PATHS:
        tokens, kept, _ = await moved(path, output, rewritten, stream=stream)
        assert kept == tokens, path
    tokens, kept, _ = await chat(output, stream=stream)
    assert kept == tokens


async def test_who_does_not_ask_for_sealed_reasoning_gets_none() -> None:
    assert at_the_end(await items_of("/v1/responses", ONE, include=[])) == []
    assert at_the_end(await items_of("/v1/messages", CALL)) == []
    asked = {"type": "enabled", "budget_tokens": 1024}
    assert at_the_end(await items_of("/v1/messages", CALL, thinking=asked)) != []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_without_a_thought_comes_back_whole(stream: bool) -> None:
    client = Client("/v1/messages", "[[script:a,b]] How is it?", stream=stream)
    scripts: dict[str, str | Script] = {"a": CALL, "b": "Fine."}
    asked = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with server(scripts) as served:
        client.take(await client.ask(served, **asked))
        before = last_prompt(served)
    async with server(scripts) as served:
        await client.ask(served, **asked)
        generated = TOKENIZER.encode(CALL)
        assert kept_in(last_prompt(served), before, generated) == len(generated)


def chat_turn(body: bytes, *, stream: bool) -> dict[str, Any]:
    """The message as pi keeps it: details stand with the call of their id, arguments are written anew."""
    if not stream:
        message: dict[str, Any] = json.loads(body)["choices"][0]["message"]
    else:
        message = {"role": "assistant", "content": None, "tool_calls": [], "reasoning_details": []}
        for _, data in events(body):
            for choice in () if isinstance(data, str) else data["choices"]:
                delta = choice["delta"]
                for field in ("content", "reasoning_content"):
                    if delta.get(field):
                        message[field] = (message.get(field) or "") + delta[field]
                for call in delta.get("tool_calls", ()):
                    if "id" in call:
                        message["tool_calls"].append(json.loads(json.dumps(call)))
                    else:
                        function = message["tool_calls"][call["index"]]["function"]
                        function["arguments"] += call["function"]["arguments"]
                message["reasoning_details"] += delta.get("reasoning_details", [])
    known = {call["id"] for call in message["tool_calls"]}
    assert all(detail["id"] in known for detail in message.get("reasoning_details", ()))
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
    message["reasoning_content"] = message["reasoning_content"].strip()
    return message


async def chat(output: str, *, stream: bool, keep: bool = True, change: bool = False) -> tuple[int, int, Any]:
    """A turn on one server, the next on another: (its tokens, how many came back in place, the answer)."""
    tool = {"type": "function", "function": FUNCTION}
    messages: Items = [{"role": "user", "content": "[[script:a,b]] How is it?"}]
    given = {"model": MODEL, "tools": [tool], "stream": stream}
    scripts: dict[str, str | Script] = {"a": output, "b": "Fine."}
    async with server(scripts) as served:
        answer = await served.client.post("/v1/chat/completions", {**given, "messages": messages})
        before = last_prompt(served)
    message = chat_turn(answer.body, stream=stream)
    details = message["reasoning_details"] if keep else message.pop("reasoning_details", None) and []
    for detail in details if change else ():
        detail["data"] = detail["data"][:-2] + ("AA" if detail["data"][-2:] != "AA" else "BB")
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "Sunny."} for c in message["tool_calls"]]
    async with server(scripts, capsules(strict=change)) as served:
        asked = {**given, "messages": [*messages, message, *results], "stream": False}
        answer = await served.client.post("/v1/chat/completions", asked)
        prompt = last_prompt(served) if served.engine.log else []
    generated = TOKENIZER.encode(output)
    return len(generated), kept_in(prompt, before, generated), answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("output", [ONE, INTERLEAVED], ids=["one", "interleaved"])
async def test_on_chat_the_whole_turn_stands_with_its_last_call(output: str, stream: bool) -> None:
    tokens, kept, _ = await chat(output, stream=stream)
    assert kept == tokens
    _, kept, _ = await chat(output, stream=stream, keep=False)
    assert kept < tokens


async def test_a_changed_detail_is_refused_where_such_are() -> None:
    _, _, answer = await chat(ONE, stream=True, change=True)
    assert answer.status == 400
    assert "invalid reasoning_details in a reasoning detail" in answer.json["error"]["message"]


async def test_a_capsule_does_not_change_the_field_of_reasoning() -> None:
    """A client that sends our capsule back reads the field in which reasoning came."""
    _, _, answer = await chat(f"{THOUGHT}{CALL}", stream=True)
    assert "reasoning" not in answer.json["choices"][0]["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_glued_to_another_call_it_brings_nothing_in(path: str) -> None:
    other = ONE.replace("Par", "Lon").replace("need", "want")
    scripts: dict[str, str | Script] = {"a": ONE, "b": other, "c": "Fine."}
    client = Client(path, "[[script:a,b,c]] How is it?", stream=True)
    async with server(scripts) as served:
        first = await client.ask(served)
        client.take(first)
        second = await client.ask(served)
    mine = iter(carried(first))
    fields = ("signature", "encrypted_content", "data")
    glued = [i | {k: next(mine) for k in fields if i.get(k)} for i in without_words(second)]
    client.take(glued)
    async with server(scripts) as served:
        await client.ask(served)
        turn = TOKENIZER.decode(last_prompt(served)).rpartition("<|im_start|>user")[0]
        turn = turn.rpartition("<|im_start|>assistant")[2]
    assert "Lon" in turn
    assert "I need the weather." not in turn


@pytest.mark.parametrize("path", PATHS)
async def test_an_edited_call_stays_edited(path: str) -> None:
    client = Client(path, "[[script:a,b]] How is it?", stream=True)
    async with server({"a": ONE, "b": "Fine."}) as served:
        items = await client.ask(served)
    client.take(json.loads(json.dumps(rewritten(items)).replace("celsius", "kelvin")))
    async with server({"a": ONE, "b": "Fine."}) as served:
        await client.ask(served)
        prompt = TOKENIZER.decode(last_prompt(served))
    assert "kelvin" in prompt
    assert "celsius" not in prompt


DEFAULTS = {"type": "object", "properties": {"a": {}, "b": {"type": "boolean", "default": False}}}


@pytest.mark.parametrize(
    ("arguments", "schema", "alike"),
    [
        ('{"a": 1}', {}, True),
        ("{}", {}, True),
        ('{"a": "í 😀"}', {}, True),
        ('{"a": 1.5, "b": [1, {"c": null}]}', {}, True),
        ('{"a":1}', {}, False),
        ('{"a": 1.0}', {}, False),
        ('{"a": -0.0}', {}, False),
        ('{"a": 1e400}', {}, False),
        ('{"a": 12345678901234567890}', {}, False),
        ('{"a": "\\u00ed"}', {}, False),
        ('{"a": 1}', DEFAULTS, False),
        ('{"a": 1, "b": true}', DEFAULTS, True),
        pytest.param(json.dumps({"a": "word " * 8192}), {}, False, id="long"),
        ("no json", {}, False),
        ("[" * 5000, {}, False),
    ],
)
async def test_what_comes_back_by_itself(arguments: str, schema: dict[str, Any], alike: bool) -> None:
    """Numbers are as JavaScript prints them, and clients fill in the defaults of a tool's schema."""
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    turn = Turn("assistant", (Text("So."), ToolCall("f", arguments, "call_1")))
    async with server({}) as served:
        speech = served.service.catalog.models[0]
        token_ids = array("I", TOKENIZER.encode(text))
        tools = [Tool("f", "", schema)]
        assert survives_round_trip(speech, turn, token_ids, "So.\n", tools) == alike


async def test_what_is_printed_behind_something_else_does_not_come_back() -> None:
    """A line break more between a thought and a call is another text."""
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    turn = Turn("assistant", (Text("So."), ToolCall("f", "{}", "call_1")))
    async with server({}) as served:
        speech, token_ids = served.service.catalog.models[0], array("I", TOKENIZER.encode(text))
        assert survives_round_trip(speech, turn, token_ids, "So.\n", [])
        for behind in ("So.", "So.\n\n", "No.\n"):
            assert not survives_round_trip(speech, turn, token_ids, behind, [])


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_several_choices_has_its_own(stream: bool) -> None:  # C34
    asked = {
        "model": MODEL,
        "tools": [{"type": "function", "function": FUNCTION}],
        "messages": [{"role": "user", "content": "[[script:a]] How is it?"}],
        "stream": stream,
        "n": 2,
    }
    async with server({"a": ONE}) as served:
        answer = (await served.client.post("/v1/chat/completions", asked)).body
    chunks = [data for _, data in events(answer)[:-1]] if stream else [json.loads(answer)]
    sealed: dict[int, list[str]] = {0: [], 1: []}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        details = choice["delta" if stream else "message"].get("reasoning_details", ())
        sealed[choice["index"]] += [detail["data"] for detail in details]
    for [capsule] in sealed.values():
        span = capsules().open(capsule)
        assert span is not None
        assert TOKENIZER.decode(span.token_ids) == ONE
