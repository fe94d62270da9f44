"""``/v1/completions``: raw prompts in, raw text out, alone and several at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from conformance.sdk import openai_sdk
from protocols.grammar_completions import Grammar
from singletree.conversation import Request
from singletree.engines.engine import Chunk, GenerationJob
from singletree.errors import EngineFailed
from singletree.prompts.prompt_writer import Prompt
from singletree.raw_tokens import routes
from singletree.server.models.model import Model
from singletree.server.turn.generation import Generation
from singletree.testing.scripts import Script

from .by_hand import EngineByHand
from .serving import MODEL, TOKENIZER, Served, serving

PATH = "/v1/completions"
END = TOKENIZER.added_tokens["<|im_end|>"]
RAW = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "f"}\n</tool_call>é'


def asked(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 1000, **more}


async def both(served: Served, prompt: Any, **more: Any) -> tuple[dict[str, Any], Grammar]:
    """The whole body, and what is read of the stream."""
    whole = await served.client.post(PATH, asked(prompt, **more))
    streamed = await served.client.post(PATH, asked(prompt, stream=True, **more))
    assert (whole.status, streamed.status) == (200, 200), whole.body
    return whole.json, Grammar(streamed.body)


@pytest.mark.parametrize("chunk", [1, 3, 100])
async def test_every_word_is_text(chunk: int) -> None:  # C9
    async with serving({"s": Script(RAW, chunk=chunk)}) as served:
        whole, streamed = await both(served, "say: [[script:s]]", stream_options={"include_usage": True})
        assert served.engine.log[0].prompt_token_ids == tuple(TOKENIZER.encode("say: [[script:s]]"))
    [choice] = whole["choices"]
    assert choice == {"index": 0, "text": RAW, "logprobs": None, "finish_reason": "stop"}
    assert (streamed.texts, streamed.ended) == ({0: RAW}, {0: "stop"})
    assert streamed.usage is not None
    assert streamed.usage["total_tokens"] == whole["usage"]["total_tokens"]
    assert whole["object"] == "text_completion"


async def test_special_tokens_are_reported_on_request() -> None:
    async with serving({"s": "a<|im_start|>b"}) as served:
        kept, streamed = await both(served, "[[script:s]]", skip_special_tokens=False)
        whole, _ = await both(served, "[[script:s]]")
    # The end of the turn is no text even then: it ended the answer.
    assert kept["choices"][0]["text"] == "a<|im_start|>b" == streamed.texts[0]
    assert whole["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("[[echo:a]]", ["a"]),
        (["[[echo:a]]", "[[echo:b]]"], ["a", "b"]),
        (TOKENIZER.encode("[[echo:a]]"), ["a"]),
        ([TOKENIZER.encode("[[echo:a]]"), TOKENIZER.encode("[[echo:b]]")], ["a", "b"]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
async def test_every_form_of_prompt(prompt: Any, texts: list[str]) -> None:
    async with serving() as served:
        whole, streamed = await both(served, prompt)
        twice, _ = await both(served, prompt, n=2)
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(texts)))
    assert streamed.texts == dict(enumerate(texts))
    assert [choice["text"] for choice in twice["choices"]] == [text for text in texts for _ in range(2)]
    assert twice["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"], "each prompt counts once"


async def test_echo_stop_and_length() -> None:
    async with serving() as served:
        whole, streamed = await both(served, "[[echo:one two three]]", echo=True, stop=["two"])
        short, _ = await both(served, "[[echo:one two three]]", max_tokens=3)
    assert whole["choices"][0]["text"] == "[[echo:one two three]]one " == streamed.texts[0]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert (short["choices"][0]["text"], short["choices"][0]["finish_reason"]) == ("one", "length")


async def test_a_prompt_of_ids_is_decoded_for_an_echo_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To decode seventeen thousand ids takes longer than all else that is done with them before the engine has them."""
    ids, texts, begin = TOKENIZER.encode("[[echo:one]]"), [], routes._begin

    def noting(model: Model, request: Request, prompt: Prompt) -> Generation:
        texts.append(prompt.text)
        return begin(model, request, prompt)

    monkeypatch.setattr(routes, "_begin", noting)
    async with serving() as served:
        plain, _ = await both(served, ids)
        echoed, streamed = await both(served, ids, echo=True)
    assert texts == ["", "", "[[echo:one]]", "[[echo:one]]"]
    assert plain["choices"][0]["text"] == "one"
    assert echoed["choices"][0]["text"] == "[[echo:one]]one" == streamed.texts[0]


