"""``functions`` and ``function_call`` on Chat Completions: the form of calls before ``tools``, both ways."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from conformance.sdk import openai_sdk
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.testing.scripts import Script

from .memory import events
from .serving import MODEL, TEMPLATE, TOKENIZER, Served, serving

PATH = "/v1/chat/completions"
LAYOUT = TEMPLATE.layout(TOKENIZER)
FUNCTION = {
    "name": "get_weather",
    "description": "Tell the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ARGUMENTS = '{"city":  "Par\\u00eds", "days":3.0}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
MODEL_OUTPUT = f"<think>\nI need it.\n</think>\n\nLet me check.\n{CALL}"


def asked(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages, "functions": [FUNCTION], **more}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def message(served: Served, sent: dict[str, Any], *, stream: bool) -> tuple[dict[str, Any], str]:
    """(the message, why it ended), put together as clients of the legacy form do."""
    reply = await served.client.post(PATH, sent | {"stream": stream})
    assert reply.status == 200, reply.body
    if not stream:
        choice = reply.json["choices"][0]
        return choice["message"], choice["finish_reason"]
    made: dict[str, Any] = {"role": "assistant", "content": None}
    reason = ""
    for _, data in events(reply.body):
        if data == "[DONE]" or not data["choices"]:
            continue
        [choice] = data["choices"]
        delta = choice["delta"]
        assert "tool_calls" not in delta
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                made[name] = (made.get(name) or "") + delta[name]
        if "function_call" in delta:
            call = made.setdefault("function_call", {"name": "", "arguments": ""})
            for name, piece in delta["function_call"].items():
                call[name] += piece
        reason = choice["finish_reason"] or reason
    return made, reason


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_answered_in_the_form_in_which_it_was_offered(stream: bool) -> None:
    async with serving({"a": MODEL_OUTPUT}) as served:
        made, reason = await message(served, asked([user("[[script:a]]")]), stream=stream)
        prompt = TOKENIZER.decode(served.engine.log[0].prompt_token_ids)
    assert reason == "function_call"
    assert made == {
        "role": "assistant",
        "content": "Let me check.",
        "reasoning_content": made["reasoning_content"],
        "function_call": {"name": "get_weather", "arguments": ARGUMENTS},
        **({} if stream else {"refusal": None, "annotations": []}),
    }
    assert '"name": "get_weather"' in prompt
    assert "Tell the weather." in prompt


async def test_the_prompt_is_that_of_the_same_tools() -> None:
    tools = {"tools": [{"type": "function", "function": FUNCTION}]}
    call = {"name": "get_weather", "arguments": ARGUMENTS}
    legacy = [
        user("Hi"),
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "get_weather", "content": "Sunny."},
    ]
    modern = [
        legacy[0],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "Sunny."},
    ]
    async with serving() as served:
        counts = [
            (await served.client.post("/tokenize", {"messages": fields, **offer})).json["tokens"]
            for fields, offer in ((legacy, {"functions": [FUNCTION]}), (modern, tools))
        ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("chunk", [1, *range(2, 12), 1000])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_generated_token_is_in_place_though_no_id_comes_back(stream: bool, chunk: int) -> None:
    memory = TurnMemory(2**20)
    texts = {"a": MODEL_OUTPUT, "b": MODEL_OUTPUT.replace("I need it.", "Once more."), "c": "Fine."}
    scripts = {name: Script(text, chunk=chunk) for name, text in texts.items()}
    async with serving(scripts, memory=memory, layout=LAYOUT) as served:
        messages = [user("[[script:a,b,c]] How is it?")]
        for _ in range(2):
            made, _ = await message(served, asked(messages), stream=stream)
            call = made["function_call"] | {
                "arguments": json.dumps(json.loads(made["function_call"]["arguments"]))
            }
            messages += [
                {"role": "assistant", "content": made["content"], "function_call": call},
                {"role": "function", "name": "get_weather", "content": "Sunny."},
            ]
        await message(served, asked(messages), stream=stream)
        log = list(served.engine.log)
    for before, after in pairwise(log):
        begun = [*before.prompt_token_ids, *before.token_ids]
        assert list(after.prompt_token_ids)[: len(begun)] == begun


async def test_a_thought_of_another_conversation_is_not_taken_for_this_ones() -> None:
    """No id tells the two calls apart, so all that was said before them has to be the same."""
    memory = TurnMemory(2**20)
    scripts = {"a": MODEL_OUTPUT, "b": MODEL_OUTPUT.replace("I need it.", "SECRET")}
    async with serving(scripts, memory=memory, layout=LAYOUT) as served:
        first, second = user("[[script:a,x]] One"), user("[[script:b,x]] Two")
        for asking in (first, second):
            made, _ = await message(served, asked([asking]), stream=False)
        given = [
            {"role": "assistant", "content": made["content"], "function_call": made["function_call"]},
            {"role": "function", "name": "get_weather", "content": "Sunny."},
        ]
        counted = await served.client.post("/tokenize", asked([first, *given]))
    prompt = TOKENIZER.decode(counted.json["tokens"])
    assert "SECRET" not in prompt


CUT = [
    ("cut in its arguments", MODEL_OUTPUT[: MODEL_OUTPUT.index("days")], "length"),
    ("broken", MODEL_OUTPUT[: MODEL_OUTPUT.index("days")] + "</tool_call>", "stop"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("output", "ended"), [c[1:] for c in CUT], ids=[c[0] for c in CUT])
async def test_a_call_that_is_not_complete_is_never_shown(output: str, ended: str, stream: bool) -> None:
    script = Script(output, cut_after=len(TOKENIZER.encode(output)) - 1) if ended == "length" else output
    async with serving({"a": script}) as served:
        made, reason = await message(served, asked([user("[[script:a]]")]), stream=stream)
    assert "function_call" not in made
    assert reason == ended


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_is_all_that_a_message_has_room_for(stream: bool) -> None:
    async with serving({"a": f"{CALL}\n{CALL}"}) as served:
        made, reason = await message(served, asked([user("[[script:a]]")]), stream=stream)
    assert (made["function_call"]["arguments"], reason) == (ARGUMENTS, "function_call")


async def test_a_function_may_be_asked_for_or_forbidden() -> None:
    async with serving({"a": CALL}) as served:
        none = asked([user("[[script:a]]")], function_call="none")
        made, reason = await message(served, none, stream=False)
        assert ("function_call" not in made, reason) == (True, "stop")
        named = asked([user("[[script:a]]")], function_call={"name": "get_weather"})
        assert (await message(served, named, stream=True))[1] == "function_call"


async def test_the_official_sdk_reads_it() -> None:
    async with serving({"a": MODEL_OUTPUT}) as served, openai_sdk(served.client) as sdk:
        sent: Any = asked([user("[[script:a]]")])
        whole = await sdk.chat.completions.create(**sent)
        async with sdk.chat.completions.stream(**sent) as stream:
            streamed = await stream.get_final_completion()
    for completion in (whole, streamed):
        called = completion.choices[0].message.function_call
        assert called is not None
        assert (called.name, called.arguments) == ("get_weather", ARGUMENTS)
        assert completion.choices[0].finish_reason == "function_call"
