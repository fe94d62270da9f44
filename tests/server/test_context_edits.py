"""Context editing on a served model: the prompt, the answer, the count, and the turn memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from singletree.prompts.history.context_editing import PLACEHOLDER
from singletree.prompts.replay.turn_memory import TurnMemory

from .memory import events
from .serving import MODEL, TEMPLATE, TOKENIZER, body, serving

PATH = "/v1/messages"
LAYOUT = TEMPLATE.layout(TOKENIZER)
TOOL = {"name": "ls", "input_schema": {"type": "object"}}
TOOL_USES = "clear_tool_uses_20250919"
MODEL_OUTPUT = (
    '<think>\nA thought.\n</think>\n\n<tool_call>\n{"name": "ls", "arguments": {"path": "a"}}\n</tool_call>'
)


def managed(*edits: dict[str, Any]) -> dict[str, Any]:
    return {"context_management": {"edits": list(edits)}}


def history(uses: int, size: int = 400) -> list[dict[str, Any]]:
    """A tool loop of so many uses."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "[[echo:done]]"}]
    for at in range(uses):
        call = {"type": "tool_use", "id": f"toolu_{at}", "name": "ls", "input": {"path": str(at)}}
        thought = {"type": "thinking", "thinking": f"thought {at}", "signature": ""}
        messages.append({"role": "assistant", "content": [thought, call]})
        result = {"type": "tool_result", "tool_use_id": f"toolu_{at}", "content": str(at) * size}
        messages.append({"role": "user", "content": [result]})
    return messages


def asking(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": messages, "tools": [TOOL], **more}


async def test_the_prompt_the_answer_and_the_count() -> None:  # C27
    edit = {
        "type": TOOL_USES,
        "trigger": {"type": "tool_uses", "value": 3},
        "keep": {"type": "tool_uses", "value": 1},
    }
    async with serving() as served:
        asked = asking(history(5), **managed(edit))
        whole = (await served.client.post(PATH, asked)).json
        stream = events((await served.client.post(PATH, asked | {"stream": True})).body)
        count = (await served.client.post(f"{PATH}/count_tokens", asked)).json
        plain = (await served.client.post(f"{PATH}/count_tokens", asking(history(5)))).json
        prompt = TOKENIZER.decode(served.engine.log[0].prompt_token_ids)
    assert prompt.count(PLACEHOLDER) == 3
    assert "000" not in prompt
    assert "444" in prompt
    [reported] = whole["context_management"]["applied_edits"]
    assert (reported["type"], reported["cleared_tool_uses"]) == (TOOL_USES, 3)
    assert reported["cleared_input_tokens"] == 3 * (400 - len(PLACEHOLDER)), "a byte is a token here"
    assert stream[-2][1]["context_management"] == whole["context_management"]
    usage = whole["usage"]
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert count["context_management"]["original_input_tokens"] == plain["input_tokens"]
    assert plain["input_tokens"] - count["input_tokens"] == reported["cleared_input_tokens"]


async def test_the_prefix_holds_until_the_edit_applies_again() -> None:
    edit = {
        "type": TOOL_USES,
        "trigger": {"type": "input_tokens", "value": 3000},
        "keep": {"type": "tool_uses", "value": 1},
    }
    async with serving() as served:
        for uses in range(1, 16):
            await served.client.post(PATH, asking(history(uses), **managed(edit)))
        prompts = [TOKENIZER.decode(play.prompt_token_ids) for play in served.engine.log]
    tail = len("<|im_start|>assistant\n")
    broken = sum(not b.startswith(a[:-tail]) for a, b in pairwise(prompts))
    assert 1 <= broken <= 4
    assert max(map(len, prompts)) < 5500 < 15 * 400, "the template's own tokens do not count for the trigger"


async def test_cleared_thinking_is_not_brought_back_from_memory() -> None:
    clearing = managed({"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}})
    async with serving(
        {"s": MODEL_OUTPUT, "after": "Done."}, memory=TurnMemory(2**20), layout=LAYOUT
    ) as served:
        first = body(PATH, "[[script:s,after]]", tools=[TOOL])
        content = (await served.client.post(PATH, first)).json["content"]
        without = [block for block in content if block["type"] != "thinking"]
        result = {"type": "tool_result", "tool_use_id": without[-1]["id"], "content": "b"}
        written = [
            *first["messages"],
            {"role": "assistant", "content": without},
            {"role": "user", "content": [result]},
        ]
        for more in ({}, clearing):
            await served.client.post(PATH, asking(written, **more))
        restored, cleared = (TOKENIZER.decode(play.prompt_token_ids) for play in list(served.engine.log)[1:3])
    assert "A thought." in restored
    assert "A thought." not in cleared
