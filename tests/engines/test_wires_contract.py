"""Every wire keeps the promises of every engine, over a server in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engines.contract import CHECKS, Check, Subject
from engines.wire_servers import DIALECTS, DialectTransport, remote_engine, started
from singletree.remote.engine import RemoteEngine

QUESTION = (1, 4093, 198, 1780, 314, 260, 3575)


@pytest_asyncio.fixture(params=list(DIALECTS), scope="module", loop_scope="module")
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    dialect = DIALECTS[request.param]

    # vLLM serves both of its endpoints: generations whose prompt is scored need the lesser one.
    others = [DIALECTS["vllm-completions"]] if request.param == "vllm-generate" else []

    def make() -> RemoteEngine:
        return remote_engine(DialectTransport(dialect, others=others))

    engine = await started(DialectTransport(dialect, others=others))
    yield Subject(engine, make, QUESTION, [(*QUESTION, i) for i in range(3)])
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(subject: Subject, check: Check) -> None:
    await check(subject)
