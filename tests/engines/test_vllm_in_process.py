"""``InProcessVllmEngine`` over an ``AsyncLLM`` in memory; ``test_vllm_in_process_real.py`` has the real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engines.contract import CHECKS, Check, Subject, tokens_of
from engines.delivered import check_delivery
from engines.fake_vllm import Dead, FakeAsyncLLM, Full, Refused, fake_engine
from engines.test_vllm_ending import until
from engines.vllm_memory import collect, outcome
from engines.vllm_recording import QUESTION
from singletree.conversation import Sampling
from singletree.engines.engine import Constraint, GenerationJob
from singletree.errors import ContextOverflow, EngineFailed, InvalidRequest, Overloaded
from singletree.events import WeightVersion
from singletree.in_process.startup import SavedCache
from singletree.in_process.vllm_engine import InProcessVllmEngine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject() -> AsyncIterator[Subject]:
    engine = fake_engine()
    await engine.start()
    yield Subject(engine, fake_engine, QUESTION, [(*QUESTION, i) for i in range(3)])
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(subject: Subject, check: Check) -> None:
    await check(subject)


async def started(*llms: FakeAsyncLLM) -> InProcessVllmEngine:
    engine = fake_engine(*llms)
    await engine.start()
    llms[0].asked.clear()
    return engine


async def test_what_vllm_is_asked_for() -> None:
    llm = FakeAsyncLLM(ranks=4, defaults={"temperature": 0.6, "top_k": 20, "stop_token_ids": [7]})
    engine = await started(llm)
    sampling = Sampling(
        temperature=0.2,
        max_tokens=5,
        logprobs=2,
        logit_bias={3: 1.5},
        min_tokens=1,
        prompt_logprobs=0,
        seed=4,
    )
    job = GenerationJob(
        QUESTION,
        sampling,
        "r1",
        stop_token_ids=(9,),
        constraint=Constraint("structural_tag", {"type": "structural_tag"}),
        priority=-3,
        session="s1",
        cache_salt="tenant",
    )
    async for _ in engine.generate(job):
        pass
    [asked] = llm.asked
    assert asked["params"] == {
        "temperature": 0.2,
        "top_k": 20,
        "max_tokens": 5,
        "seed": 4,
        "logprobs": 2,
        "logit_bias": {3: 1.5},
        "min_tokens": 1,
        "prompt_logprobs": 0,
        "stop_token_ids": [9, 7],
        "structured_outputs": {"structural_tag": '{"type":"structural_tag"}'},
    }
    assert (asked["priority"], asked["session_id"]) == (-3, "s1")
    assert asked["data_parallel_rank"] in range(4)
    prompt = {"type": "token", "prompt_token_ids": list(QUESTION), "cache_salt": "tenant"}
    assert asked["prompt"] == prompt
    await collect(engine, name="r1")
    assert llm.asked[1]["prompt"] == prompt | {"cache_salt": None}
    assert llm.asked[1]["data_parallel_rank"] is llm.asked[1]["session_id"] is None
    assert llm.asked[0]["request_id"] != llm.asked[1]["request_id"], "vLLM aborts all requests of one id"
    await engine.close()


async def test_weights_and_experts_are_known_at_the_end() -> None:
    engine = await started(FakeAsyncLLM())
    *rest, last = await collect(engine)
    assert (list(last.weight_versions), last.routed_experts) == (
        [WeightVersion("7", 0, 30)],
        "npy of experts",
    )
    assert all(not chunk.weight_versions and chunk.routed_experts is None for chunk in rest)
    await engine.close()


@pytest.mark.parametrize(("backend", "first"), [("xgrammar", "structural_tag"), ("guidance", "lark")])
async def test_the_backend_decides_on_the_constraints(backend: str, first: str) -> None:
    engine = await started(FakeAsyncLLM(backend=backend))
    kinds = engine.info().constraints
    assert kinds[0] == first
    assert ("lark" in kinds) == (backend == "guidance"), "XGrammar refuses the Lark of llguidance"
    assert (engine.info().details or {})["kv_cache_tokens"] == 160
    await engine.close()


async def test_one_turn_of_the_loop_serves_all_streams_of_a_step() -> None:
    """A step of vLLM puts tokens into all queues; every stream has its own before the loop turns again."""
    llm = FakeAsyncLLM()
    engine = await started(llm)
    got: list[int] = []

    async def read(number: int) -> None:
        async for chunk in engine.generate(
            GenerationJob((*QUESTION, number), Sampling(max_tokens=3), f"r{number}")
        ):
            got.append(number) if chunk.token_ids else None

    llm.gate = asyncio.Event()
    reading = [asyncio.create_task(read(number)) for number in range(8)]
    await until(lambda: len(llm.asked) == 8)
    llm.gate.set()
    await until(lambda: len(llm.running) == 8)
    if llm._stepping is not None:
        llm._stepping.cancel()
    for step in (1, 2, 3):
        llm.step()
        await asyncio.sleep(0)
        assert len(got) == 8 * step
        await asyncio.sleep(0)
    await asyncio.gather(*reading)
    await engine.close()


@pytest.mark.parametrize("refused", [(), (0,), (1, 2), (0, 1, 2, 3, 4)])
async def test_tokens_after_the_first_are_delivered(refused: tuple[int, ...]) -> None:
    """In order, none lost or twice; a consumer that takes no more is resumed with an empty chunk."""
    engine = await started(FakeAsyncLLM())
    job = GenerationJob(QUESTION, Sampling(max_tokens=7), "r")
    await check_delivery(engine, job, refused)
    await engine.close()


@pytest.mark.parametrize(
    ("raised", "kind", "says"),
    [
        (Refused("top_p must be in (0, 1], got 0.", parameter="top_p"), InvalidRequest, "top_p must be"),
        (Refused("The prompt is longer than the maximum model length of 512."), ContextOverflow, "512"),
        (Full("The engine is currently busy"), Overloaded, "busy"),
        (Dead(), EngineFailed, "starts them again"),
        (ValueError("odd"), EngineFailed, "ValueError: odd"),
    ],
)
async def test_refusals(raised: Exception, kind: type[Exception], says: str) -> None:
    llm = FakeAsyncLLM()
    engine = await started(llm)
    llm.refusal = raised
    chunks, error = await outcome(engine)
    assert chunks == []
    assert isinstance(error, kind)
    assert says in str(error)
    assert getattr(error, "param", None) == ("top_p" if says.startswith("top_p") else None)
    llm.refusal = None
    assert (await collect(engine))[-1].finish == "stop"
    await engine.close()


async def test_an_unknown_finish_reason_is_a_failure() -> None:
    llm = FakeAsyncLLM()
    engine = await started(llm)
    llm.finish = "error"
    _, error = await outcome(engine)
    assert isinstance(error, EngineFailed)
    assert "'error'" in error.message
    await engine.close()


async def test_a_dead_vllm_is_started_again_once_for_all() -> None:
    first, second = FakeAsyncLLM(), FakeAsyncLLM()
    engine = await started(first, second)
    reading = asyncio.create_task(outcome(engine))
    await until(lambda: bool(first.asked))
    await asyncio.sleep(0.01)
    first.die()
    chunks, error = await reading
    assert tokens_of(chunks)
    assert isinstance(error, EngineFailed)
    again = await asyncio.gather(*(collect(engine, name=f"r{i}") for i in range(3)))
    assert [each[-1].finish for each in again] == ["stop"] * 3
    assert (first.shut_down, second.shut_down) == (1, 0)
    await engine.close()
    assert second.shut_down == 1


async def test_a_vllm_that_keeps_dying_pauses() -> None:
    llms = [FakeAsyncLLM() for _ in range(3)]
    engine = await started(*llms)
    llms[0].die()
    await collect(engine)
    llms[1].die()
    _, error = await outcome(engine)
    assert isinstance(error, Overloaded)
    _, error = await outcome(engine)
    assert isinstance(error, Overloaded)
    assert error.retry_after <= 1.0, "one death is counted once"
    await engine.close()


async def test_a_start_that_is_given_up_leaves_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeAsyncLLM()
    engine = fake_engine(llm)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    for _ in range(100):
        if llm.shut_down:
            break
        await asyncio.sleep(0.01)
    assert llm.shut_down == 1


async def test_a_reader_that_leaves_while_the_request_is_sent_leaves_nothing_behind() -> None:
    llm = FakeAsyncLLM()
    engine = await started(llm)
    llm.gate = asyncio.Event()
    reading: asyncio.Task[Any] = asyncio.create_task(collect(engine))
    await until(lambda: bool(llm.asked))
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert llm.aborted == [llm.asked[0]["request_id"]]
    await engine.close()


async def test_the_saved_cache_is_held_within_its_limit_while_generations_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vllm-1-0123456789abcdef"
    folder.mkdir()
    engine = fake_engine()
    engine._settings = replace(engine._settings, saved=SavedCache(folder, 5, 5))
    now = [1000.0]
    monkeypatch.setattr("singletree.in_process.engine.monotonic", lambda: now[0])
    await engine.start()  # Its probe is a generation, too.
    assert engine._trim is not None
    await engine._trim
    block = folder / "1.bin"
    block.write_bytes(b"0123456789")
    for seconds, stays in ((30.0, True), (31.0, False)):
        now[0] += seconds
        await collect(engine)
        await engine._trim
        assert block.exists() is stays
    await engine.close()