async def test_the_default_is_sixteen_tokens() -> None:
    async with serving() as served:
        fields = {"model": MODEL, "prompt": f"[[echo:{'x' * 40}]]"}
        assert (await served.client.post(PATH, fields)).json["choices"][0]["text"] == "x" * 16


async def test_token_ids_and_log_probabilities() -> None:
    async with serving({"s": "Hé"}) as served:
        whole, streamed = await both(served, "[[script:s]]", logprobs=1, return_token_ids=True)
    [choice] = whole["choices"]
    assert choice["token_ids"] == [*TOKENIZER.encode("Hé"), END] == streamed.ids[0]
    assert choice["prompt_token_ids"] == TOKENIZER.encode("[[script:s]]")
    reported = choice["logprobs"]
    assert reported["tokens"] == ["H", "\ufffd", "\ufffd", "<|im_end|>"]
    assert reported["text_offset"] == [0, 1, 2, 3]
    assert reported["token_logprobs"] == [0.0] * 4
    assert reported["top_logprobs"][0] == {"H": 0.0}
    pieces = streamed.logprobs[0]
    assert {key: [one for piece in pieces for one in piece[key]] for key in reported} == reported


async def test_echo_has_the_log_probabilities_of_the_prompt() -> None:
    prompt = "ab[[echo:c]]"
    async with serving() as served:
        whole, streamed = await both(served, prompt, logprobs=0, echo=True)
        only, alone = await both(served, prompt, logprobs=0, echo=True, max_tokens=0)
        apart = (await served.client.post(PATH, asked(prompt, prompt_logprobs=1))).json["choices"][0]
    reported = whole["choices"][0]["logprobs"]
    assert reported["tokens"] == [*prompt, "c", "<|im_end|>"]
    assert reported["token_logprobs"] == [None, *[0.0] * (len(prompt) + 1)], "the first follows nothing"
    assert reported["text_offset"] == list(range(len(prompt) + 2))
    pieces = streamed.logprobs[0]
    assert {key: [one for piece in pieces for one in piece[key]] for key in reported} == reported
    assert only["choices"][0]["text"] == prompt == alone.texts[0]
    assert only["usage"]["completion_tokens"] == 0, "the engine's one token is not shown"
    assert only["usage"]["total_tokens"] == only["usage"]["prompt_tokens"] == len(prompt)
    assert only["choices"][0]["logprobs"]["tokens"] == list(prompt), "to score a text"
    assert apart["text"] == "c"
    first, second, *_ = apart["prompt_logprobs"]
    assert first is None
    assert second == {str(TOKENIZER.encode("b")[0]): {"logprob": 0.0, "rank": 1, "decoded_token": "b"}}


async def test_an_engine_without_prompt_logprobs_is_no_500() -> None:
    async with serving(engine=EngineByHand()) as served:
        for fields in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
            reply = await served.client.post(PATH, asked("x", **fields))
            assert (reply.status, reply.json["error"]["param"]) == (400, "prompt_logprobs")
            assert "does not report log-probabilities of the prompt" in reply.json["error"]["message"]


class Ranked(EngineByHand):
    """Says its seed, the higher the likelier."""

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """See ``Engine``."""
        sampling = job.sampling
        assert sampling.logprobs == 0, "asked of the engine, though not of us"
        assert sampling.seed is not None
        [token] = TOKENIZER.encode(str(sampling.seed))
        await asyncio.sleep(0)
        yield Chunk([token], logprobs=[[(token, sampling.seed - 10.0)]])
        yield Chunk((), "stop")


