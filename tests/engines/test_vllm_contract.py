"""``RemoteEngine`` on vLLM keeps the promises of every engine, over a server that is in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engines.contract import CHECKS, Check, Subject
from engines.vllm_memory import ServingTransport
from engines.vllm_recording import QUESTION, vllm_engine
from singletree.remote.engine import RemoteEngine


def make() -> RemoteEngine:
    return vllm_engine(slots=4, transport=ServingTransport())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject() -> AsyncIterator[Subject]:
    engine = make()
    await engine.start()
    yield Subject(engine, make, QUESTION, [(*QUESTION, i) for i in range(3)])
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(subject: Subject, check: Check) -> None:
    await check(subject)
