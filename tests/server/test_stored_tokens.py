"""The turns of stored responses come back by their tokens on a server that has only the store and the key."""

from __future__ import annotations

from typing import Any

import pytest

from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.stored_responses.store import Store
from singletree.testing.scripts import Script

from .carrying import LAYOUT, capsules, kept_in, last_prompt
from .serving import MODEL, TOKENIZER, serving

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "ls", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "ls",   "arguments": {"n":   1.0}}\n</tool_call>'
BEHIND = " I looked. \n"
MARKER = (*b"It is <", *b"tool_call>, letter by letter.")
"""Characters that are one token wherever they are encoded together."""
TURNS: dict[str, Script] = {
    "call": Script(CALL),
    "words and call": Script(f" I look.  \n\n{CALL}"),
    "thought, words and calls": Script(f"<think>\nHm.\n</think>\n\nI look. {CALL}\n{CALL}"),
    "words": Script(token_ids=MARKER),
    "thought and words": Script(token_ids=(*TOKENIZER.encode("<think>\nHm.\n</think>\n\n"), *MARKER)),
    "call and words": Script(f"{CALL}{BEHIND}"),
}
INCLUDES: list[list[str]] = [[], ["reasoning.encrypted_content"]]


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", INCLUDES, ids=["hidden", "sealed"])
@pytest.mark.parametrize("kind", ["response", "conversation"])
async def test_a_stored_turn_keeps_its_tokens(name: str, stream: bool, include: list[str], kind: str) -> None:
    store = Store(None, 2**30)
    turn = TURNS[name]
    more: dict[str, Any] = {}
    items: list[dict[str, Any]] = []
    before: list[int] = []
    generated: list[int] = []
    for number in range(2):
        memory = TurnMemory(2**20)
        async with serving(
            {"a": turn, "b": "Fine."}, memory=memory, layout=LAYOUT, capsules=capsules()
        ) as served:
            served.service.store = store
            if number == 0 and kind == "conversation":
                more["conversation"] = (await served.client.post("/v1/conversations", {})).json["id"]
            asked = items or [{"role": "user", "content": "[[script:a,b]] Look."}]
            given = {"model": MODEL, "input": asked, "tools": [TOOL], "include": include, "stream": stream}
            reply = await served.client.post(PATH, given | more)
            assert reply.status == 200, reply.body
            assert b"singletree_reasoning" not in reply.body
            if number == 1:
                assert kept_in(last_prompt(served), before, generated) == len(generated)
                break
            before, generated = last_prompt(served), list(served.engine.log[-1].token_ids)[:-1]
            response = (await served.client.get(f"{PATH}/{response_id(reply.body)}")).json
            if kind == "response":
                more["previous_response_id"] = response["id"]
            items = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
                for item in response["output"]
                if item["type"] == "function_call"
            ] or [{"role": "user", "content": "And now?"}]
    store.close()


def response_id(body: bytes) -> str:
    return body.partition(b'"id":"resp_')[2].partition(b'"')[0].decode().join(("resp_", ""))
