"""``InProcessSglangEngine`` over an ``sglang.Engine`` in memory, whose signatures are those of SGLang 0.5.23."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from engines.contract import CHECKS, Check, Subject, tokens_of
from engines.delivered import check_delivery
from engines.fake_sglang import FakeSglang, fake_sglang_engine
from engines.test_vllm_ending import until
from engines.vllm_memory import collect, outcome
from engines.vllm_recording import QUESTION
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, GenerationJob
from singletree.errors import BadConfiguration, ContextOverflow, EngineFailed, InvalidRequest, Overloaded
from singletree.events import WeightVersion
from singletree.in_process.sglang_engine import InProcessSglangEngine
from singletree.in_process.sglang_startup import PACKAGE
from singletree.in_process.startup import EngineSettings, agent_arguments, engine_arguments, explain_failure


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[True, False], ids=["incremental", "cumulative"]
)
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    engine = fake_sglang_engine(FakeSglang(incremental=request.param))
    await engine.start()
    yield Subject(engine, fake_sglang_engine, QUESTION, [(*QUESTION, i) for i in range(3)])
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(subject: Subject, check: Check) -> None:
    await check(subject)


async def started(sglang: FakeSglang) -> InProcessSglangEngine:
    engine = fake_sglang_engine(sglang)
    await engine.start()
    sglang.asked.clear()
    return engine


async def test_what_sglang_is_asked_for() -> None:
    sglang = FakeSglang(ranks=4)
    engine = await started(sglang)
    sampling = Sampling(temperature=0.2, max_tokens=5, logprobs=2, logit_bias={3: 1.5}, min_tokens=1, seed=-1)
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
    *rest, last = [chunk async for chunk in engine.generate(job)]
    assert list(last.weight_versions) == [WeightVersion("7", 0, 5)]
    assert not any(chunk.weight_versions for chunk in rest)
    [asked] = sglang.asked
    assert asked["cache_salt"] == "tenant"
    assert asked["sampling_params"] == {
        "top_k": 20,
        "temperature": 0.2,
        "max_new_tokens": 5,
        "sampling_seed": 2**63 - 1,
        "logit_bias": {"3": 1.5},
        "min_new_tokens": 1,
        "stop_token_ids": [9],
        "structural_tag": '{"type":"structural_tag"}',
    }
    assert (asked["input_ids"], asked["stream"], asked["priority"]) == (list(QUESTION), True, -3)
    assert (asked["return_logprob"], asked["top_logprobs_num"], asked["session_id"]) == (True, 2, "s1")
    assert asked["routed_dp_rank"] in range(4)
    await engine.close()


async def test_no_id_begins_with_another() -> None:
    """SGLang aborts every request whose id begins with the one that it is given."""
    sglang = FakeSglang()
    engine = await started(sglang)
    for _ in range(11):
        await collect(engine, name="r1")
    ids = [asked["rid"] for asked in sglang.asked]
    assert not any(one != other and other.startswith(one) for one in ids for other in ids)
    await engine.close()


@pytest.mark.parametrize(("tokens", "kind"), [(1, Overloaded), (3, EngineFailed)])
async def test_a_full_queue_is_an_overload_before_the_first_token(tokens: int, kind: type[Exception]) -> None:
    sglang = FakeSglang()
    engine = await started(sglang)
    sglang.ending = {"type": "abort", "status_code": 503, "message": "queue full"}
    with pytest.raises(kind, match="queue full"):
        async for _ in engine.generate(GenerationJob(QUESTION, Sampling(max_tokens=tokens), "r")):
            pass
    await engine.close()


async def test_an_engine_that_cannot_be_described_does_not_stay_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sglang = FakeSglang()
    engine = fake_sglang_engine(sglang)
    monkeypatch.setattr(engine, "_describe", lambda loaded: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await engine.start()
    assert sglang.shut_down == 1


@pytest.mark.parametrize(
    ("ending", "kind", "says"),
    [
        ({"type": "abort", "status_code": 400, "message": "bad grammar"}, InvalidRequest, "bad grammar"),
        ({"type": "abort", "status_code": 500, "message": "broke"}, EngineFailed, "broke"),
        ({"type": "odd"}, EngineFailed, "'odd'"),
    ],
)
async def test_endings_that_are_errors(ending: dict[str, Any], kind: type[Exception], says: str) -> None:
    sglang = FakeSglang()
    engine = await started(sglang)
    sglang.ending = ending
    _, error = await outcome(engine)
    assert isinstance(error, kind)
    assert says in str(error)
    sglang.ending = None
    assert (await collect(engine))[-1].finish == "stop"
    await engine.close()


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("The input (600 tokens) is longer than the model's context length (512 tokens).", ContextOverflow),
        ("top_p must be in (0, 1], got 0.", InvalidRequest),
    ],
)
async def test_refusals(message: str, kind: type[Exception]) -> None:
    sglang = FakeSglang()
    engine = await started(sglang)
    sglang.refusal = ValueError(message)
    chunks, error = await outcome(engine)
    assert chunks == []
    assert isinstance(error, kind)
    await engine.close()


@pytest.mark.parametrize(
    ("backend", "first"),
    [
        ("none", None),
        ("llguidance", "json_schema"),
        ("outlines", "json_schema"),
        ("xgrammar", "structural_tag"),
    ],
)
async def test_the_grammar_backend_decides_on_the_constraints(
    backend: str, first: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await started(FakeSglang(grammar=backend))
    assert next(iter(engine.info().constraints), None) == first
    assert ("--grammar-backend xgrammar" in caplog.text) == (backend != "xgrammar")
    await engine.close()


def test_a_missing_xgrammar_is_named_with_its_cure() -> None:
    log = "Scheduler hit an exception\nModuleNotFoundError: No module named 'xgrammar'\n"
    assert "pip install xgrammar" in explain_failure(log, PACKAGE.limits)


async def test_a_stop_token_counts_although_the_end_token_does_not() -> None:
    """With ignore_eos SGLang ignores stop tokens, too, so the generation is ended here."""
    sglang = FakeSglang()
    sglang.ignores_stops = True
    engine = await started(sglang)
    sampling = Sampling(max_tokens=8, ignore_eos=True, logprobs=1)
    all_tokens = tokens_of((await outcome(engine, sampling=sampling))[0])
    chunks, error = await outcome(engine, sampling=sampling, stop_token_ids=[all_tokens[4]])
    assert error is None
    assert tokens_of(chunks) == all_tokens[:5]
    assert [row[0][0] for chunk in chunks for row in chunk.logprobs or ()] == all_tokens[:5]
    assert chunks[-1].finish == "stop"
    assert sglang.aborted == [sglang.asked[-1]["rid"]]
    await engine.close()


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("refused", [(), (0,), (1, 2), (0, 1, 2, 3, 4)])
async def test_tokens_after_the_first_are_delivered(incremental: bool, refused: tuple[int, ...]) -> None:
    """In order, none lost or twice; a consumer that takes no more is resumed with an empty chunk."""
    engine = await started(FakeSglang(incremental=incremental))
    job = GenerationJob(QUESTION, Sampling(max_tokens=7), "r")
    await check_delivery(engine, job, refused)
    await engine.close()


async def test_a_stop_token_that_sglang_ignores_is_not_delivered() -> None:
    sglang = FakeSglang()
    sglang.ignores_stops = True
    engine = await started(sglang)
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    all_tokens = tokens_of((await outcome(engine, sampling=sampling))[0])
    delivered: list[int] = []

    def deliver(token_ids: Sequence[int]) -> bool:
        delivered.extend(token_ids)
        return True

    job = GenerationJob(QUESTION, sampling, "r", stop_token_ids=(all_tokens[4],), deliver=deliver)
    first, last = [chunk async for chunk in engine.generate(job)]
    assert [*first.token_ids, *delivered, *last.token_ids] == all_tokens[:5]
    assert (list(last.token_ids), last.finish) == (all_tokens[4:5], "stop")
    await engine.close()


async def test_abort_ends_a_delivery() -> None:
    engine = await started(FakeSglang())
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    chunks = engine.generate(GenerationJob(QUESTION, sampling, "r", deliver=lambda ids: True))
    assert (await anext(chunks)).token_ids
    last = asyncio.create_task(anext(chunks))
    await asyncio.sleep(0.01)
    await engine.abort("r")
    assert await last == Chunk((), "cancelled")
    await engine.close()


async def test_a_child_that_fails_ends_the_generations_and_not_the_server() -> None:
    sglang = FakeSglang()
    engine = await started(sglang)
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    reading = asyncio.create_task(outcome(engine, sampling=sampling))
    await until(lambda: bool(sglang.asked))
    await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGQUIT)
    chunks, error = await reading
    assert tokens_of(chunks)
    assert isinstance(error, EngineFailed)
    _, again = await outcome(engine)
    assert isinstance(again, EngineFailed)
    assert "started again" in again.message
    await engine.close()
    assert sglang.shut_down == 1


def test_the_arguments_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    given = engine_arguments(EngineSettings("org/m", 1024, 3, ("--tp-size", "4")), PACKAGE)
    assert given[:6] == ["--model-path", "org/m", "--context-length", "1024", "--max-running-requests", "3"]
    assert "--incremental-streaming-output" in given
    assert given[-2:] == ["--tp-size", "4"]
    assert len(agent_arguments((), PACKAGE.agent)) == 4
    with pytest.raises(BadConfiguration, match="no constraints"):
        engine_arguments(EngineSettings("m", arguments=("--skip-tokenizer-init",)), PACKAGE)
    monkeypatch.setattr("singletree.in_process.startup.installed_version", lambda names: None)
    with pytest.raises(BadConfiguration, match=r"pip install 'singletree\[sglang\]'"):
        PACKAGE.load(EngineSettings("m"))
