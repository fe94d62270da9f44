"""Pictures on a real vLLM server, which runs a model of two layers with made-up weights: ``make engines``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from engines import picture_loop, real_vllm
from engines.tiny_vlm import LOAD, MODEL, WINDOW, write_tiny_vlm
from engines.vllm_recording import RecordingTransport, vllm_engine
from server.picture_model import block, picture
from singletree.remote.engine import RemoteEngine

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]
BLOCK = 128
"""vLLM caches whole blocks of so many tokens on a CPU."""
LIMITS = ("--limit-mm-per-prompt", json.dumps({"image": 4, "video": 0}))


class _KeepingTransport(RecordingTransport):
    """The real transport, which keeps what was sent last."""

    @property
    def sent(self) -> bytes:
        return self.posted().request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("PIL")
    return write_tiny_vlm(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    flags = ("--enable-scale-out", *LOAD, *LIMITS)
    with real_vllm.running(*flags, folder=folder, max_model_len=WINDOW) as server:
        yield server.url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def transport(url: str) -> _KeepingTransport:
    return _KeepingTransport(url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(url: str, transport: _KeepingTransport) -> AsyncIterator[RemoteEngine]:
    engine = vllm_engine(url, transport=transport)
    await engine.start()
    yield engine
    await engine.close()


async def test_a_picture_is_counted_cached_and_compared(engine: RemoteEngine, folder: Path) -> None:
    async with picture_loop.seeing(engine, folder) as served:
        await picture_loop.a_picture_is_counted_cached_and_compared(served, BLOCK)


async def test_pictures_of_tool_results_are_counted_and_cached(engine: RemoteEngine, folder: Path) -> None:
    async with picture_loop.seeing(engine, folder) as served:
        await picture_loop.pictures_of_tool_results_are_counted_and_cached(served, BLOCK)


async def test_text_that_reads_like_a_placeholder_is_text(engine: RemoteEngine, folder: Path) -> None:
    async with picture_loop.seeing(engine, folder) as served:
        await picture_loop.text_that_reads_like_a_placeholder_is_text(served)


async def test_wrong_counts_are_refused(engine: RemoteEngine) -> None:
    await picture_loop.wrong_counts_are_refused(engine)


async def test_bytes_go_over_the_wire_once(
    engine: RemoteEngine, folder: Path, transport: _KeepingTransport
) -> None:
    first = picture_loop.user(block(picture("navy", size=(56, 56))), "What is this?")
    async with picture_loop.seeing(engine, folder) as served:
        await picture_loop.ask(served, first)
        assert b"data:image/png" in transport.sent
        for _ in range(2):
            await picture_loop.ask(served, first)
            assert b"data:image/png" not in transport.sent
            assert b"sha256:" in transport.sent
