"""``RemoteEngine`` on a real SGLang server, which ``real_sglang.py`` installs and starts: ``make engines``.

``SINGLETREE_SGLANG_URL`` names a server that runs already and serves SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from engines import real_sglang
from engines.contract import CHECKS, Check, Subject, collect, keeps_tenants_apart, tokens_of
from engines.vllm_recording import FRANCE, ITALY, JAPAN, PARIS, QUESTION, SCHEMA, greedy
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, GenerationJob
from singletree.errors import InvalidRequest
from singletree.remote.detection import detect_server
from singletree.remote.engine import RemoteEngine
from singletree.remote.sglang import SglangServer

pytestmark = pytest.mark.engines

_PROMPT = 400


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if given := os.environ.get("SINGLETREE_SGLANG_URL"):
        yield given
    else:
        with real_sglang.running_sglang() as server:
            yield server.url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(url: str) -> AsyncIterator[Subject]:
    engine = RemoteEngine(SglangServer(), url)
    await engine.start()
    yield Subject(engine, lambda: RemoteEngine(SglangServer(), url), QUESTION, [FRANCE, ITALY, JAPAN])
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(subject: Subject, check: Check) -> None:
    await check(subject)


async def ask(
    subject: Subject, sampling: Sampling, prompt: Sequence[int] = QUESTION, **more: Any
) -> list[Chunk]:
    return await collect(subject.engine.generate(GenerationJob(prompt, sampling, "r", **more)))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_cache_salt_keeps_tenants_apart(subject: Subject) -> None:
    await keeps_tenants_apart(subject)


@pytest.mark.asyncio(loop_scope="module")
async def test_it_is_found_out_what_answers(url: str, subject: Subject) -> None:
    assert await detect_server(url) == "sglang"
    info = subject.engine.info()
    assert (info.name, info.context_window, info.slots) == (real_sglang.MODEL, 4096, 8)
    assert (info.details or {})["version"] == real_sglang.SGLANG


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_ends_with_its_end_token(subject: Subject) -> None:
    chunks = await ask(subject, greedy())
    assert tokens_of(chunks) == PARIS


@pytest.mark.asyncio(loop_scope="module")
async def test_priorities_and_seeds_are_accepted(subject: Subject) -> None:
    assert tokens_of(await ask(subject, greedy(3), priority=5)) == PARIS[:3]
    assert len(tokens_of(await ask(subject, Sampling(max_tokens=3, seed=2**70, temperature=1.0)))) == 3


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("constraint", "length"),
    [
        (Constraint("json_schema", SCHEMA), 64),
        (Constraint("regex", "[ab]{3,6}"), 8),
        (Constraint("gbnf", 'root ::= "yes" | "no"'), 4),
    ],
    ids=lambda c: c.kind if isinstance(c, Constraint) else "",
)
async def test_constraint(subject: Subject, constraint: Constraint, length: int) -> None:
    free = tokens_of(await ask(subject, greedy(length)))
    bound = tokens_of(await ask(subject, greedy(length), constraint=constraint))
    assert bound
    assert bound != free


@pytest.mark.asyncio(loop_scope="module")
async def test_a_grammar_that_is_none_is_refused_and_the_server_is_well(subject: Subject) -> None:
    with pytest.raises(InvalidRequest):
        await ask(subject, greedy(4), constraint=Constraint("regex", "(["))
    assert tokens_of(await ask(subject, greedy())) == PARIS


async def cached_after_others(engine: RemoteEngine, session: str, first: int, closes: str = "") -> int:
    """The tokens of a prompt that the engine still has after two others, for which its cache has no room beside it.

    ``closes`` is the URL of a server that is told after the first one that the session is over.
    """
    prompts = [[*range(start, start + _PROMPT)] for start in (first, first + 5000, first + 10_000)]
    for prompt, name in zip(prompts, (session, "", ""), strict=True):
        await collect(engine.generate(GenerationJob(prompt, greedy(2), "r", session=name)))
        if closes and name:
            body = json.dumps({"session_id": name}).encode()
            request = urllib.request.Request(
                f"{closes}/close_session", body, {"content-type": "application/json"}
            )
            (await asyncio.to_thread(urllib.request.urlopen, request, timeout=60)).close()
    again = await collect(engine.generate(GenerationJob(prompts[0], greedy(2), "r", session=session)))
    return max(chunk.cached_tokens or 0 for chunk in again)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_session_has_is_evicted_last() -> None:
    """``session_id`` reaches a server that describes the field: prompts without a name displace none of a session."""
    with real_sglang.running_sglang("--enable-session-radix-cache", "--max-total-tokens", "1024") as server:
        engine = RemoteEngine(SglangServer(), server.url)
        await engine.start()
        kept = [await cached_after_others(engine, *each) for each in (("", 1000), ("s", 20_000))]
        closed = await cached_after_others(engine, "s", 1500, server.url)
        again = await cached_after_others(engine, "s", 1500)
        await engine.close()
    assert kept[0] < real_sglang.PAGE
    assert kept[1] > _PROMPT - 2 * real_sglang.PAGE
    assert closed < real_sglang.PAGE, "a session that was closed is evicted as a prompt without a name"
    assert again > _PROMPT - 2 * real_sglang.PAGE, "a name may come again"
