"""Engines that die in the middle of a turn: it goes on elsewhere, token by token as if nothing had been."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from conformance.sdk import anthropic_sdk
from protocols import grammar_messages
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, EngineInfo, GenerationJob, StopKind
from singletree.engines.lifetime import ReconnectingEngine
from singletree.engines.sharing import QueueingEngine
from singletree.engines.workers import Worker
from singletree.errors import EngineFailed, EngineUnfit, InvalidRequest, Overloaded
from singletree.events import WeightVersion
from singletree.routing.pool import MIGRATION_LIMIT, EnginePool
from singletree.server.models.catalog import load_models
from singletree.server.models.model import serve_workers
from singletree.server.settings.config import Config

from .memory import Reply
from .serving import MODEL, TEMPLATE, TOKENIZER, body, serving
from .test_generation import CALL, PATHS, TOOLS, final, outcome

END = TOKENIZER.added_tokens["<|im_end|>"]
TURN = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"
TOKENS = (*TOKENIZER.encode(TURN), END)
each_protocol = pytest.mark.parametrize("path", PATHS)


class Mortal:
    """Writes ``tokens`` behind its first prompt, and goes on with them behind a prompt that has some; and dies.

    Args:
        lives: for each generation after how many tokens it dies, or what it raises; None: it lives.
    """

    def __init__(self, *lives: int | Exception | None, tokens: Sequence[int] = TOKENS) -> None:
        self._lives = list(lives)
        self._tokens = tokens
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.started = self.closed = 0
        self.aborted: list[str] = []

    async def start(self) -> None:
        """Counted."""
        self.started += 1

    async def close(self) -> None:
        """Counted."""
        self.closed += 1

    def info(self) -> EngineInfo:
        """Roomy."""
        return EngineInfo("mortal", 8192, constraints=("lark",), resumable=True)

    async def abort(self, request_id: str) -> None:
        """Remembered."""
        self.aborted.append(request_id)

    async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
        """See Engine."""
        prompt_token_ids, sampling = job.prompt_token_ids, job.sampling
        self.prompts.append(list(prompt_token_ids))
        self.samplings.append(sampling)
        life = self._lives.pop(0) if self._lives else None
        if isinstance(life, Exception):
            raise life
        done = len(prompt_token_ids) - len(self.prompts[0])
        assert list(prompt_token_ids[len(prompt_token_ids) - done :]) == list(self._tokens[:done])
        rest = self._tokens[done:][: sampling.max_tokens]
        for at, token in enumerate(rest):
            await asyncio.sleep(0)
            if at == life:
                raise EngineFailed("it died")
            last = at == len(rest) - 1
            finish: StopKind | None = (
                ("stop" if token == END else "length") if last and life != len(rest) else None
            )
            yield Chunk([token], finish, cached_tokens=7)
        if life == len(rest):
            raise EngineFailed("it died at last")


def pool(*engines: Any, **settings: Any) -> EnginePool:
    """The engines as one, by turns."""
    return EnginePool([Worker(str(i), engine) for i, engine in enumerate(engines)], **settings)


async def run(engine: Any, *, max_tokens: int | None = None, **more: Any) -> list[Chunk]:
    """All that ``engine`` says."""
    await engine.begin()
    chunks = engine.generate(
        GenerationJob([1, 2, 3], Sampling(max_tokens), "r", stop_token_ids=(END,), **more)
    )
    async with aclosing(chunks):
        return [chunk async for chunk in chunks]


@pytest.mark.parametrize("death", range(1, len(TOKENS) + 1))
async def test_the_turn_is_the_same_wherever_its_engine_dies(death: int) -> None:  # C39
    engine = Mortal(death)
    chunks = await run(pool(engine))
    assert [t for chunk in chunks for t in chunk.token_ids] == list(TOKENS)
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["stop"]
    if death < len(TOKENS):
        assert engine.prompts[1] == [1, 2, 3, *TOKENS[:death]]
    assert {chunk.cached_tokens for chunk in chunks[:death]} == {7}
    assert {chunk.cached_tokens for chunk in chunks[death:]} <= {None}


@pytest.mark.parametrize("death", [1, 3, 4])
async def test_the_limit_is_that_of_the_whole_turn(death: int) -> None:
    engine = Mortal(death)
    chunks = await run(pool(engine), max_tokens=4)
    assert [t for chunk in chunks for t in chunk.token_ids] == list(TOKENS[:4])
    assert chunks[-1].finish == "length"
    assert [sampling.max_tokens for sampling in engine.samplings] == [4, 4 - death][: 1 + (death < 4)]


async def test_another_engine_goes_on() -> None:  # C39
    first, second = Mortal(5), Mortal(None)
    second.prompts.append([1, 2, 3])
    both = pool(first, second)
    await both.start()
    chunks = await run(both)
    await both.abort("r")
    await both.close()
    assert [t for chunk in chunks for t in chunk.token_ids] == list(TOKENS)
    assert (len(first.prompts), second.prompts[1][3:]) == (1, list(TOKENS[:5]))
    assert [(e.started, e.closed, e.aborted) for e in (first, second)] == [(1, 1, [])] * 2


NOT_GONE_ON_WITH: list[tuple[str, list[Any], dict[str, Any], str]] = [
    ("nothing was told", [0], {}, "it died"),
    ("it fails at once again", [2, EngineFailed("refused")], {}, "it died"),
    ("no room in time", [2, Overloaded("full")], {}, "it died"),
    ("it refuses the rest", [2, InvalidRequest("no"), None], {}, "it died"),
    ("it cannot do it", [2, EngineUnfit("no ids"), None], {}, "it died"),
    ("it cannot go on", [EngineUnfit("no ids"), None], {}, "no ids"),
    ("every engine dies", [2] * (MIGRATION_LIMIT + 1), {}, "it died"),
    ("a grammar", [2], {"constraint": Constraint("lark", "x")}, "it died"),
]


@pytest.mark.parametrize(
    ("lives", "more", "says"), [n[1:] for n in NOT_GONE_ON_WITH], ids=[n[0] for n in NOT_GONE_ON_WITH]
)
async def test_what_cannot_go_on_ends_with_the_first_failure(
    lives: list[Any], more: dict[str, Any], says: str
) -> None:  # C39
    engine = Mortal(*lives)
    with pytest.raises(EngineFailed, match=says):
        await run(pool(engine), **more)
    assert len(engine.prompts) == min(len([life for life in lives if life is not None]), MIGRATION_LIMIT + 1)


async def test_what_cannot_pass_is_never_tried_again() -> None:
    """Not even where the engine had told tokens, which is when it can go on with a turn."""

    class Unfit(Mortal):
        async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
            self.prompts.append(list(job.prompt_token_ids))
            yield Chunk([7])
            raise EngineUnfit("vLLM returns no token ids")

    engine = Unfit()
    with pytest.raises(EngineUnfit):
        await run(pool(engine))
    assert len(engine.prompts) == 1
    unfit = Mortal(*[EngineUnfit("no ids")] * len(PATHS))
    async with serving(engine=pool(unfit)) as served:
        for path in PATHS:
            reply = await served.client.post(path, body(path, "x"))
            assert (reply.status, reply.headers["x-should-retry"]) == (500, "false")


async def test_a_refusal_stays_one() -> None:
    with pytest.raises(Overloaded):
        await run(pool(Mortal(Overloaded("full"))))


async def test_who_leaves_frees_the_engine() -> None:  # C40
    engine = Mortal(2)
    one = pool(engine)
    await one.begin()
    chunks = one.generate(GenerationJob([1, 2, 3], Sampling(), "r"))
    for _ in range(4):
        await anext(chunks)
    await chunks.aclose()
    assert len(engine.prompts) == 2


@each_protocol
@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_reads_one_turn(path: str, stream: bool) -> None:  # C39
    for death in (1, 9, 20, len(TOKENS) - 2):
        replies: list[Reply] = []
        for engine in (Mortal(None), Mortal(death)):
            async with serving(engine=pool(engine, hold_seconds=1)) as served:
                asked = body(path, "x", stream=stream, tools=[TOOLS[path]])
                replies.append(await served.client.post(path, asked))
        whole, mended = (outcome(path, final(path, reply)) for reply in replies)
        assert mended == whole
        assert whole[1:] == (1, "I look.")


async def test_the_sdk_accumulates_a_turn_of_two_engines() -> None:  # C39
    messages: Any = [{"role": "user", "content": "x"}]
    engine = Mortal(30)
    layout = TEMPLATE.layout(TOKENIZER)
    async with (
        serving(engine=pool(engine), layout=layout) as served,
        anthropic_sdk(served.client) as sdk,
    ):
        asked: Any = {
            "model": MODEL,
            "max_tokens": 500,
            "messages": messages,
            "tools": [TOOLS["/v1/messages"]],
        }
        async with sdk.messages.stream(**asked) as stream:
            message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].to_dict()["input"] == {"path": "a"}
    assert message.usage.output_tokens == len(TOKENS)


async def test_a_model_is_loaded_so_that_its_turns_go_on() -> None:
    loaded = await load_models(Config(engine="scripted"), lambda line: None)
    try:
        [model] = loaded.models
        # What the scripted engine plays does not follow from the end of its prompt: it would begin anew.
        assert isinstance(model.engine, QueueingEngine)
    finally:
        await loaded.close()
    served = await serve_workers(Config(), [Worker("0", Mortal())], TOKENIZER, MODEL)
    assert isinstance(served, EnginePool)
    await served.close()


async def test_a_stream_that_could_not_go_on_ends_with_an_error() -> None:  # C39
    async with serving(engine=pool(Mortal(12, EngineFailed("gone for good")))) as served:
        reply = await served.client.post("/v1/messages", body("/v1/messages", "x", stream=True))
    assert grammar_messages.check(reply.body).last["error"]["type"] == "api_error"


async def test_the_weights_of_a_continued_turn_are_counted_from_its_begin() -> None:
    class Versioned(Mortal):
        """Of one version of the weights, which it reports at its end."""

        async def generate(self, job: GenerationJob) -> AsyncGenerator[Chunk, None]:
            """See Engine."""
            count = 0
            async for chunk in super().generate(job):
                count += len(chunk.token_ids)
                spans = [WeightVersion("2", 0, count)] if chunk.finish else []
                yield replace(chunk, weight_versions=spans, routed_experts="experts" if spans else None)

    *_, last = await run(pool(Versioned(3)))
    assert list(last.weight_versions) == [WeightVersion("2", 3, len(TOKENS))]
    assert last.routed_experts is None, "they would be those of another prompt"
    *_, last = await run(pool(Versioned()))
    assert (list(last.weight_versions), last.routed_experts) == (
        [WeightVersion("2", 0, len(TOKENS))],
        "experts",
    )


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/messages", 529), ("/v1/chat/completions", 503), ("/v1/responses", 503)]
)
async def test_when_all_engines_are_gone_the_client_gets_a_time_to_retry(path: str, status: int) -> None:
    tries: list[Any] = [Mortal(EngineFailed("it died"))]

    async def connect() -> Any:
        if tries:
            return tries.pop()
        raise EngineFailed("nobody answers")

    async with serving(engine=pool(ReconnectingEngine("a", connect), hold_seconds=0.05)) as served:
        reply = await served.client.post(path, body(path, "x"))
        assert reply.status == status
        assert int(reply.headers["retry-after"]) >= 1
        assert b"no engine of this model answers" in reply.body
        await served.engine.close()
