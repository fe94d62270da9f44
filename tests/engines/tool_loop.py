"""A tool loop through the whole server, over an engine that runs: forced calls, and results that come back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from engines import real_vllm
from server.memory import Client
from server.serving import TEMPLATE, serving
from singletree import families
from singletree.engines.engine import Engine
from singletree.prompts.template.chat_template import load_chat_template
from singletree.prompts.tokenizer.tokenizer import load_tokenizer

TOOL = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{1,12}$"}},
    "required": ["city"],
    "additionalProperties": False,
}
SYSTEM = "You look up the weather with the tool and answer in one sentence. " * 20


def _chat(history: list[Any]) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "weather", "parameters": TOOL, "strict": True}}
    body = {"messages": [{"role": "system", "content": SYSTEM}, *history], "tools": [tool]}
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    return {**body, **one, "max_tokens": 60}


def _after_chat(history: list[Any], reply: Any) -> tuple[list[Any], int, str]:
    message = reply["choices"][0]["message"]
    [call] = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."}
    asked = {"role": "user", "content": "And elsewhere?"}
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return [*history, message, result, asked], cached, call["function"]["arguments"]


def _messages(history: list[Any]) -> dict[str, Any]:
    tool = {"name": "weather", "input_schema": TOOL, "strict": True}
    body = {"system": SYSTEM, "messages": history, "tools": [tool], "max_tokens": 60}
    return {**body, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


def _after_messages(history: list[Any], reply: Any) -> tuple[list[Any], int, str]:
    [call] = [block for block in reply["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "Sunny."}
    turns = [
        {"role": "assistant", "content": reply["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "And elsewhere?"}]},
    ]
    return [*history, *turns], reply["usage"]["cache_read_input_tokens"], json.dumps(call["input"])


def _responses(history: list[Any]) -> dict[str, Any]:
    tool = {"type": "function", "name": "weather", "parameters": TOOL, "strict": True}
    body = {"instructions": SYSTEM, "input": history, "tools": [tool], "max_output_tokens": 60}
    return {**body, "tool_choice": "required", "parallel_tool_calls": False, "store": False}


def _after_responses(history: list[Any], reply: Any) -> tuple[list[Any], int, str]:
    [call] = [item for item in reply["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny."}
    asked = {"role": "user", "content": "And elsewhere?"}
    cached = reply["usage"]["input_tokens_details"]["cached_tokens"]
    return [*history, *reply["output"], result, asked], cached, call["arguments"]


@dataclass(frozen=True)
class Dialect:
    """One of the three APIs: a request for a history, and the history after the reply with its cached tokens."""

    path: str
    write: Callable[[list[Any]], dict[str, Any]]
    after: Callable[[list[Any], Any], tuple[list[Any], int, str]]


@dataclass(frozen=True)
class Loop:
    """A tool loop that was played: the conversation after it, and the cached tokens of each turn."""

    history: list[Any]
    cached_tokens: list[int]


DIALECTS = (
    Dialect("/v1/chat/completions", _chat, _after_chat),
    Dialect("/v1/messages", _messages, _after_messages),
    Dialect("/v1/responses", _responses, _after_responses),
)


Post = Callable[[str, dict[str, Any]], Awaitable[tuple[int, bytes]]]
"""Posts a body to a path, and returns the status and the body of the answer."""


_BEGIN = ({"role": "user", "content": "How is the weather in Paris?"},)


async def play_tool_loop(
    post: Post, dialect: Dialect, turns: int = 4, history: Sequence[Any] = _BEGIN
) -> Loop:
    """Play ``turns`` of a tool loop, each forced to one call; ``history`` is what came before."""
    counts = []
    history = [*history]
    for _ in range(turns):
        body = {"model": real_vllm.MODEL, "temperature": 0, **dialect.write(history)}
        status, reply = await post(dialect.path, body)
        assert status == 200, reply
        history, cached, arguments = dialect.after(history, json.loads(reply))
        assert list(json.loads(arguments)) == ["city"]
        counts.append(cached)
    return Loop(history, counts)


async def forced_calls(engine: Engine, dialect: Dialect, turns: int = 4) -> list[int]:
    """Play a tool loop through the whole server in memory, and return the cached tokens of each turn."""
    async with served(engine) as client:

        async def post(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
            reply = await client.post(path, body)
            return reply.status, reply.body

        return (await play_tool_loop(post, dialect, turns)).cached_tokens


class _Running:
    """A started engine: the server neither starts nor closes it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        """Nothing: it runs."""

    async def close(self) -> None:
        """Nothing: others use it."""


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[Client]:
    """The whole server over ``engine``, which serves SmolLM2, with a template that prints tools."""
    tokenizer = load_tokenizer(real_vllm.install()[1])
    async with serving(
        engine=_Running(engine),
        tokenizer=tokenizer,
        template=load_chat_template(tokenizer, TEMPLATE.source),
        family=families.get("hermes"),
        names=(real_vllm.MODEL,),
        context_window=engine.info().context_window,
    ) as running:
        yield running.client
