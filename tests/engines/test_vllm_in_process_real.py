"""``InProcessVllmEngine`` with the real vLLM, in the environment that ``real_vllm.py`` installs: ``make engines``.

Outside that environment the one test here runs this file inside it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from engines import real_vllm
from engines.contract import CHECKS, Check, Subject, collect, keeps_tenants_apart, tokens_of
from engines.real_vllm import children
from engines.tool_loop import DIALECTS, Dialect, forced_calls, served
from engines.vllm_recording import FRANCE, ITALY, JAPAN, OF, PARIS, QUESTION, SCHEMA, STRUCTURAL_TAG, greedy
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, GenerationJob
from singletree.errors import BadConfiguration, EngineFailed, InvalidRequest, Overloaded
from singletree.in_process.startup import EngineSettings
from singletree.in_process.vllm_engine import InProcessVllmEngine

pytestmark = pytest.mark.engines

INSIDE = importlib.util.find_spec("vllm") is not None
inside = pytest.mark.skipif(not INSIDE, reason="runs in vLLM's own environment")
SECONDS = 1800
WINDOW = 4096


@pytest.mark.skipif(INSIDE, reason="runs outside vLLM's environment")
def test_all_of_this_file_in_the_environment_of_vllm() -> None:
    python, environment = real_vllm.program()
    command = [str(python), "-m", "pytest", "-q", "-m", "engines", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, __file__],
        cwd=real_vllm.ROOT,
        env=environment,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0


def make(**more: Any) -> InProcessVllmEngine:
    _, model = real_vllm.install()
    given: dict[str, Any] = {"context_window": WINDOW, "slots": 8, "arguments": ("--enforce-eager",)} | more
    return InProcessVllmEngine(EngineSettings(str(model), **given), name=real_vllm.MODEL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject() -> AsyncIterator[Subject]:
    for name, value in real_vllm.environment().items():
        os.environ.setdefault(name, value)
    engine = make()
    await engine.start()
    yield Subject(engine, make, QUESTION, [FRANCE, ITALY, JAPAN])
    await engine.close()


async def asked(
    subject: Subject, sampling: Sampling, prompt: Any = QUESTION, **more: Any
) -> tuple[list[int], Chunk]:
    chunks = await collect(subject.engine.generate(GenerationJob(prompt, sampling, "asked", **more)))
    return tokens_of(chunks), chunks[-1]


@inside
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(subject: Subject, check: Check) -> None:
    await check(subject)


@inside
@pytest.mark.asyncio(loop_scope="module")
async def test_a_cache_salt_keeps_tenants_apart(subject: Subject) -> None:
    await keeps_tenants_apart(subject)


@inside
@pytest.mark.asyncio(loop_scope="module")
async def test_it_reports_what_runs(subject: Subject) -> None:
    info = subject.engine.info()
    assert (info.name, info.context_window, info.slots) == (real_vllm.MODEL, WINDOW, 8)
    details = info.details or {}
    assert details["version"].startswith(real_vllm.VLLM)
    assert details["kv_cache_tokens"] > WINDOW


@inside
@pytest.mark.asyncio(loop_scope="module")
async def test_tokens_go_past_vllms_own_objects(subject: Subject) -> None:
    """Of this version of vLLM all is known that the cheap way of a token needs."""
    engine = subject.engine
    assert isinstance(engine, InProcessVllmEngine)
    assert "recv_multipart" in vars(engine._engine.engine_core.resources.output_socket)
    assert engine._bypass is not None
    delivered: list[int] = []

    def deliver(token_ids: Sequence[int]) -> bool:
        delivered.extend(token_ids)
        return True

    sampling = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
    job = GenerationJob(QUESTION, sampling, "delivered", deliver=deliver)
    chunks = await collect(engine.generate(job))
    assert len(delivered) + len(tokens_of(chunks)) == 20
    assert len(delivered) >= 15
    assert chunks[-1].weight_versions[-1].end == 20, "vLLM has counted what it did not see"


@inside
@pytest.mark.asyncio(loop_scope="module")
async def test_stop_tokens_bias_and_seeds(subject: Subject) -> None:
    assert (await asked(subject, greedy()))[0] == PARIS
    tokens, last = await asked(subject, greedy(), stop_token_ids=(OF,))
    assert (tokens, last.finish) == (PARIS[:3], "stop")
    assert (await asked(subject, greedy(2, logit_bias={OF: 100.0})))[0] == [OF, OF]
    hot = [
        (await asked(subject, Sampling(max_tokens=16, temperature=1.5, seed=seed)))[0] for seed in (1, 1, 2)
    ]
    assert hot[0] == hot[1] != hot[2]


@inside
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json_schema", SCHEMA),
        Constraint("regex", "[ab]{3,6}"),
        Constraint("gbnf", 'root ::= "yes" | "no"'),
        Constraint("structural_tag", STRUCTURAL_TAG),
    ],
    ids=lambda each: each.kind,
)
async def test_constraints_end_the_turn(subject: Subject, constraint: Constraint) -> None:
    free, _ = await asked(subject, greedy(80))
    tokens, last = await asked(subject, greedy(80), constraint=constraint)
    assert last.finish == "stop"
    assert tokens != free


@inside
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("sampling", "more"),
    [
        (Sampling(max_tokens=2, top_p=0.0), {}),
        (Sampling(max_tokens=2, logprobs=1000), {}),
        (Sampling(max_tokens=2), {"constraint": Constraint("gbnf", "root ::= ( ")}),
        (Sampling(max_tokens=2), {"constraint": Constraint("json_schema", {"type": "nonsense"})}),
        (Sampling(max_tokens=2), {"constraint": Constraint("structural_tag", {"type": "structural_tag"})}),
        (Sampling(max_tokens=2), {"prompt": [10**6]}),
    ],
)
async def test_refusals_leave_it_well(subject: Subject, sampling: Sampling, more: Any) -> None:
    with pytest.raises(InvalidRequest, match="refused"):
        await asked(subject, sampling, **more)
    assert (await asked(subject, greedy()))[0] == PARIS


@inside
@pytest.mark.asyncio(loop_scope="module")
async def test_a_pause_that_takes_no_requests_means_later(subject: Subject) -> None:
    """vLLM's own ``/pause`` does so by default; singletree's keeps them waiting."""
    engine = subject.engine
    assert isinstance(engine, InProcessVllmEngine)
    await engine._engine.pause_generation(mode="abort")
    try:
        with pytest.raises(Overloaded, match="retry after it resumes"):
            await asked(subject, greedy())
    finally:
        await engine._engine.resume_generation()
    assert (await asked(subject, greedy()))[0] == PARIS


@inside
@pytest.mark.asyncio(loop_scope="module")
async def test_who_has_the_lower_number_runs_first(subject: Subject) -> None:
    ended: list[str] = []

    async def run(name: str, priority: int) -> None:
        sampling = replace(greedy(12), ignore_eos=True)
        await collect(subject.engine.generate(GenerationJob(QUESTION, sampling, name, priority=priority)))
        ended.append(name)

    filling = [asyncio.create_task(run(f"filling-{i}", 0)) for i in range(8)]
    await asyncio.sleep(0.2)
    waiting = [asyncio.create_task(run(f"late-{i}", 5)) for i in range(8)]
    await asyncio.sleep(0.2)
    first = asyncio.create_task(run("first", -5))
    await asyncio.gather(*filling, *waiting, first)
    assert ended.index("first") < max(ended.index(f"late-{i}") for i in range(8))


@inside
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.path)
async def test_a_tool_loop_through_the_whole_server(
    subject: Subject, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forced calls keep to the schema, and each turn finds the prompt of the one before in vLLM's cache."""
    monkeypatch.setattr("server.memory.PATIENCE_SECONDS", 600.0)  # The first grammar is compiled for long.
    counts = await forced_calls(subject.engine, dialect)
    assert counts == sorted(counts)
    assert counts[1] >= 256, counts  # blocks of 128 tokens
    assert counts[3] > counts[1], counts


