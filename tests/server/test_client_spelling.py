"""Without any memory, a call that a client printed in its own way comes back by its tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .carrying import THOUGHT, Client, Items, kept_in, last_prompt
from .serving import TOKENIZER, serving

ARGUMENTS = {
    "path": "a/b.py",
    "content": 'x = {"a": [1, 2]}\n' * 20,
    "opts": {"í": [1.5, None, True, {}], "n": 3},
}
MODEL_OUTPUT = json.dumps({"name": "get_weather", "arguments": ARGUMENTS}, ensure_ascii=False)
CALL = f"<tool_call>\n{MODEL_OUTPUT}\n</tool_call>"
SPELLINGS: dict[str, dict[str, Any]] = {
    "JavaScript": {"separators": (",", ":"), "ensure_ascii": False},
    "Python": {"separators": (",", ":")},
    "indented": {"indent": 2},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("output", [f"{THOUGHT}\n\nSo.\n{CALL}", f"So.\n{CALL}\n{CALL}", CALL])
async def test_a_call_has_the_separators_of_the_template(spelling: str, output: str) -> None:
    client = Client("/v1/messages", "[[script:a,b]] How is it?", stream=False)
    async with serving({"a": output, "b": "Fine."}, memory=None) as served:
        items: Items = await client.ask(served)
        before = last_prompt(served)
        client.take(items)
        tool = {"name": "get_weather", "description": "", "input_schema": {"type": "object"}}
        body = {"model": "org/test-model", "messages": client.messages, "tools": [tool], "max_tokens": 4000}
        written = json.dumps(body, **SPELLINGS[spelling]).encode()
        answer = await served.client.request("POST", "/v1/messages", written, {})
        assert answer.status == 200, answer.body
        generated = TOKENIZER.encode(output)
        assert kept_in(last_prompt(served), before, generated) == len(generated)
