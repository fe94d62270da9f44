"""``/inference/v1/generate``: token ids in and out, as trainers that render prompts themselves ask for them."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from protocols.grammar_generate import Grammar
from singletree.engines.engine import Chunk, GenerationJob
from singletree.events import WeightVersion
from singletree.server.settings.config import Config
from singletree.testing.scripts import Script

from .by_hand import EngineByHand
from .memory import events
from .serving import MODEL, TOKENIZER, Served, serving

PATH = "/inference/v1/generate"
END = TOKENIZER.added_tokens["<|im_end|>"]
RAW = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "f"}\n</tool_call>\u00e9'
PROMPT = TOKENIZER.encode("say: [[script:s]]")


def asked(
    prompt: list[int] | None = None, params: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """As ``renderers.client.generate`` writes it."""
    fixed = {"stop_token_ids": [END], "logprobs": 1, "skip_special_tokens": False}
    return {
        "model": MODEL,
        "token_ids": PROMPT if prompt is None else prompt,
        "sampling_params": {"temperature": 1.0, "max_tokens": 1000, **fixed, **(params or {})},
        **more,
    }


async def both(served: Served, **more: Any) -> tuple[dict[str, Any], Grammar]:
    """The whole body, and what is read of the stream."""
    whole = await served.client.post(PATH, asked(**more))
    streamed = await served.client.post(PATH, asked(**more, stream=True))
    assert (whole.status, streamed.status) == (200, 200), whole.body
    return whole.json, Grammar(streamed.body)


@pytest.mark.parametrize("chunk", [1, 3, 100])
async def test_the_tokens_are_those_of_the_engine(chunk: int) -> None:
    async with serving({"s": Script(RAW, chunk=chunk)}) as served:
        whole, streamed = await both(served, stream_options={"include_usage": True}, request_id="mine")
        record = served.engine.log[0]
        assert list(record.prompt_token_ids) == PROMPT
    [choice] = whole["choices"]
    assert choice["token_ids"] == [*TOKENIZER.encode(RAW), END] == list(record.token_ids)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert streamed.ids == {0: choice["token_ids"]}
    assert streamed.ended == {0: "stop"}
    assert whole["request_id"] == "mine"
    assert whole["output_mode"] == "tokens"
    assert "text" not in choice
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert streamed.usage is not None
    assert streamed.usage["total_tokens"] == whole["usage"]["total_tokens"]
    assert (whole["prompt_token_ids"], streamed.prompt) == (None, None)


class Likely(EngineByHand):
    """Tells the log-probability of each token and of another one; of the last none."""

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """See Engine."""
        yield Chunk([72], logprobs=[[(72, -0.5), (73, -1.5)]])
        yield Chunk([73, 74], "length", logprobs=[[(73, -math.inf), (1, -0.1)], []])


async def test_log_probabilities_in_both_forms() -> None:
    async with serving(engine=Likely()) as served:
        whole, streamed = await both(served)
    content = whole["choices"][0]["logprobs"]["content"]
    assert streamed.logprobs == {0: content}
    assert content[0] == {
        "token_id": 72, "token": "token_id:72", "logprob": -0.5, "rank": None, "bytes": None,
        "top_logprobs": [{"token_id": 72, "token": "token_id:72", "logprob": -0.5, "rank": 1}],
    }  # fmt: skip
    assert [each["token"] for each in content] == ["token_id:72", "token_id:73", "token_id:74"]
    assert [each["logprob"] for each in content[1:]] == [-9999.0, -9999.0]


async def test_text_and_prompt_on_request() -> None:
    async with serving({"s": "a<|im_start|>b"}) as served:
        whole, streamed = await both(served, output_mode="text", return_token_ids=True)
        plain, _ = await both(served, params={"logprobs": None})
    assert whole["choices"][0]["text"] == "a<|im_start|>b" == streamed.texts[0]
    assert whole["prompt_token_ids"] == PROMPT == streamed.prompt
    assert whole["choices"][0]["logprobs"]["content"][0]["token"] == "a"
    assert plain["choices"][0]["logprobs"] is None


async def test_several_choices_and_the_ways_to_end() -> None:
    async with serving({"s": RAW}) as served:
        several, streamed = await both(served, params={"n": 2})
        short, _ = await both(served, params={"max_tokens": 3})
        stopped, _ = await both(served, params={"stop": ["Hm"]})
    assert [choice["index"] for choice in several["choices"]] == [0, 1] == sorted(streamed.ids)
    assert (short["choices"][0]["finish_reason"], len(short["choices"][0]["token_ids"])) == ("length", 3)
    assert (stopped["choices"][0]["finish_reason"], stopped["choices"][0]["stop_reason"]) == ("stop", "Hm")


async def test_without_a_limit_the_window_is_one() -> None:
    async with serving({"s": RAW}) as served:
        sent = asked()
        del sent["sampling_params"], sent["model"]
        reply = await served.client.post(PATH, sent)
        assert reply.status == 200
        assert served.engine.log[0].sampling.max_tokens == 8192 - len(PROMPT)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"token_ids": []}, "token_ids", "length >= 1"),
    ({"token_ids": [-1]}, "token_ids.", ">= 0"),
    ({"token_ids": [10**9]}, "token_ids", "ids go from 0"),
    ({"token_ids": "text"}, "token_ids", "array"),
    ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs", "from 0 to 20"),
    ({"sampling_params": {"temperature": 9}}, "temperature", "from 0 to 2"),
    ({"content_parts": [{"type": "image_url"}]}, "content_parts", "images are not supported"),
    ({"features": {"mm_hashes": {}}}, "features", "images are not supported"),
    ({"output_mode": "pictures"}, "output_mode", "pictures"),
    ({"model": "nope"}, "model", "not served"),
    ({"priority": 2**70}, "priority", "<="),
]


@pytest.mark.parametrize(("fields", "param", "says"), WRONG, ids=[str(w[0])[:40] for w in WRONG])
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    async with serving({"s": RAW}) as served:
        reply = await served.client.post(PATH, asked() | fields)
    assert 400 <= reply.status < 500
    error = reply.json["error"]
    assert says in error["message"]
    assert (error["param"] or "").startswith(param)


async def test_a_prompt_that_is_too_long() -> None:
    async with serving(context_window=5) as served:
        reply = await served.client.post(PATH, asked())
    assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
    assert "token_ids" in reply.json["error"]["message"]


async def test_it_takes_a_key_and_reports_what_it_ignores() -> None:
    async with serving({"s": RAW}, config=Config(api_key=("k",))) as served:
        assert (await served.client.post(PATH, asked())).status == 401
        reply = await served.client.post(
            PATH, asked(kv_transfer_params={"remote": 1}, priority=3), {"authorization": "Bearer k"}
        )
    assert reply.status == 200
    assert "kv_transfer_params" in reply.headers["x-singletree-warning"]


async def test_the_weights_and_experts_that_the_engine_reports() -> None:
    engine = EngineByHand()
    spans, experts = [{"version": "7", "start": 0, "end": 2}], "TlVNUFk="
    for _ in range(2):
        engine.emit(
            Chunk([97]),
            Chunk([END], "stop", weight_versions=[WeightVersion("7", 0, 2)], routed_experts=experts),
        )
    async with serving(engine=engine) as served:
        whole = (await served.client.post(PATH, asked())).json["choices"][0]
        streamed = await served.client.post(PATH, asked(stream=True))
    assert (whole["weight_versions"], whole["routed_experts"]) == (spans, experts)
    *rest, last = [choice for _, data in events(streamed.body)[:-1] for choice in data["choices"]]
    assert (last["weight_versions"], last["routed_experts"]) == (spans, experts)
    assert all(choice["weight_versions"] is choice["routed_experts"] is None for choice in rest)


async def test_a_failure_in_the_stream_is_its_end() -> None:
    async with serving({"s": Script(RAW, fail_after=5)}) as served:
        broken = Grammar((await served.client.post(PATH, asked(stream=True))).body)
    assert broken.error is not None
    assert broken.ended == {}