@inside
@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_frees_the_engine(subject: Subject) -> None:
    async with served(subject.engine) as client:
        body = {"model": real_vllm.MODEL, "messages": [{"role": "user", "content": "Count."}], "stream": True}
        body |= {"ignore_eos": True, "max_tokens": 1000}
        async with client.open("POST", "/v1/chat/completions", body) as (exchange, _):
            await exchange.read()
            exchange.leave()
        engine = subject.engine
        assert isinstance(engine, InProcessVllmEngine)
        for _ in range(100):
            if not engine._engine.get_num_unfinished_requests():
                break
            await asyncio.sleep(0.1)
        assert engine._engine.get_num_unfinished_requests() == 0


@inside
@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_engine_process_is_started_again(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of the engine: it kills vLLM's process."""
    monkeypatch.setattr("engines.contract.PATIENCE", 600.0)  # A start takes minutes on a busy machine.
    chunks = subject.engine.generate(GenerationJob(QUESTION, replace(greedy(200), ignore_eos=True), "killed"))
    await anext(chunks)
    for pid in children(os.getpid(), "EngineCore"):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="starts them again"):
        await collect(chunks)
    assert (await asked(subject, greedy()))[0] == PARIS


@inside
@pytest.mark.parametrize(
    ("settings", "kind", "says"),
    [
        ({"arguments": ("--no-such-flag", "1")}, BadConfiguration, "no-such-flag"),
        ({"arguments": ("--max-num-seqs", "1")}, BadConfiguration, "--slots"),
        ({"context_window": 10**6}, EngineFailed, "--context-window 8192"),
        ({"arguments": ("--tensor-parallel-size", "7", "--enforce-eager")}, EngineFailed, "divides 9"),
    ],
    ids=["unknown", "own", "window", "heads"],
)
async def test_what_ends_the_start_is_explained(
    settings: dict[str, Any], kind: type[Exception], says: str
) -> None:
    for name, value in real_vllm.environment().items():
        os.environ.setdefault(name, value)
    with pytest.raises(kind, match=says):
        await make(**settings).start()


@inside
async def test_a_window_that_does_not_fit_the_memory_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in real_vllm.environment().items():
        os.environ.setdefault(name, value)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    arguments = ("--enforce-eager", "--kv-cache-memory-bytes", "50000000")
    with pytest.raises(EngineFailed, match=r"window of 8192 tokens needs .* give --context-window \d+"):
        await make(context_window=8192, arguments=arguments).start()
