"""What the official SDKs make of our streams is what they make of our bodies, on all three APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import anthropic
import openai
import pytest
from pydantic import BaseModel

from server.serving import MODEL, Served, serving
from singletree.server.settings.config import Config
from singletree.testing.scripts import Script

from .sdk import anthropic_sdk, openai_sdk

CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "a", "n":  1.0}}\n</tool_call>'
TURNS = {
    "text": "Hello, 🙂 world.",
    "reasoning": "<think>\nLet me see.\n</think>\n\nIt is 4.",
    "call": f"<think>\nI must look.\n</think>\n\n{CALL}",
    "text and two calls": f"First this.\n{CALL}\n{CALL}",
    "interleaved": f"<think>\nOne.\n</think>\n\nA.\n{CALL}\n<think>\nTwo.\n</think>\n\nB.\n{CALL}",
    "no arguments": '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>',
    "not a call": 'See <tool_call> {"name": oops',
    "nothing": "",
    "only reasoning": "<think>\nThat is all.",
}
each_turn = pytest.mark.parametrize("turn", TURNS)

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "number"}}}
MESSAGES_TOOL: Any = {"name": "ls", "description": "List.", "input_schema": PARAMETERS}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "ls", "parameters": PARAMETERS}}
RESPONSES_TOOL: Any = {"type": "function", "name": "ls", "parameters": PARAMETERS, "strict": False}
VARIES = ("id", "call_id", "created", "created_at", "completed_at", "item_id", "usage")


@asynccontextmanager
async def playing(turn: str) -> AsyncIterator[tuple[Served, Any]]:
    """A server that plays a turn, and the user's message that asks for it."""
    async with serving({"turn": TURNS[turn], "after": "Done."}) as served:
        yield served, [{"role": "user", "content": "[[script:turn,after]]"}]


def steady(value: Any) -> Any:
    """``value`` without what differs between two answers that say the same, and without absent fields."""
    if isinstance(value, dict):
        kept = {k: steady(v) for k, v in value.items() if k not in VARIES}
        return {k: v for k, v in kept.items() if v is not None and v != []}
    return [steady(v) for v in value] if isinstance(value, list) else value


@each_turn
async def test_messages(turn: str) -> None:
    async with playing(turn) as (served, expected), anthropic_sdk(served.client) as sdk:
        asked: Any = {"model": MODEL, "max_tokens": 500, "messages": expected, "tools": [MESSAGES_TOOL]}
        whole = await sdk.messages.create(**asked)
        async with sdk.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        counted = await sdk.messages.count_tokens(model=MODEL, messages=expected, tools=[MESSAGES_TOOL])
    assert steady(streamed.to_dict()) == steady(whole.to_dict())
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


@each_turn
async def test_chat(turn: str) -> None:
    async with playing(turn) as (served, expected), openai_sdk(served.client) as sdk:
        asked: Any = {"model": MODEL, "messages": expected, "tools": [CHAT_TOOL]}
        whole = await sdk.chat.completions.create(**asked)
        async with sdk.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            streamed = await stream.get_final_completion()
    left, right = (steady(cast(dict[str, Any], c.to_dict()))["choices"][0] for c in (streamed, whole))
    assert left["finish_reason"] == right["finish_reason"]
    for calls in (left["message"].get("tool_calls", []), right["message"].get("tool_calls", [])):
        for call in calls:
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
    assert left["message"].get("tool_calls") == right["message"].get("tool_calls")
    assert left["message"].get("content") == right["message"].get("content")
    assert left["message"].get("reasoning_content") == right["message"].get("reasoning_content")
    assert streamed.usage == whole.usage or streamed.usage is not None


@each_turn
async def test_responses(turn: str) -> None:
    async with playing(turn) as (served, expected), openai_sdk(served.client) as sdk:
        asked: Any = {"model": MODEL, "input": expected, "tools": [RESPONSES_TOOL]}
        whole = await sdk.responses.create(**asked)
        async with sdk.responses.stream(**asked) as stream:
            streamed = await stream.get_final_response()
    left, right = (steady(cast(dict[str, Any], r.to_dict())) for r in (streamed, whole))
    for item in left.get("output", []):
        item.pop("parsed_arguments", None)
        for part in item.get("content", []):
            part.pop("parsed", None)
    assert left == right