async def test_the_best_of_several() -> None:
    async with serving(engine=Ranked()) as served:
        reply = (await served.client.post(PATH, asked(["x", "y"], seed=4, best_of=4, n=2))).json
    assert [choice["text"] for choice in reply["choices"]] == ["7", "6", "7", "6"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert reply["choices"][0]["logprobs"] is None
    assert reply["usage"]["completion_tokens"] == 8, "all that were drawn"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"prompt": ["a", ""]}, "prompt.1", "prompt.1 is empty"),
        ({"prompt": ["a", 1]}, "prompt", "prompt is mixed"),
        ({"prompt": [[1], []]}, "prompt.1", "prompt.1 is empty"),
        ({"prompt": [1, -1]}, "prompt", "prompt 0 contains the token id -1"),
        ({"prompt": [10**9]}, "prompt", "this model's ids go from 0 to"),
        ({"prompt": 5}, "prompt", "Expected"),
        ({"suffix": "x"}, "suffix", "the model's own markers"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": 3, "best_of": 2}, "best_of", "send best_of of at least n"),
        ({"best_of": 2, "stream": True}, "best_of", "send stream=false"),
        ({"best_of": 200}, "prompt", "at most 128"),
        ({"prompt": ["x"] * 65, "n": 2}, "prompt", "make 130 choices"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "send stream=false"),
        ({"temperature": 9}, "temperature", "from 0 to 2"),
    ],
)
async def test_refusals(fields: dict[str, Any], param: str, words: str) -> None:  # C44
    async with serving() as served:
        reply = await served.client.post(PATH, asked("x") | fields)
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (400, param)
    assert words in error["message"]


async def test_half_a_surrogate_pair_is_no_500() -> None:  # C36
    async with serving() as served:
        reply = await served.client.post(PATH, b'{"model":"alias","prompt":"\\ud800 [[echo:x]]"}')
    assert reply.status in (200, 400)


async def test_too_long_a_prompt() -> None:  # C43
    async with serving(context_window=64) as served:
        reply = await served.client.post(PATH, asked("x" * 64))
    assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
    assert "your prompt resulted in 64 tokens" in reply.json["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_all_of_them(stream: bool) -> None:  # C40
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        written = asked(["x", "y"], stream=stream)
        async with served.client.open("POST", PATH, written) as (exchange, task):
            await engine.waiting.wait()
            engine.emit(Chunk([65]), Chunk([66]))
            await engine.waiting.wait()
            exchange.leave()
            await asyncio.wait_for(task, 2)
        assert served.service.tracing.running == 0
    assert engine.freed == 2


async def test_an_engine_that_dies_ends_the_stream_with_an_error() -> None:  # C39
    engine = EngineByHand()
    engine.emit(Chunk(TOKENIZER.encode("ab")), EngineFailed("the engine died"))
    async with serving(engine=engine) as served:
        reply = await served.client.post(PATH, asked("x", stream=True))
    seen = Grammar(reply.body)
    assert seen.texts == {0: "ab"}
    assert seen.error is not None
    assert "the engine died" in seen.error["message"]


async def test_a_format_holds_raw_text_too() -> None:  # C42
    async with serving() as served:
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
        await served.client.post(PATH, asked("[[echo:{}]]", response_format=schema))
        assert served.engine.log[-1].constraint is not None


async def test_the_sdk_reads_them() -> None:
    async with serving() as served, openai_sdk(served.client) as sdk:
        whole = await sdk.completions.create(model=MODEL, prompt=["[[echo:ab]]", "[[echo:c]]"], logprobs=1)
        stream = await sdk.completions.create(model=MODEL, prompt="[[echo:ab]]", stream=True, echo=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
    assert [choice.text for choice in whole.choices] == ["ab", "c"]
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "<|im_end|>"]
    assert streamed == "[[echo:ab]]ab"
