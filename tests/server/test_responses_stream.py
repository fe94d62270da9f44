"""Responses as they come: whatever tokens come together and wherever they end, the stream says what the body says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from conformance.test_sdks import steady
from protocols.grammar_responses import Grammar
from protocols.item_kinds import KINDS, PICTURE
from singletree.engines.engine import Chunk
from singletree.testing.scripts import Script

from .by_hand import EngineByHand
from .memory import events
from .serving import MODEL, TOKENIZER, Served, body, serving
from .test_generation import TOOLS, TURN
from .test_stored import storing

PATH = "/v1/responses"
TOKENS = TOKENIZER.encode(TURN)


def call(n: int) -> str:
    return f'<tool_call>\n{{"name": "ls", "arguments": {{"path": "{n}"}}}}\n</tool_call>'


async def answered(served: Served, output: Any, **more: Any) -> dict[str, Any]:
    """The response object, streamed and whole: they are the same."""
    asked = {"model": MODEL, "input": output, "tools": [TOOLS[PATH]], **more}
    whole = await served.client.post(PATH, asked)
    streamed = await served.client.post(PATH, asked | {"stream": True})
    assert (whole.status, streamed.status) == (200, 200), whole.body
    seen = Grammar(streamed.body, judged=False)
    assert steady(seen.response) == steady(whole.json)
    return seen.response


async def played(served: Served, engine: EngineByHand, chunks: Iterable[Chunk]) -> Any:
    """The response of a turn that comes in ``chunks``."""
    engine.emit(*chunks)
    asked = body(PATH, "x", stream=True, tools=[TOOLS[PATH]])
    return steady(Grammar((await served.client.post(PATH, asked)).body, judged=False).response)


async def test_any_tokens_together_give_the_same() -> None:  # C9 C32
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        one_by_one = await played(served, engine, [*(Chunk([t]) for t in TOKENS), Chunk((), "stop")])
        for size in (2, 3, 5, 7, 16, len(TOKENS)):
            pieces = [TOKENS[at : at + size] for at in range(0, len(TOKENS), size)]
            assert await played(served, engine, [*map(Chunk, pieces), Chunk((), "stop")]) == one_by_one
    assert [item["type"] for item in one_by_one["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]


async def test_cut_at_every_token_the_body_is_what_the_stream_ends_in() -> None:  # C15 C16
    for after in range(1, len(TOKENS), 3):
        async with serving({"s": Script(TURN, cut_after=after)}) as served:
            answer = await answered(served, "[[script:s]]")
        assert (answer["status"], answer["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        assert all(item["status"] == "completed" for item in answer["output"][:-1])


async def test_a_failure_at_any_token_closes_what_was_written() -> None:  # C39
    for after in range(1, len(TOKENS), 7):
        async with serving({"s": Script(TURN, fail_after=after)}) as served:
            asked = body(PATH, "[[script:s]]", stream=True, tools=[TOOLS[PATH]])
            seen = Grammar((await served.client.post(PATH, asked)).body, judged=False)
        assert seen.terminal == "response.failed"
        assert seen.response["error"]["code"] == "server_error"
        assert seen.dispatched == seen.items, "every item that was shown is closed"
        assert all(item["status"] == "completed" for item in seen.items[:-1])


async def test_calls_side_by_side_are_not_mixed() -> None:  # C13
    async with serving({"s": "\n".join(map(call, range(3)))}) as served:
        answer = (await answered(served, "[[script:s]]"))["output"]
    assert [item["arguments"] for item in answer] == [f'{{"path": "{n}"}}' for n in range(3)]
    assert len({item["id"] for item in answer} | {item["call_id"] for item in answer}) == 6


MARKED = [
    "if a < b and c <d: x <<= 1",
    "The tag `<tool_call>` begins a call.",
    'Write "</tool_call>" at its end.',
]


@pytest.mark.parametrize("text", MARKED)
async def test_marks_are_text_where_they_mark_nothing_and_never_leak(text: str) -> None:  # C17 C18
    """Each byte is a token here, so every mark comes in pieces."""
    async with serving({"s": text, "t": f"{text}\n{call(0)}"}) as served:
        [message] = (await answered(served, "[[script:s]]"))["output"]
        answer = (await answered(served, "[[script:t]]"))["output"]
    assert message["content"][0]["text"] == text
    if "<tool_call>" not in text:
        assert [item["type"] for item in answer] == ["message", "function_call"]
        assert answer[0]["content"][0]["text"].rstrip() == text


IMAGE = {"type": "input_image", "image_url": PICTURE}


async def test_what_a_model_cannot_see_leaves_a_word() -> None:  # C35
    called = {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"}
    written = [
        {"role": "user", "content": [{"type": "input_text", "text": "[[script:s]]"}, IMAGE]},
        called,
        {"type": "function_call_output", "call_id": "c", "output": [IMAGE]},
        {"type": "custom_tool_call_output", "call_id": "d", "output": [IMAGE]},
    ]
    async with serving({"s": "Done."}) as served:
        await answered(served, written)
        prompt = TOKENIZER.decode(served.engine.log[0].prompt_token_ids)
    assert prompt.count("cannot see images") == 3
    assert "iVBORw0KGgo" not in prompt


ITEMS: dict[str, Any] = {
    "u": {"role": "user", "content": "Hi."},
    "e": {"role": "user", "content": []},
    "s": {"role": "system", "content": "Rule."},
    "a": {"role": "assistant", "content": "Well."},
    "t": {
        "type": "reasoning",
        "id": "rs",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    },
    "c": {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"},
    "r": {"type": "function_call_output", "call_id": "c", "output": "o"},
}
ORDERS = ["u", "e", "uu", "su", "us", "a", "ua", "au", "uta", "ut", "tu", "uc", "ucr", "cr", "r", "ur", "urc"]
ORDERS += ["ucu", "ucru", "utcr", "uccrr", "ucsr", "ucrsu", "uaau", "ss", "ts", "c"]


@pytest.mark.parametrize("order", ORDERS)
async def test_items_in_any_order_are_answered(order: str) -> None:  # C36
    async with serving() as served:
        asked = {"model": MODEL, "input": [ITEMS[kind] for kind in order], "tools": [TOOLS[PATH]]}
        reply = await served.client.post(PATH, asked)
    assert reply.status in (200, 400), reply.body
    if reply.status == 400:
        assert order in ("e",), reply.body


async def test_every_kind_of_item_is_stored_and_listed() -> None:  # C33
    sent = [item for kind, item in KINDS.items() if not kind.startswith("item_reference")]
    async with storing("Done.") as served:
        asked = {"model": MODEL, "input": [*sent, {"role": "user", "content": "[[script:s0]]"}]}
        reply = await served.client.post(PATH, asked)
        assert reply.status == 200, reply.body
        path = f"{PATH}/{reply.json['id']}/input_items?order=asc&limit=100"
        listed = (await served.client.get(path)).json
    assert [item["type"] for item in listed["data"][:-1]] == [item.get("type", "message") for item in sent]
    assert len({item["id"] for item in listed["data"]}) >= len(sent) - 3  # ids of its own that some share


async def test_tools_that_run_elsewhere_are_named_in_a_header() -> None:  # C26
    async with serving() as served:
        asked = body(PATH, "[[echo:x]]", tools=[{"type": "web_search"}, {"type": "mcp", "server_label": "s"}])
        reply = await served.client.post(PATH, asked)
    assert reply.status == 200
    reported = reply.headers["x-singletree-warning"]
    assert "tools.0: type 'web_search'" in reported
    assert "tools.1: type 'mcp'" in reported


@pytest.mark.parametrize("chunk", [1, 3, 100])
async def test_log_probabilities_of_the_text(chunk: int) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    async with serving({"s": Script("<think>\nHm.\n</think>\n\nHi é", chunk=chunk)}) as served:
        answer = await answered(served, "[[script:s]]", **asked)
    [message] = [item for item in answer["output"] if item["type"] == "message"]
    reported = message["content"][0]["logprobs"]
    assert bytes(byte for token in reported for byte in token["bytes"]).decode().strip() == "Hi é"
    assert answer["top_logprobs"] == 1


async def test_the_stream_of_a_background_response_can_be_read_again_from_anywhere() -> None:
    async with storing("Hello.") as served:
        asked = body(PATH, "[[script:s0]]", stream=True, background=True)
        first = events((await served.client.post(PATH, asked)).body)
        path = f"{PATH}/{first[0][1]['response']['id']}?stream=true&starting_after="
        for at in range(len(first)):
            assert events((await served.client.get(f"{path}{at}")).body) == first[at + 1 :]
