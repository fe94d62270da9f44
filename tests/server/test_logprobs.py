"""Log-probabilities and token ids from the engine to the client."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.sdk import openai_sdk
from singletree.engines.engine import Chunk
from singletree.engines.scripted.scripts import Script

from .by_hand import EngineByHand
from .memory import events
from .serving import MODEL, TOKENIZER, body, serving

CHAT = "/v1/chat/completions"
TURN = "<think>\nHm.\n</think>\n\nHi é"
END = TOKENIZER.added_tokens["<|im_end|>"]
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
chunked = pytest.mark.parametrize("chunk", [1, 3, 100])


def told(stream: bytes, name: str) -> list[Any]:
    """What the chunks of a stream have under ``name``, joined."""
    choices = [choice for _, data in events(stream)[:-1] for choice in data["choices"]]
    if name == "token_ids":
        return [id for choice in choices for id in choice.get(name, ())]
    return [token for choice in choices if choice.get("logprobs") for token in choice["logprobs"]["content"]]


@chunked
async def test_of_every_token(chunk: int) -> None:  # C9
    asked = body(CHAT, "[[script:s]]", logprobs=True)
    async with serving({"s": Script(TURN, chunk=chunk)}) as served:
        whole = (await served.client.post(CHAT, asked)).json["choices"][0]
        streamed = await served.client.post(CHAT, asked | {"stream": True})
    content = whole["logprobs"]["content"]
    assert whole["message"]["content"] == "Hi é"
    utf8 = bytes(byte for token in content for byte in token["bytes"])
    assert utf8.decode() == f"{TURN}<|im_end|>", "of the reasoning and the markers too, half characters too"
    assert [token["token"] for token in content[-3:]] == ["\ufffd", "\ufffd", "<|im_end|>"]
    assert all(token["logprob"] == 0.0 for token in content)
    assert told(streamed.body, "logprobs") == content
    assert "token_ids" not in whole


@chunked
async def test_token_ids_lose_nothing(chunk: int) -> None:
    turn = TURN + '\n<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
    asked = body(CHAT, "[[script:s]]", logprobs=True, return_token_ids=True, tools=[READ])
    async with serving({"s": Script(turn, chunk=chunk)}) as served:
        whole = (await served.client.post(CHAT, asked)).json
        streamed = await served.client.post(CHAT, asked | {"stream": True})
        played = served.engine.log[-1]
    [choice] = whole["choices"]
    assert choice["token_ids"] == [*TOKENIZER.encode(turn), END] == list(played.token_ids)
    assert whole["prompt_token_ids"] == list(played.prompt)
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert told(streamed.body, "token_ids") == choice["token_ids"]
    assert told(streamed.body, "logprobs") == choice["logprobs"]["content"]
    assert events(streamed.body)[0][1]["prompt_token_ids"] == whole["prompt_token_ids"]


async def test_alternatives_are_the_likeliest_whatever_the_engine_tells() -> None:
    engine = EngineByHand()
    a, b, c, d, e = TOKENIZER.encode("ABCDE")
    engine.say(
        Chunk([a], logprobs=[[(a, -3.0), (b, -0.5), (c, -1.0)]]),
        Chunk([d], logprobs=[()]),
        Chunk([e]),
        Chunk((), "stop"),
    )
    async with serving(engine=engine) as served:
        reply = await served.client.post(CHAT, body(CHAT, "x", logprobs=True, top_logprobs=2))
    known, empty, missing = reply.json["choices"][0]["logprobs"]["content"]
    assert (known["token"], known["logprob"]) == ("A", -3.0)
    assert [other["token"] for other in known["top_logprobs"]] == ["B", "C"]
    assert empty == {"token": "D", "logprob": None, "bytes": [68], "top_logprobs": []}
    assert missing["logprob"] is None
    assert engine.sampling.logprobs == 2


async def test_nothing_is_told_unasked() -> None:
    async with serving({"s": TURN}) as served:
        reply = await served.client.post(CHAT, body(CHAT, "[[script:s]]", stream=True))
        whole = (await served.client.post(CHAT, body(CHAT, "[[script:s]]"))).json
    assert whole["choices"][0]["logprobs"] is None
    assert b"logprobs" not in reply.body
    assert b"token_ids" not in reply.body


async def test_thoughts_are_not_cut_where_tokens_are_told() -> None:
    asked = body(CHAT, "[[script:s]]", return_token_ids=True, stream=True)
    headers = {"x-singletree-reasoning-dispatch": "1"}
    async with serving({"s": TURN}) as served:
        reply = await served.client.post(CHAT, asked, headers)
    thoughts = [
        data["reasoning_content"] for name, data in events(reply.body) if name == "reasoning_dispatch"
    ]
    assert thoughts == ["Hm."] or [thought.strip() for thought in thoughts] == ["Hm."]


async def test_a_stop_string_is_told_and_not_shown() -> None:
    asked = body(CHAT, "[[echo:one two three]]", stop=["two"], return_token_ids=True)
    async with serving() as served:
        choice = (await served.client.post(CHAT, asked)).json["choices"][0]
    assert choice["message"]["content"] == "one "
    assert TOKENIZER.decode(choice["token_ids"]) == "one two"


async def test_the_sdk_reads_them() -> None:
    said: Any = [{"role": "user", "content": "[[echo:Hi]]"}]
    async with serving() as served, openai_sdk(served.client) as sdk:
        asked: Any = {"model": MODEL, "messages": said, "logprobs": True, "top_logprobs": 1}
        whole = await sdk.chat.completions.create(**asked)
        async with sdk.chat.completions.stream(**asked) as stream:
            streamed = await stream.get_final_completion()
    for completion in (whole, streamed):
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        assert [token.token for token in logprobs.content or ()] == ["H", "i", "<|im_end|>"]
