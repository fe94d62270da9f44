"""``speculative_prefill``: what is known of the next prompt is read while the tools run, if the engine lacks it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from singletree import foresight
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.turn.generation import Generation

from .serving import MODEL, Served, serving
from .test_replay import LAYOUT, TOOL
from .test_takeover import until

HINT = {"x-singletree-speculative-prefill": "true", "x-singletree-session": "s"}
QUESTION: dict[str, Any] = {"role": "user", "content": "How is the weather? [[script:a,b]]"}
MODEL_OUTPUT = (
    "<think>\nI need the weather.\n\nAnd more. \n</think>\n\nLet me check.\n"
    '<tool_call>\n{"name": "get_weather",  "arguments": {"unit": "celsius",  "city": "Paris, near the river, where '
    'it rains more than in all the rest of the town"}}\n</tool_call>'
)
SCRIPTS = {"a": MODEL_OUTPUT, "b": "Sunny."}


def asked(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 1000, "tools": [TOOL], "messages": [QUESTION, *messages]}


async def call(served: Served, headers: dict[str, str], *messages: dict[str, Any]) -> list[dict[str, Any]]:
    reply = await served.client.post("/v1/messages", asked(*messages), headers)
    assert reply.status == 200
    content: list[dict[str, Any]] = reply.json["content"]
    return content


def result(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ids = [block["id"] for block in content if block["type"] == "tool_use"]
    answers = [{"type": "tool_result", "tool_use_id": id, "content": "18 degrees"} for id in ids]
    return [{"role": "assistant", "content": content}, {"role": "user", "content": answers}]


def prefills(served: Served) -> dict[str, Any]:
    opened: Any = served.service.foresight
    return {} if opened is None else dict(opened._read_ahead)


async def settled(served: Served) -> None:
    """Wait until nothing is read ahead."""
    await until(lambda: not prefills(served))


async def test_a_turn_that_comes_back_otherwise_is_read_ahead() -> None:
    async with serving(SCRIPTS) as served:
        content = await call(served, HINT)
        await settled(served)
        plays = list(served.engine.log)
        assert [play.request_id for play in plays][1:] == ["speculative-prefill"]
        await call(served, {"x-singletree-session": "s"}, *result(content))
        first, ahead, second = [list(play.prompt_token_ids) for play in served.engine.log]
    assert second[: len(ahead)] == ahead
    assert len(ahead) > len(first) + 64
    assert b"18" not in bytes(token for token in ahead if token < 256)


@pytest.mark.parametrize("headers", [{}, {"x-singletree-session": "s"}])
async def test_it_is_off_without_the_hint(headers: dict[str, str]) -> None:
    async with serving(SCRIPTS) as served:
        await call(served, headers)
        await settled(served)
        assert len(served.engine.log) == 1


async def test_what_the_engine_holds_is_not_read_again() -> None:
    async with serving(SCRIPTS, memory=TurnMemory(1 << 20), layout=LAYOUT) as served:
        content = await call(served, HINT)
        await settled(served)
        assert len(served.engine.log) == 1
        await call(served, HINT, *result(content))
        await settled(served)
        assert len(served.engine.log) == 2, "the second turn calls no tool"


async def test_the_next_request_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = asyncio.Event(), []

    async def endless(generation: Generation) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(generation)

    monkeypatch.setattr(foresight, "read_ahead", endless)
    async with serving(SCRIPTS) as served:
        content = await call(served, HINT)
        await asyncio.wait_for(began.wait(), 5)
        await call(served, {"x-singletree-session": "s"}, *result(content))
        await until(lambda: ended)
        began.clear()
        await call(served, HINT)
        await asyncio.wait_for(began.wait(), 5)
        await served.service.close_foresight()
        assert (len(ended), prefills(served)) == (2, {})
