"""``RemoteEngine`` on the real server of llama.cpp, which runs inside xllamacpp on a private socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engines import contract
from engines.contract import Check, Subject
from engines.small_model import FRANCE, ITALY, JAPAN, small_model
from singletree.engines.detection import detect_server
from singletree.engines.llamacpp.engine import LlamaCppEngine
from singletree.engines.llamacpp.server import LlamaServer
from singletree.engines.remote.engine import RemoteEngine
from singletree.engines.remote.http_client import HttpTransport, MakeConnection
from singletree.engines.remote.http_connection import HttpConnection

URL = "http://llama.test"
CHECKS = (
    contract.tells_itself,
    contract.ends_by_itself,
    contract.obeys_max_tokens,
    contract.ends_at_a_stop_token,
    contract.tells_log_probabilities,
    contract.knows_a_prompt_again,
    contract.refuses_what_does_not_fit,
)
"""Those that depend on the wire; the others run on the wire in memory, and on the embedded engine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def socket() -> AsyncIterator[str]:
    engine = LlamaCppEngine(small_model(), slots=2, threads=1)
    await engine.start()
    assert engine._process is not None
    yield engine._process.socket
    await engine.close()


def transport(socket: str) -> HttpTransport:
    async def connect(make: MakeConnection) -> HttpConnection:
        return (await asyncio.get_running_loop().create_unix_connection(make, socket))[1]

    return HttpTransport(URL, connect=connect)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(socket: str) -> AsyncIterator[Subject]:
    def make() -> RemoteEngine:
        return RemoteEngine(LlamaServer(), URL, transport=transport(socket))

    engine = make()
    await engine.start()
    yield Subject(engine, make, FRANCE, [FRANCE, ITALY, JAPAN])
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_it_is_found_out_what_answers(socket: str) -> None:
    assert isinstance(await detect_server(URL, transport=transport(socket)), LlamaServer)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(subject: Subject, check: Check) -> None:
    await check(subject)


@pytest.mark.asyncio(loop_scope="module")
async def test_it_tells_its_file_and_its_slots(subject: Subject) -> None:
    info = subject.engine.info()
    assert info.slots == 2
    assert info.checkpoint == str(small_model())
    assert info.name
