"""A real model behind the whole server: several choices, log-probabilities, token ids and raw prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engines.small_model import small_model
from engines.tiny_shapes import tiny_model
from protocols import grammar_chat
from server.memory import events
from server.serving import MODEL, Served, serving
from singletree import families
from singletree.llamacpp import prefix_cache
from singletree.llamacpp.engine import LlamaCppEngine
from singletree.prompts.template.chat_template import load_chat_template
from singletree.prompts.tokenizer.tokenizer import Tokenizer, load_tokenizer
from singletree.server.settings.config import Config

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(small_model())


@asynccontextmanager
async def real(tokenizer: Tokenizer) -> AsyncIterator[Served]:
    template = load_chat_template(tokenizer)
    model: dict[str, Any] = {"tokenizer": tokenizer, "template": template, "family": families.get("plain")}
    async with serving(
        engine=LlamaCppEngine(small_model(), slots=2, context_window=512, threads=1),
        context_window=512,
        **model,
    ) as served:
        yield served


def asked(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": QUESTION, **GREEDY, **more}


async def test_every_token_with_its_log_probability(tokenizer: Tokenizer) -> None:
    wanted = asked(logprobs=True, top_logprobs=3, return_token_ids=True)
    async with real(tokenizer) as served:
        whole = (await served.client.post(CHAT, wanted)).json["choices"][0]
        streamed = events((await served.client.post(CHAT, wanted | {"stream": True})).body)[:-1]
    content = whole["logprobs"]["content"]
    end = "<|im_end|>" if whole["finish_reason"] == "stop" else ""
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == (
        whole["message"]["content"] + end
    )
    assert tokenizer.decode(whole["token_ids"]) == whole["message"]["content"] + end
    # Of a character of several tokens llama.cpp tells the last one's alone.
    known = [token for token in content if token["logprob"] is not None]
    assert len(known) > len(content) / 2
    for token in known:
        assert len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["token"] == token["token"], "drawn greedily"
        assert token["logprob"] == pytest.approx(token["top_logprobs"][0]["logprob"])
        numbers = [other["logprob"] for other in token["top_logprobs"]]
        assert 0 >= numbers[0] >= numbers[1] >= numbers[2]
    deltas = [data["choices"][0].get("logprobs") for _, data in streamed]
    reported = [token for logprobs in deltas if logprobs for token in logprobs["content"]]
    assert [token["token"] for token in reported] == [token["token"] for token in content]


async def test_choices_differ_by_their_seeds(tokenizer: Tokenizer) -> None:
    wanted = asked(n=3, seed=3, temperature=1.5, max_tokens=5)
    async with real(tokenizer) as served:
        first = (await served.client.post(CHAT, wanted)).json
        again = (await served.client.post(CHAT, wanted | {"stream": True})).body
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert len(set(texts)) > 1
    assert first["usage"]["completion_tokens"] > 3
    assert len(grammar_chat.check(again)) == 3, "more choices than slots wait for one"


async def test_raw_prompts_go_on_from_where_they_are(tokenizer: Tokenizer) -> None:
    prompt = "The capital of France is"
    wanted = {"model": MODEL, "prompt": [prompt, prompt], "temperature": 0, "max_tokens": 3, "logprobs": 1}
    ranked = wanted | {"prompt": prompt, "best_of": 3, "temperature": 1}
    async with real(tokenizer) as served:
        by_text = (await served.client.post(RAW, wanted)).json
        by_ids = (await served.client.post(RAW, wanted | {"prompt": tokenizer.encode(prompt)})).json
        best = (await served.client.post(RAW, ranked)).json
        for path, fields in ((CHAT, asked(prompt_logprobs=1)), (RAW, wanted | {"echo": True})):
            reply = await served.client.post(path, fields)
            assert (reply.status, reply.json["error"]["param"]) == (400, "prompt_logprobs"), "it tells none"
    texts = [choice["text"] for choice in by_text["choices"]]
    assert texts == [texts[0]] * 2 == [by_ids["choices"][0]["text"]] * 2
    assert texts[0].startswith(" Paris")
    logprobs = by_ids["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == texts[0]
    assert len(best["choices"]) == 1


@pytest.mark.parametrize("foresight", [True, False])
async def test_a_main_agent_is_cached_when_its_sub_agents_have_ended(
    foresight: bool, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory for two of the conversations, on one slot."""
    monkeypatch.setattr(prefix_cache, "KEEP_SECONDS", 0.0)
    model: dict[str, Any] = {"tokenizer": tokenizer, "template": load_chat_template(tokenizer)}
    path, family = tiny_model("worded"), families.get("plain")
    engine = LlamaCppEngine(path, slots=1, context_window=4096, threads=1, cache_ram_mib=1)
    config = Config(foresight=foresight)
    async with serving(engine=engine, context_window=4096, family=family, config=config, **model) as served:
        messages: list[dict[str, Any]] = []

        async def ask(text: str, agent: str = "", **more: Any) -> int:
            turns = [] if agent else messages
            turns.append({"role": "user", "content": text})
            headers = {
                "x-claude-code-session-id": "s",
                **({"x-claude-code-agent-id": agent} if agent else {}),
            }
            reply = await served.client.post(CHAT, asked(messages=turns, max_tokens=4, **more), headers)
            turns.append(reply.json["choices"][0]["message"])
            return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

        await ask("main " * 1500)
        assert await ask("Go on.") > 1500
        for agent in ("red", "green", "blue"):
            cached = await ask(f"{agent} " * 1500, agent, logit_bias={"2": 100})  # It ends its turn at once.
            assert cached < 100
        assert (await ask("Go on.") > 1500) == foresight
