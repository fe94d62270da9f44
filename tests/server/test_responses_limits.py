"""What bounds a response: the window and how a history is made to fit it, the number of calls."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from .memory import Reply, events
from .serving import MODEL, TOKENIZER, Served, serving

PATH = "/v1/responses"
WINDOW = 4000
TOOL: dict[str, Any] = {"type": "function", "name": "ls", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'


def loop(count: int) -> list[dict[str, Any]]:
    """A task and a tool loop of ``count`` calls behind it, about 250 tokens each."""
    items: list[dict[str, Any]] = [{"role": "developer", "content": "Rules."}]
    items.append({"role": "user", "content": "The task. [[script:s]]"})
    for n in range(count):
        call = {"type": "function_call", "call_id": f"c{n}", "name": "ls", "arguments": f'{{"n": {n}}}'}
        output = {"type": "function_call_output", "call_id": f"c{n}", "output": f"result {n} " * 12}
        items += [call, output]
    return items


async def ask(served: Served, input: Any, path: str = PATH, **more: Any) -> Reply:
    asked = {"model": MODEL, "input": input, "tools": [TOOL], "max_output_tokens": 300, **more}
    return await served.client.post(path, asked)


def prompts(served: Served) -> list[str]:
    return [TOKENIZER.decode(played.prompt_token_ids) for played in served.engine.log]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("truncation", [None, "disabled"])
async def test_what_does_not_fit_is_refused(truncation: str | None, stream: bool) -> None:  # C43
    async with serving({"s": "Done."}, context_window=WINDOW) as served:
        reply = await ask(served, loop(30), truncation=truncation, stream=stream)
        assert not served.engine.log
    error = reply.json["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "context_length_exceeded", "input")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_truncated_history_loses_its_middle(stream: bool) -> None:
    async with serving({"s": "Done."}, context_window=WINDOW) as served:
        reply = await ask(served, loop(30), truncation="auto", stream=stream)
        [prompt] = prompts(served)
        counted = await ask(served, loop(30), f"{PATH}/input_tokens", truncation="auto")
        length = len(served.engine.log[0].prompt_token_ids)
    assert reply.status == 200
    assert "truncation: " in reply.headers["x-singletree-warning"]
    streamed = events(reply.body)[-1][1]["response"] if stream else reply.json
    assert (streamed["truncation"], streamed["status"]) == ("auto", "completed")
    assert streamed["usage"]["input_tokens"] == length == counted.json["input_tokens"]
    assert length <= WINDOW - 300, "the answer has room"
    assert "Rules." in prompt
    assert "The task." in prompt
    assert "result 29" in prompt
    assert "result 0 " not in prompt
    for n in range(30):
        assert (f'"n": {n}}}' in prompt) == (f"result {n} " in prompt), "a call and its result go together"


async def test_what_fits_is_left_whole() -> None:
    async with serving({"s": "Done."}, context_window=WINDOW) as served:
        await ask(served, loop(5))
        reply = await ask(served, loop(5), truncation="auto")
        one, other = prompts(served)
    assert one == other
    assert "x-singletree-warning" not in reply.headers


async def test_a_truncated_history_goes_on_from_itself() -> None:  # C1
    async with serving({"s": "Done."}, context_window=WINDOW) as served:
        for count in range(13, 40):
            assert (await ask(served, loop(count), truncation="auto")).status == 200
        written_prompts = prompts(served)
    ends = "<|im_start|>assistant\n"
    goes_on = [after.startswith(before.removesuffix(ends)) for before, after in pairwise(written_prompts)]
    assert goes_on.count(False) <= 5, "it breaks when a piece is cut, not with every turn"
    assert len(written_prompts[-1]) < WINDOW


async def test_a_task_that_does_not_fit_is_refused_all_the_same() -> None:  # C43
    async with serving({"s": "Done."}, context_window=WINDOW) as served:
        reply = await ask(served, "x" * WINDOW, truncation="auto")
        assert not served.engine.log
    assert reply.json["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("most", "called"), [(None, 4), (1, 1), (3, 3), (9, 4)])
async def test_so_many_calls_and_no_more(most: int | None, called: int, stream: bool) -> None:  # C38
    async with serving({"s": "\n".join([CALL] * 4)}) as served:
        reply = await ask(served, "[[script:s]]", max_tool_calls=most, stream=stream)
        played = served.engine.log[-1]
    streamed = events(reply.body)[-1][1]["response"] if stream else reply.json
    assert [item["type"] for item in streamed["output"]] == ["function_call"] * called
    assert (streamed["status"], streamed["max_tool_calls"]) == ("completed", most)
    assert (played.finish is None) == (most is not None and most <= 4), "the engine was left"
