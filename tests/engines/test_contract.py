"""Every engine that can run here, under the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import pytest_asyncio

from engines.contract import CHECKS, Check, Subject
from engines.letters import END, decode, encode
from engines.small_model import FRANCE, ITALY, JAPAN, small_model
from singletree.engines.engine import Engine
from singletree.llamacpp.engine import LlamaCppEngine
from singletree.testing.scripted_engine import ScriptedEngine


def scripted() -> Engine:
    return ScriptedEngine(encode, decode, {"long": "a b c d e f g h " * 40}, delay=0.001, end_token_id=END)


def llamacpp() -> Engine:
    return LlamaCppEngine(small_model(), slots=3, context_window=2048, threads=1)


@asynccontextmanager
async def scripted_subject() -> AsyncIterator[Subject]:
    engine = scripted()
    await engine.start()
    ending = [encode(f"[[echo:the answer to {i}]]") for i in range(3)]
    yield Subject(engine, scripted, encode("go on [[script:long]]"), ending)
    await engine.close()


@asynccontextmanager
async def llamacpp_subject() -> AsyncIterator[Subject]:
    engine = llamacpp()
    await engine.start()
    yield Subject(engine, llamacpp, FRANCE, [FRANCE, ITALY, JAPAN])
    await engine.close()


@pytest_asyncio.fixture(params=[scripted_subject, llamacpp_subject], scope="module", loop_scope="module")
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    make: Callable[[], AbstractAsyncContextManager[Subject]] = request.param
    async with make() as made:
        yield made


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(subject: Subject, check: Check) -> None:
    await check(subject)
