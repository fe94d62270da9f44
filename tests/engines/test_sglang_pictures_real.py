"""Pictures on a real SGLang server, which runs a model of two layers with made-up weights: ``make engines``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from engines import picture_loop, real_sglang
from engines.tiny_vlm import LOAD, MODEL, write_tiny_vlm
from singletree.remote.engine import RemoteEngine
from singletree.remote.sglang import SglangServer

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]
PAGE = 16
CACHE = ("--mm-preprocess-cache-size-mb", "16")
"""With it SGLang compares the bytes of each picture with the hash that was sent."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("PIL")
    return write_tiny_vlm(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module", params=[(), CACHE], ids=["plain", "preprocess-cache"])
def url(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    with real_sglang.running_sglang("--enable-multimodal", *LOAD, *request.param, folder=folder) as server:
        yield server.url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(url: str) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(SglangServer(), url)
    await engine.start()
    yield engine
    await engine.close()


async def test_a_picture_is_counted_cached_and_compared(engine: RemoteEngine, folder: Path) -> None:
    async with picture_loop.seeing(engine, folder) as served:
        await picture_loop.a_picture_is_counted_cached_and_compared(served, PAGE)


async def test_pictures_of_tool_results_are_counted_and_cached(engine: RemoteEngine, folder: Path) -> None:
    async with picture_loop.seeing(engine, folder) as served:
        await picture_loop.pictures_of_tool_results_are_counted_and_cached(served, PAGE)


async def test_text_that_reads_like_a_placeholder_is_text(engine: RemoteEngine, folder: Path) -> None:
    async with picture_loop.seeing(engine, folder) as served:
        await picture_loop.text_that_reads_like_a_placeholder_is_text(served)


async def test_wrong_counts_are_refused(engine: RemoteEngine) -> None:
    await picture_loop.wrong_counts_are_refused(engine)
