"""Log-probabilities and token ids from the engine to the client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conformance.sdk import openai_sdk
from singletree.engines.engine import Chunk, EngineInfo
from singletree.testing.scripts import Script

from .by_hand import EngineByHand
from .memory import events
from .serving import MODEL, TOKENIZER, body, serving

CHAT = "/v1/chat/completions"
TURN = "<think>\nHm.\n</think>\n\nHi é"
END = TOKENIZER.added_tokens["<|im_end|>"]
FUNCTION: dict[str, Any] = {"name": "read", "parameters": {"type": "object"}}
READ = {"type": "function", "function": FUNCTION}
chunked = pytest.mark.parametrize("chunk", [1, 3, 100])


def joined(stream: bytes, name: str) -> list[Any]:
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
    assert joined(streamed.body, "logprobs") == content
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
    assert joined(streamed.body, "token_ids") == choice["token_ids"]
    assert joined(streamed.body, "logprobs") == choice["logprobs"]["content"]
    assert events(streamed.body)[0][1]["prompt_token_ids"] == whole["prompt_token_ids"]


async def test_alternatives_are_the_likeliest_whatever_the_engine_reports() -> None:
    engine = EngineByHand()
    a, b, c, d, e = TOKENIZER.encode("ABCDE")
    engine.emit(
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


async def test_nothing_is_reported_unasked() -> None:
    async with serving({"s": TURN}) as served:
        reply = await served.client.post(CHAT, body(CHAT, "[[script:s]]", stream=True))
        whole = (await served.client.post(CHAT, body(CHAT, "[[script:s]]"))).json
    assert whole["choices"][0]["logprobs"] is None
    assert b"logprobs" not in reply.body
    assert b"token_ids" not in reply.body


async def test_thoughts_are_not_cut_where_tokens_are_reported() -> None:
    asked = body(CHAT, "[[script:s]]", return_token_ids=True, stream=True)
    headers = {"x-singletree-reasoning-dispatch": "1"}
    async with serving({"s": TURN}) as served:
        reply = await served.client.post(CHAT, asked, headers)
    thoughts = [
        data["reasoning_content"] for name, data in events(reply.body) if name == "reasoning_dispatch"
    ]
    assert thoughts == ["Hm."] or [thought.strip() for thought in thoughts] == ["Hm."]


async def test_a_stop_string_is_reported_and_not_shown() -> None:
    asked = body(CHAT, "[[echo:one two three]]", stop=["two"], return_token_ids=True)
    async with serving() as served:
        choice = (await served.client.post(CHAT, asked)).json["choices"][0]
    assert choice["message"]["content"] == "one "
    assert TOKENIZER.decode(choice["token_ids"]) == "one two"


@chunked
async def test_responses_has_those_of_the_visible_text_only(chunk: int) -> None:
    turn = (
        "<think>\nHm.\n</think>\n\nHi é\n\n<tool_call>\n"
        + '{"name": "read", "arguments": {}}\n</tool_call>\nBye \n'
    )
    asked = body("/v1/responses", "[[script:s]]", tools=[{"type": "function", **FUNCTION}])
    asked |= {"include": ["message.output_text.logprobs"]}
    async with serving({"s": Script(turn, chunk=chunk)}) as served:
        whole = (await served.client.post("/v1/responses", asked)).json
        streamed = events((await served.client.post("/v1/responses", asked | {"stream": True})).body)
    for output in (whole["output"], streamed[-1][1]["response"]["output"]):
        texts = [item["content"][0] for item in output if item["type"] == "message"]
        assert [text["text"] for text in texts] == ["Hi é\n", "Bye \n"]
        for text in texts:
            assert (
                bytes(byte for token in text["logprobs"] for byte in token["bytes"]).decode() == text["text"]
            )


async def test_the_sdk_reads_them() -> None:
    messages: Any = [{"role": "user", "content": "[[echo:Hi]]"}]
    async with serving() as served, openai_sdk(served.client) as sdk:
        asked: Any = {"model": MODEL, "messages": messages, "logprobs": True, "top_logprobs": 1}
        whole = await sdk.chat.completions.create(**asked)
        async with sdk.chat.completions.stream(**asked) as stream:
            streamed = await stream.get_final_completion()
    for completion in (whole, streamed):
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        assert [token.token for token in logprobs.content or ()] == ["H", "i", "<|im_end|>"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("chunk", [1, 3])
async def test_details_are_beside_the_text_that_they_describe(path: str, n: int, chunk: int) -> None:
    """Each chunk of text has the tokens of this text and the counts; none has them without text but the last."""
    prompt = {"prompt": "[[script:s]]"} if path == "/v1/completions" else {}
    logprobs = {"logprobs": True} if path == CHAT else {"logprobs": 1}
    counts = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    asked = {**body(path, "[[script:s]]"), **prompt, **logprobs, **counts}
    asked |= {"n": n, "stream": True, "return_token_ids": True, "max_tokens": 100}
    async with serving({"s": Script("Hello there.", chunk=chunk)}) as served:
        reply = await served.client.post(path, asked)
    seen: dict[int, list[tuple[str, str, int]]] = {}
    for _, data in events(reply.body)[:-1]:
        for choice in data["choices"]:
            text = choice["delta"].get("content") if path == CHAT else choice["text"]
            if not text and not choice.get("token_ids"):
                continue
            reported = choice["logprobs"]
            names = [token["token"] for token in reported["content"]] if path == CHAT else reported["tokens"]
            assert "".join(names) == TOKENIZER.decode(choice["token_ids"])
            counted = data["usage"]["completion_tokens"]
            seen.setdefault(choice["index"], []).append((text or "", "".join(names), counted))
            is_last = choice["finish_reason"] is not None
            assert "".join(names) == ("<|im_end|>" if is_last else text)
    assert len(seen) == n
    for chunks in seen.values():
        assert "".join(text for text, _, _ in chunks) == "Hello there."
        counts_seen = [count for _, _, count in chunks]
        assert counts_seen == sorted(counts_seen)
        assert counts_seen[-1] == len("Hello there.") + 1


async def test_details_of_markers_that_are_no_text_are_reported_alone_and_in_order() -> None:
    asked = body(CHAT, "[[script:s]]", logprobs=True, stream=True, return_token_ids=True)
    async with serving({"s": TURN}) as served:
        reply = await served.client.post(CHAT, asked)
    choices = [choice for _, data in events(reply.body)[:-1] for choice in data["choices"]]
    texts = {
        choice["delta"].get("content") or choice["delta"].get("reasoning_content") or ""
        for choice in choices
        if not choice.get("token_ids")
    }
    assert texts == {""}, "each text has its tokens"
    assert joined(reply.body, "token_ids") == [*TOKENIZER.encode(TURN), END]


class ScoringEngine(EngineByHand):
    """Says that it reports log-probabilities of the prompt."""

    def info(self) -> EngineInfo:
        return replace(super().info(), returns_prompt_logprobs=True)


async def test_an_echo_has_its_log_probabilities_beside_it_or_comes_without_them() -> None:
    asked = {"model": MODEL, "prompt": "ab", "echo": True, "logprobs": 1, "stream": True, "max_tokens": 1}
    a, b = TOKENIZER.encode("ab")
    for rows in ([(), ((b, -0.5),)], None):
        engine = ScoringEngine()
        engine.emit(Chunk([a], prompt_logprobs=rows), Chunk((), "length"))
        async with serving(engine=engine) as served:
            reply = await served.client.post("/v1/completions", asked)
        texts = [choice["text"] for _, data in events(reply.body)[:-1] for choice in data["choices"]]
        assert "".join(texts) == "aba"
        if rows:
            first = events(reply.body)[0][1]["choices"][0]
            assert (first["text"], first["logprobs"]["tokens"]) == ("ab", ["a", "b"])
