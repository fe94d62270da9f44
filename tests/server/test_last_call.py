"""A turn ends with the last call that is allowed. The engine may generate its end, so that it reports and caches it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from singletree.engines.engine import Chunk, GenerationJob
from singletree.errors import EngineFailed

from .by_hand import EngineByHand
from .memory import events
from .serving import TOKENIZER, body, serving
from .test_generation import CALL, CHAT_TOOL

PATH = "/v1/chat/completions"
END = TOKENIZER.added_tokens["<|im_end|>"]
ENDS = Chunk([END], "stop", cached_tokens=7)
GOES_ON = [Chunk([token]) for token in TOKENIZER.encode("\nAnd on it goes.")]


async def answer(engine: EngineByHand, *after: Chunk | Exception | None, stream: bool = False) -> Any:
    """The body of an answer with one call, or the last event with a usage, after which the engine says ``after``."""
    engine.emit(Chunk(TOKENIZER.encode(CALL)), *after)
    async with serving(engine=engine) as served:
        wanted: dict[str, Any] = {"tools": [CHAT_TOOL], "parallel_tool_calls": False, "stream": stream}
        more = {"stream_options": {"include_usage": True}} if stream else {}
        reply = await served.client.post(PATH, body(PATH, "hi", **wanted, **more))
    assert reply.status == 200, reply.body
    return events(reply.body)[-2][1] if stream else reply.json


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_ends_the_turn_is_not_cancelled(stream: bool) -> None:
    engine = EngineByHand()
    usage = (await answer(engine, ENDS, stream=stream))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 7
    assert usage["completion_tokens"] == len(TOKENIZER.encode(CALL))
    assert engine.freed == 0


class DeliveringEngine(EngineByHand):
    """Delivers all tokens but the first, as engines over HTTP do, and yields one and the same chunk for control."""

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """See ``Engine``."""
        control, first = Chunk(()), True
        async with aclosing(super().generate(job)) as chunks:
            async for chunk in chunks:
                if first or chunk.finish is not None or job.deliver is None:
                    first = False
                    yield chunk
                elif not job.deliver(chunk.token_ids):
                    yield control


async def test_an_engine_that_delivers_the_end_of_the_turn_is_not_cancelled() -> None:
    engine, call = DeliveringEngine(), TOKENIZER.encode(CALL)
    engine.emit(*(Chunk([token]) for token in call), ENDS)
    async with serving(engine=engine) as served:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        wanted = {"tools": [CHAT_TOOL], "parallel_tool_calls": False, **options}
        reply = await served.client.post(PATH, body(PATH, "hi", **wanted))
    usage = events(reply.body)[-2][1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 7
    assert (engine.freed, engine.emitted) == (0, len(call) + 1)


async def test_an_engine_that_goes_on_is_cancelled() -> None:
    engine = EngineByHand()
    choice = (await answer(engine, *GOES_ON, ENDS))["choices"][0]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("tool_calls", 1)
    assert not choice["message"]["content"]
    assert (engine.freed, engine.emitted) == (1, 1 + 16)


@pytest.mark.parametrize("after", [EngineFailed("it died"), None])
async def test_an_engine_that_fails_then_costs_nothing(after: Exception | None) -> None:
    choice = (await answer(EngineByHand(), after))["choices"][0]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("tool_calls", 1)


async def test_an_engine_that_hangs_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("singletree.server.turn.pipeline._SPARE_SECONDS", 0.0)
    engine = EngineByHand()
    choice = (await answer(engine))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert engine.freed == 1
