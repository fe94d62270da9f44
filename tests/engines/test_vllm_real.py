"""``RemoteEngine`` on vLLM on a real vLLM server, which ``real_vllm.py`` installs and starts: ``make engines``.

``SINGLETREE_VLLM_URL`` names a server that runs already and serves SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from engines import real_vllm
from engines.contract import CHECKS, Check, Subject, keeps_tenants_apart
from engines.vllm_recording import (
    END_OF_TURN,
    FRANCE,
    ITALY,
    JAPAN,
    OF,
    PARIS,
    QUESTION,
    SCHEMA,
    STRUCTURAL_TAG,
    CompletionsOnly,
    greedy,
    vllm_engine,
)
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, GenerationJob
from singletree.errors import ContextOverflow, EngineFailed, InvalidRequest
from singletree.remote.detection import detect_server
from singletree.remote.engine import RemoteEngine
from singletree.remote.vllm.server import VllmServer

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if given := os.environ.get("SINGLETREE_VLLM_URL"):
        yield given
    else:
        with real_vllm.running("--enable-scale-out") as server:
            yield server.url


@pytest.fixture
async def engine(url: str) -> AsyncIterator[RemoteEngine]:
    engine = vllm_engine(url, slots=8)
    await engine.start()
    yield engine
    await engine.close()


async def collect(
    engine: RemoteEngine, sampling: Sampling, prompt: Sequence[int] = QUESTION, **more: Any
) -> list[Chunk]:
    return [
        c async for c in engine.generate(GenerationJob(prompt, sampling, f"r{time.monotonic_ns()}", **more))
    ]


def tokens(chunks: list[Chunk]) -> list[int]:
    return [t for c in chunks for t in c.token_ids]


def _ask(url: str, body: Any = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: bytes = answer.read()
        return found


async def text(url: str, chunks: list[Chunk]) -> str:
    """What the chunks spell, without the end of the turn."""
    body = {"model": real_vllm.MODEL, "tokens": [t for t in tokens(chunks) if t != END_OF_TURN]}
    prompt: str = json.loads(await asyncio.to_thread(_ask, f"{url}/detokenize", body))["prompt"]
    return prompt


async def running(url: str) -> float:
    """How many generations the server is at."""
    page = (await asyncio.to_thread(_ask, f"{url}/metrics")).decode()
    return sum(
        float(n) for n in re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", page, re.M)
    )


async def becomes_idle(url: str) -> bool:
    for _ in range(50):
        if await running(url) == 0:
            return True
        await asyncio.sleep(0.1)
    return False


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[VllmServer, CompletionsOnly], ids=["generate", "completions"]
)
async def subject(url: str, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    def make() -> RemoteEngine:
        return RemoteEngine(request.param(), url, slots=8)

    engine = make()
    await engine.start()
    yield Subject(engine, make, QUESTION, [FRANCE, ITALY, JAPAN])
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_cache_salt_keeps_tenants_apart(subject: Subject) -> None:
    await keeps_tenants_apart(subject)


@pytest.mark.asyncio(loop_scope="module")
async def test_it_is_found_out_what_answers(url: str, subject: Subject) -> None:
    assert await detect_server(url) == "vllm"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(subject: Subject, check: Check) -> None:
    await check(subject)


async def test_info(engine: RemoteEngine) -> None:
    info = engine.info()
    assert (info.name, info.context_window) == (real_vllm.MODEL, 4096)
    assert (info.details or {})["version"] == real_vllm.VLLM


async def test_an_answer_streams_token_by_token_and_ends_with_its_end_token(engine: RemoteEngine) -> None:
    chunks = await collect(engine, greedy())
    assert tokens(chunks) == PARIS
    assert chunks[-1].finish == "stop"
    assert len(chunks) > 3


async def test_length_and_stop_token(engine: RemoteEngine) -> None:
    chunks = await collect(engine, greedy(5))
    assert (tokens(chunks), chunks[-1].finish) == (PARIS[:5], "length")
    chunks = await collect(engine, greedy(), stop_token_ids=(OF,))
    assert (tokens(chunks), chunks[-1].finish) == (PARIS[:3], "stop")


async def test_the_second_time_the_prompt_is_cached(engine: RemoteEngine) -> None:
    prompt = [1000 + time.monotonic_ns() % 1000, *range(2000, 2400)]
    first, second = [(await collect(engine, greedy(1), prompt))[-1].cached_tokens for _ in range(2)]
    assert first == 0
    assert second is not None
    assert second >= 256


async def test_the_whole_window_can_be_used_and_no_more(engine: RemoteEngine) -> None:
    window = engine.info().context_window
    chunks = await collect(engine, greedy(10), [504] * (window - 1))
    assert (len(tokens(chunks)), chunks[-1].finish) == (1, "length")
    with pytest.raises(ContextOverflow):
        await collect(engine, greedy(10), [504] * window)


async def test_seed_repeats_and_temperature_varies(engine: RemoteEngine) -> None:
    hot = [
        tokens(await collect(engine, Sampling(max_tokens=24, temperature=1.5, seed=seed)))
        for seed in (1, 1, 2)
    ]
    assert hot[0] == hot[1] != hot[2]


async def test_logprobs(engine: RemoteEngine) -> None:
    chunks = await collect(engine, greedy(4, logprobs=3))
    rows = [row for c in chunks for row in c.logprobs or ()]
    assert [row[0][0] for row in rows] == tokens(chunks)
    assert all(len(row) == 3 and row[0][1] == max(lp for _, lp in row) <= 0 for row in rows)


async def test_logit_bias(engine: RemoteEngine) -> None:
    assert tokens(await collect(engine, greedy(2, logit_bias={OF: 100.0}))) == [OF, OF]


@pytest.mark.parametrize(
    ("constraint", "spells"),
    [
        (Constraint("json_schema", SCHEMA), r'\{\s*"city"\s*:\s*"[^"]{0,12}",\s*"n"\s*:\s*-?\d{1,}\s*\}'),
        (Constraint("regex", "[ab]{3,6}"), "[ab]{3,6}"),
        (Constraint("gbnf", 'root ::= "yes" | "no"'), "yes|no"),
        (Constraint("structural_tag", STRUCTURAL_TAG), r"(?s)<tool_call>\{.*\}</tool_call>"),
    ],
    ids=lambda c: c.kind if isinstance(c, Constraint) else "",
)
async def test_constraint(engine: RemoteEngine, url: str, constraint: Constraint, spells: str) -> None:
    chunks = await collect(engine, greedy(80), constraint=constraint)
    assert chunks[-1].finish == "stop"
    assert re.fullmatch(spells, await text(url, chunks))


@pytest.mark.parametrize(
    ("sampling", "more"),
    [
        (Sampling(max_tokens=2, temperature=-1.0), {}),
        (Sampling(max_tokens=2, logprobs=1000), {}),
        (Sampling(max_tokens=2), {"constraint": Constraint("gbnf", "root ::= ( ")}),
        (Sampling(max_tokens=2), {"constraint": Constraint("json_schema", {"type": "nonsense"})}),
        (Sampling(max_tokens=2), {"constraint": Constraint("structural_tag", {"type": "structural_tag"})}),
    ],
)
async def test_refusals_leave_the_server_well(engine: RemoteEngine, sampling: Sampling, more: Any) -> None:
    with pytest.raises(InvalidRequest):
        await collect(engine, sampling, **more)
    assert tokens(await collect(engine, greedy())) == PARIS


async def test_priority_is_accepted(engine: RemoteEngine) -> None:
    assert tokens(await collect(engine, greedy(), priority=-5)) == PARIS


async def test_many_at_once(engine: RemoteEngine) -> None:
    answers = await asyncio.gather(*(collect(engine, greedy()) for _ in range(12)))
    assert [tokens(a) for a in answers] == [PARIS] * 12


@pytest.mark.parametrize("how", ["abort", "aclose", "cancel"])
async def test_leaving_frees_the_server(engine: RemoteEngine, url: str, how: str) -> None:  # C40
    stream = engine.generate(GenerationJob(QUESTION, greedy(ignore_eos=True), "leaving"))
    await anext(stream)
    assert await running(url) == 1
    if how == "abort":
        await engine.abort("leaving")
        chunks = [c async for c in stream]
        assert chunks[-1].finish == "cancelled"
    elif how == "aclose":
        await stream.aclose()
    else:
        reading = asyncio.create_task(collect(engine, greedy(ignore_eos=True)))
        await asyncio.sleep(0.5)
        await stream.aclose()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert await becomes_idle(url)


async def test_closing_the_engine_frees_the_server(url: str) -> None:
    engine = vllm_engine(url)
    await engine.start()
    stream = engine.generate(GenerationJob(QUESTION, greedy(ignore_eos=True), "closing"))
    await anext(stream)
    await engine.close()
    with pytest.raises(EngineFailed, match="closed"):
        assert [c async for c in stream]
    assert await becomes_idle(url)


async def test_a_server_that_is_not_there() -> None:
    with pytest.raises(EngineFailed, match="cannot be reached"):
        await vllm_engine("http://127.0.0.1:9").start()