async def test_a_tool_loop_on_messages() -> None:  # C3 C5
    async with playing("interleaved") as (served, expected), anthropic_sdk(served.client) as sdk:
        asked: Any = {"model": MODEL, "max_tokens": 500, "tools": [MESSAGES_TOOL]}
        first = await sdk.messages.create(messages=expected, **asked)
        calls = [block for block in first.content if block.type == "tool_use"]
        results: Any = [{"type": "tool_result", "tool_use_id": c.id, "content": "r"} for c in reversed(calls)]
        answer: Any = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
        second = await sdk.messages.create(
            messages=[*expected, answer, {"role": "user", "content": results}], **asked
        )
        prompts = [played.prompt_token_ids for played in served.engine.log]
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"] * 2
    assert second.content[0].to_dict()["text"] == "Done."
    assert prompts[1][: len(prompts[0])] == prompts[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_runner_on_messages(stream: bool) -> None:  # C3 C12
    """It asks the server to hold the conversation first, and has to be told that it does not."""
    called: list[str] = []

    @anthropic.beta_async_tool
    async def ls(path: str, n: float = 0) -> str:
        """List."""
        called.append(path)
        return "a.py"

    async with playing("interleaved") as (served, expected), anthropic_sdk(served.client) as sdk:
        asked: Any = {
            "model": MODEL,
            "max_tokens": 500,
            "messages": expected,
            "tools": [ls],
            "stream": stream,
        }
        last: Any = await sdk.beta.messages.tool_runner(**asked).until_done()
        played = served.engine.log
    assert called == ["a", "a"]
    assert [block.to_dict()["text"] for block in last.content] == ["Done."]
    assert len(played) == 2
    assert played[1].prompt_token_ids[: len(played[0].prompt_token_ids)] == played[0].prompt_token_ids


class Answer(BaseModel):
    """What an answer is to look like."""

    city: str
    people: int | None = None
    tags: list[str] = []


@pytest.mark.parametrize("beta", [False, True])
async def test_an_answer_of_a_type_on_messages(beta: bool) -> None:
    messages: Any = [{"role": "user", "content": "[[script:s]]"}]
    async with serving({"s": '{"city": "Paris", "people": null, "tags": ["a"]}'}) as served:
        async with anthropic_sdk(served.client) as sdk:
            each = sdk.beta.messages if beta else sdk.messages
            asked: Any = {"model": MODEL, "max_tokens": 500, "messages": messages, "output_format": Answer}
            whole: Any = await each.parse(**asked)
            async with each.stream(**asked) as stream:
                streamed: Any = await stream.get_final_message()
        held = [play.constraint for play in served.engine.log]
    assert whole.parsed_output == streamed.parsed_output == Answer(city="Paris", tags=["a"])
    assert all(constraint is not None and '"city"' in str(constraint.value) for constraint in held)


async def test_threads_are_refused_in_the_apis_words() -> None:
    async with playing("text") as (served, expected), anthropic_sdk(served.client) as sdk:
        for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
            asked: Any = {"model": MODEL, "max_tokens": 500, "messages": expected, "thread": thread}
            with pytest.raises(
                anthropic.BadRequestError, match="thread: this server does not store"
            ) as refused:
                await sdk.beta.messages.create(**asked)
            assert refused.value.error_code == "thread_unsupported_request"
        assert not served.engine.log


async def test_a_tool_loop_on_chat() -> None:  # C3 C5
    async with playing("call") as (served, expected), openai_sdk(served.client) as sdk:
        asked: Any = {"model": MODEL, "tools": [CHAT_TOOL]}
        first = await sdk.chat.completions.create(messages=expected, **asked)
        message: Any = first.choices[0].message.to_dict()
        result: Any = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "r"}
        second = await sdk.chat.completions.create(messages=[*expected, message, result], **asked)
        played = served.engine.log
    assert second.choices[0].message.content == "Done."
    reported = (*played[0].prompt_token_ids, *played[0].token_ids)
    assert played[1].prompt_token_ids[: len(reported)] == reported, "its own words, byte for byte"


