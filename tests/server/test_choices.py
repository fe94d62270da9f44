"""``n``: several answers to one request, whole and streamed, and that none of them outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from conformance.sdk import openai_sdk
from protocols import grammar_chat
from singletree.engines.engine import Chunk, GenerationJob
from singletree.errors import EngineFailed
from singletree.testing.scripts import Script

from .by_hand import EngineByHand
from .memory import events
from .serving import MODEL, TOKENIZER, body, serving

CHAT = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
stream_or_not = pytest.mark.parametrize("stream", [False, True])


class Drawing(EngineByHand):
    """Says a word for each seed, and remembers which were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int | None] = []
        self.ids: list[str] = []

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """See ``Engine``."""
        sampling = job.sampling
        self.seeds.append(sampling.seed)
        self.ids.append(job.request_id)
        yield Chunk((), cached_tokens=4)
        for token in TOKENIZER.encode(f"choice {sampling.seed}"):
            await asyncio.sleep(0)
            yield Chunk([token])
        yield Chunk((), "stop")


async def test_a_whole_body_has_every_choice() -> None:
    engine = Drawing()
    async with serving(engine=engine) as served:
        one = (await served.client.post(CHAT, body(CHAT, "x", seed=7))).json
        several = (await served.client.post(CHAT, body(CHAT, "x", seed=7, n=3))).json
    assert engine.seeds == [7, 7, 6, 5]
    assert len(set(engine.ids)) == 4, "engines tell generations by their ids"
    answer = [(choice["index"], choice["message"]["content"]) for choice in several["choices"]]
    assert answer == [(0, "choice 7"), (1, "choice 6"), (2, "choice 5")]
    usage, alone = several["usage"], one["usage"]
    assert usage["prompt_tokens"] == alone["prompt_tokens"], "the prompt is one"
    assert usage["completion_tokens"] == 3 * alone["completion_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4


async def test_choices_take_turns_in_a_stream() -> None:  # C13 C14
    asked = body(CHAT, "x", seed=1, n=3, stream=True, stream_options={"include_usage": True})
    async with serving(engine=Drawing()) as served:
        reply = await served.client.post(CHAT, asked)
    choices = grammar_chat.check(reply.body)
    assert [choice.text for choice in choices] == ["choice 1", "choice 0", "choice 3"]
    assert all(choice.usage and choice.usage["completion_tokens"] == 24 for choice in choices)
    order = [data["choices"][0]["index"] for _, data in events(reply.body)[:-2] if data["choices"]]
    assert order != sorted(order), "none waits for another one's end"


async def test_each_choice_has_its_own_calls() -> None:  # C13
    async with serving({"s": CALL}) as served:
        asked = body(CHAT, "[[script:s]]", n=2, tools=[READ])
        whole = (await served.client.post(CHAT, asked)).json["choices"]
        streamed = grammar_chat.check((await served.client.post(CHAT, asked | {"stream": True})).body)
    assert [choice["finish_reason"] for choice in whole] == ["tool_calls", "tool_calls"]
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in whole}
    assert len(ids) == 2
    assert [choice.calls[0]["name"] for choice in streamed] == ["read", "read"]


async def test_the_sdk_adds_choices_up() -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    async with serving(engine=Drawing()) as served, openai_sdk(served.client) as sdk:
        whole = await sdk.chat.completions.create(model=MODEL, messages=messages, n=2, seed=3)
        async with sdk.chat.completions.stream(model=MODEL, messages=messages, n=2, seed=3) as stream:
            streamed = await stream.get_final_completion()
    assert [choice.message.content for choice in whole.choices] == ["choice 3", "choice 2"]
    assert [choice.message.content for choice in streamed.choices] == ["choice 3", "choice 2"]


@stream_or_not
@pytest.mark.parametrize("n", [0, 129, -1])
async def test_too_many_and_none_are_refused(n: int, stream: bool) -> None:
    async with serving() as served:
        reply = await served.client.post(CHAT, body(CHAT, "x", n=n, stream=stream))
    assert reply.status == 400
    assert reply.json["error"]["param"] == "n"
    assert "from 1 to 128" in reply.json["error"]["message"]


@stream_or_not
async def test_a_client_that_leaves_frees_all_of_them(stream: bool) -> None:  # C40
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        asked = body(CHAT, "x", n=3, stream=stream)
        async with served.client.open("POST", CHAT, asked) as (exchange, task):
            await engine.waiting.wait()
            engine.emit(Chunk([65]), Chunk([66]), Chunk([67]))
            await engine.waiting.wait()
            exchange.leave()
            await asyncio.wait_for(task, 2)
        assert served.service.tracing.running == 0
    assert engine.freed == 3


class Failing(Drawing):
    """The generation whose seed is 6 fails after ``after`` tokens, the others after no time at all."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after
        self.running = 0
        self.finished: set[int | None] = set()

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """See ``Engine``."""
        count = 0
        self.running += 1
        try:
            async for chunk in super().generate(job):
                if job.sampling.seed == 6 and count > self.after:
                    raise EngineFailed("the engine died")
                count += 1
                yield chunk
                if job.sampling.seed == 7:
                    await asyncio.sleep(0.001)
            self.finished.add(job.sampling.seed)
        finally:
            self.running -= 1


async def test_one_that_fails_loses_nothing_of_the_others() -> None:  # C39
    async with serving(engine=Failing(3)) as served:
        reply = await served.client.post(CHAT, body(CHAT, "x", seed=7, n=3, stream=True))
    choices = grammar_chat.check(reply.body)
    assert [choice.text for choice in choices] == ["choice 7", "cho", "choice 5"]
    assert [choice.finish_reason for choice in choices] == ["stop", None, "stop"]
    assert [choice.error is None for choice in choices] == [True, False, True]
    assert choices[1].error is not None
    warning = "choice 1 of 3 failed, the others are complete: the engine died"
    assert choices[1].error["message"].endswith(warning)


async def test_one_that_fails_is_no_whole_body() -> None:  # C39
    engine = Failing(3)
    async with serving(engine=engine) as served:
        reply = await served.client.post(CHAT, body(CHAT, "x", seed=7, n=3))
        assert served.service.tracing.running == 0
    assert reply.status == 500
    assert "the engine died" in reply.json["error"]["message"]
    assert engine.running == 0, "all of them are freed"
    assert 7 not in engine.finished, "the slow one before its end"


@stream_or_not
async def test_a_failure_before_the_first_token_is_a_status(stream: bool) -> None:  # C39
    async with serving({"s": Script(fail_after=0)}) as served:
        reply = await served.client.post(CHAT, body(CHAT, "[[script:s]]", n=2, stream=stream))
    assert reply.status == 500


async def test_side_events_name_their_call() -> None:  # C13
    headers = {"x-singletree-tool-dispatch": "1", "x-singletree-reasoning-dispatch": "1"}
    async with serving({"s": f"<think>\nHm.\n</think>\n\n{CALL}"}) as served:
        asked = body(CHAT, "[[script:s]]", n=2, tools=[READ], stream=True)
        reply = await served.client.post(CHAT, asked, headers)
    streamed = events(reply.body)
    calls = [data for name, data in streamed if name == "tool_call_dispatch"]
    assert [call["choice_index"] for call in calls] == [0, 1]
    assert len({call["tool_call"]["id"] for call in calls}) == 2
    assert [data["index"] for name, data in streamed if name == "reasoning_dispatch"] == [0, 1]
