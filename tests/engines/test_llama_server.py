"""``RemoteEngine`` on the real server of llama.cpp, which runs inside xllamacpp on a private socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engines import contract
from engines.contract import Check, Subject
from engines.small_model import FRANCE, ITALY, JAPAN, small_model
from singletree.llamacpp.engine import LlamaCppEngine
from singletree.llamacpp.llama_server import LlamaServer
from singletree.prompts.tokenizer.tokenizer import load_tokenizer
from singletree.remote.detection import detect_server
from singletree.remote.engine import RemoteEngine
from singletree.remote.http_client import HttpTransport, over_unix
from singletree.remote.servers import PROBE_TEXT, probe_vocabulary

URL = "http://llama.test"
CHECKS = (
    contract.describes_itself,
    contract.ends_by_itself,
    contract.obeys_max_tokens,
    contract.ends_at_a_stop_token,
    contract.returns_log_probabilities,
    contract.knows_a_prompt_again,
    contract.refuses_what_does_not_fit,
)
"""Those that depend on the wire; the others run on the wire in memory, and on the embedded engine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def socket() -> AsyncIterator[str]:
    engine = LlamaCppEngine(small_model(), slots=2, context_window=2048, threads=1)
    await engine.start()
    assert engine._process is not None
    yield engine._process.socket
    await engine.close()


def transport(socket: str) -> HttpTransport:
    return HttpTransport(URL, connect=over_unix(socket))


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
    assert await detect_server(URL, transport=transport(socket)) == "llama-server"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(subject: Subject, check: Check) -> None:
    await check(subject)


@pytest.mark.asyncio(loop_scope="module")
async def test_it_reports_its_file_and_its_slots(subject: Subject) -> None:
    info = subject.engine.info()
    assert info.slots == 2
    assert info.checkpoint == str(small_model())
    assert info.name


@pytest.mark.asyncio(loop_scope="module")
async def test_it_reports_its_vocabulary(subject: Subject) -> None:
    assert isinstance(subject.engine, RemoteEngine)
    probe = probe_vocabulary("small", load_tokenizer(small_model()))
    assert probe.compare(await subject.engine.tokenize(PROBE_TEXT)) == "same"