async def test_a_tool_loop_on_responses() -> None:  # C3 C5 C33
    async with playing("call") as (served, expected), openai_sdk(served.client) as sdk:
        # Nothing is remembered here, so the SDK has to carry the reasoning itself.
        asked: Any = {"model": MODEL, "tools": [RESPONSES_TOOL], "include": ["reasoning.content"]}
        first = await sdk.responses.create(input=expected, **asked)
        items: Any = [item.to_dict() for item in first.output]
        call = next(item for item in items if item["type"] == "function_call")
        result: Any = {"type": "function_call_output", "call_id": call["call_id"], "output": "r"}
        second = await sdk.responses.create(input=[*expected, *items, result], **asked)
        played = served.engine.log
    assert second.output_text == "Done."
    reported = (*played[0].prompt_token_ids, *played[0].token_ids)
    assert played[1].prompt_token_ids[: len(reported)] == reported, "its own words, byte for byte"


async def test_models() -> None:
    async with serving() as served:
        async with openai_sdk(served.client) as sdk:
            assert [model.id async for model in sdk.models.list()] == [MODEL]
            assert (await sdk.models.retrieve(MODEL)).id == MODEL
        async with anthropic_sdk(served.client) as claude:
            assert [model.id async for model in claude.models.list()] == [MODEL]


FAULTS: list[tuple[str, str, type[Exception], type[Exception]]] = [
    ("model", "nope", anthropic.NotFoundError, openai.NotFoundError),
    ("script", "busy", anthropic.APIStatusError, openai.InternalServerError),
    ("script", "dead", anthropic.InternalServerError, openai.InternalServerError),
    ("script", "missing", anthropic.BadRequestError, openai.BadRequestError),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("what", "value", "claude_error", "openai_error"), FAULTS)
async def test_errors(
    what: str, value: str, claude_error: type[Exception], openai_error: type[Exception], stream: bool
) -> None:  # C39
    scripts = {"busy": Script(overloaded=True), "dead": Script(fail_after=0)}
    model = value if what == "model" else MODEL
    messages: Any = [{"role": "user", "content": f"[[script:{value}]]"}]
    async with serving(scripts) as served:
        async with anthropic_sdk(served.client) as claude:
            with pytest.raises(claude_error):
                await claude.messages.create(model=model, max_tokens=9, messages=messages, stream=stream)
        async with openai_sdk(served.client) as sdk:
            with pytest.raises(openai_error):
                await sdk.chat.completions.create(model=model, messages=messages, stream=stream)
            with pytest.raises(openai_error):
                await sdk.responses.create(model=model, input=messages, stream=stream)


async def test_a_wrong_key() -> None:
    async with serving(config=Config(api_key=("right",))) as served:
        async with anthropic_sdk(served.client) as claude:
            with pytest.raises(anthropic.AuthenticationError):
                await claude.models.list()
        async with openai_sdk(served.client) as sdk:
            with pytest.raises(openai.AuthenticationError):
                await sdk.models.list()
        async with openai_sdk(served.client, "right") as sdk:
            assert [model.id async for model in sdk.models.list()] == [MODEL]


async def test_an_engine_that_dies_in_the_stream() -> None:  # C39
    messages: Any = [{"role": "user", "content": "[[script:dies]]"}]
    async with serving({"dies": Script("abcdef", fail_after=3)}) as served:
        async with anthropic_sdk(served.client) as claude:
            with pytest.raises(anthropic.APIStatusError, match="makes the engine fail after 3 tokens"):
                async with claude.messages.stream(model=MODEL, max_tokens=9, messages=messages) as stream:
                    await stream.get_final_message()
        async with openai_sdk(served.client) as sdk:
            with pytest.raises(openai.APIError, match="makes the engine fail after 3 tokens"):
                async for _ in await sdk.chat.completions.create(model=MODEL, messages=messages, stream=True):
                    pass
            events = [e async for e in await sdk.responses.create(model=MODEL, input=messages, stream=True)]
    assert events[-1].type == "response.failed"


async def test_an_sdk_that_stops_listening_frees_the_engine() -> None:  # C40
    messages: Any = [{"role": "user", "content": "[[gen:5000:1:0.01]]"}]
    async with serving() as served:
        async with openai_sdk(served.client) as sdk:
            stream = await sdk.chat.completions.create(model=MODEL, messages=messages, stream=True)
            async for _ in stream:
                break
            await stream.close()
        assert served.engine.log[-1].finish is None
        assert len(served.engine.log[-1].token_ids) < 10
