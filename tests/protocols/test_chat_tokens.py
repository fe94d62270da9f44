"""Chat Completions out: log-probabilities and ids of tokens, for a request that asks for them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from singletree.conversation import Sampling
from singletree.events import TokenLogprobs

from . import shapes
from .test_chat_encode import TOKENS, accumulated, body, parsed, request, stream


def with_tokens(**options: Any) -> tuple[dict[str, Any], bytes]:
    """(the body, the stream) of "Hi" with its tokens told."""
    of = replace(request(**options), sampling=Sampling(logprobs=1))
    events = (TokenLogprobs(TOKENS[:2]), *shapes.text("Hi"), TokenLogprobs(TOKENS[2:]))
    shape = shapes.Shape("hi", events, shapes.finished())
    data = stream(events, of=of)
    assert accumulated(data)["choices"][0]["logprobs"] == parsed(body(shape, of))["choices"][0]["logprobs"]
    return body(shape, of), data


def test_logprobs_add_up() -> None:  # C9
    [choice] = with_tokens()[0]["choices"]
    hi, half, end = choice["logprobs"]["content"]
    assert hi["top_logprobs"] == [{"token": "Yo", "logprob": -9999.0, "bytes": [89, 111]}]
    assert half == {"token": "\ufffd", "logprob": None, "bytes": [240], "top_logprobs": []}, "not told"
    assert end["token"] == "<|end|>", "every token that the model wrote"
    assert "token_ids" not in choice


def test_token_ids_bring_every_token() -> None:
    whole, data = with_tokens(return_token_ids=True, prompt_token_ids=[7, 8])
    [choice] = whole["choices"]
    assert (whole["prompt_token_ids"], choice["token_ids"]) == ([7, 8], [1, 3, 9])
    assert len(choice["logprobs"]["content"]) == 3
    first, *chunks = [
        json.loads(line[6:]) for line in data.decode().split("\n\n") if line.startswith("data: {")
    ]
    assert first["prompt_token_ids"] == [7, 8]
    ids = [id for chunk in chunks if chunk["choices"] for id in chunk["choices"][0].get("token_ids", ())]
    assert ids == [1, 3, 9]
    assert sum("prompt_token_ids" in chunk for chunk in chunks) == 0


def test_tokens_spelled_by_id() -> None:
    content = with_tokens(return_tokens_as_token_ids=True)[0]["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == ["token_id:1", "token_id:3", "token_id:9"]
    assert content[0]["top_logprobs"][0]["token"] == "token_id:2"
