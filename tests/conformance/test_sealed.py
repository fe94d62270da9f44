"""Capsules change nothing that the official SDKs make of a turn but the fields and the block that carry them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from server.serving import MODEL, TEMPLATE, TOKENIZER, Served, serving
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.capsules import PREFIX, Capsules

from .sdk import anthropic_sdk, openai_sdk
from .test_sdks import MESSAGES_TOOL, RESPONSES_TOOL, TURNS, each_turn, steady

FIELDS = ("signature", "encrypted_content", "data")


@asynccontextmanager
async def playing(turn: str, sealing: Capsules | None) -> AsyncIterator[tuple[Served, Any]]:
    memory, layout = TurnMemory(2**20), TEMPLATE.layout(TOKENIZER)
    async with serving({"turn": TURNS[turn]}, memory=memory, layout=layout, capsules=sealing) as served:
        yield served, [{"role": "user", "content": "[[script:turn]]"}]


def sealing() -> Capsules:
    return Capsules([b"k" * 32], b"model")


def is_capsule(item: dict[str, Any]) -> bool:
    """Whether ``item`` only carries the turn: every thought of these answers has words."""
    return item["type"] == "redacted_thinking" or (item["type"] == "reasoning" and not item["summary"])


def parted(items: list[dict[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    """The capsules of ``items``, and the rest of them; the block behind the last call is nothing but a capsule."""
    carried = [item[field] for item in items for field in FIELDS if item.get(field)]
    written = [item for item in items if not is_capsule(item)]
    return carried, [{k: v for k, v in steady(item).items() if k not in FIELDS} for item in written]


def check(sealed: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    carried, rest = parted(sealed)
    nothing, same = parted(plain)
    assert nothing == []
    assert rest == same
    assert len(carried) == sum("thinking" in item["type"] or item["type"] == "reasoning" for item in sealed)
    assert all(capsule.startswith(PREFIX) for capsule in carried)


@each_turn
@pytest.mark.parametrize("streams", [False, True])
async def test_messages(turn: str, streams: bool) -> None:  # C37
    written = []
    for capsules in (sealing(), None):
        async with playing(turn, capsules) as (served, messages), anthropic_sdk(served.client) as sdk:
            asked: Any = {"model": MODEL, "max_tokens": 500, "messages": messages, "tools": [MESSAGES_TOOL]}
            if streams:
                async with sdk.messages.stream(**asked) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await sdk.messages.create(**asked)
        written.append([block.to_dict() for block in answer.content])
    check(*written)


@each_turn
@pytest.mark.parametrize("streams", [False, True])
async def test_responses(turn: str, streams: bool) -> None:  # C33 C34
    written = []
    for capsules in (sealing(), None):
        async with playing(turn, capsules) as (served, messages), openai_sdk(served.client) as sdk:
            asked: Any = {"model": MODEL, "input": messages, "tools": [RESPONSES_TOOL]}
            asked |= {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
            if streams:
                async with sdk.responses.stream(**asked) as stream:
                    answer: Any = await stream.get_final_response()
            else:
                answer = await sdk.responses.create(**asked)
        written.append([item.to_dict() for item in answer.output])
    check(*written)
