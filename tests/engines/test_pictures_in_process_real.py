"""Pictures with the real vLLM and SGLang in process, each in its own environment: ``make engines``.

Outside those environments, the tests here run this file inside them. The model has two layers with made-up weights.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engines import picture_loop, real_sglang, real_vllm
from engines.tiny_vlm import LOAD, MODEL, write_tiny_vlm
from server.picture_model import block, picture
from singletree.in_process.startup import EngineSettings

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]

INSIDE = next((name for name in ("sglang", "vllm") if importlib.util.find_spec(name) is not None), "")
inside = pytest.mark.skipif(not INSIDE, reason="runs in the engine's own environment")
outside = pytest.mark.skipif(bool(INSIDE), reason="runs outside the engine's environment")
SECONDS = 1800
WINDOW = 4096
GRANULARITY = {"vllm": 128, "sglang": 16}
"""How many tokens a block of the prefix cache has."""


def _run_inside(python: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-m", "engines", "-p", "no:cacheprovider", __file__],
        cwd=real_vllm.ROOT,
        env=environment,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0


@outside
async def test_all_of_this_file_in_the_environment_of_vllm() -> None:
    venv, _ = real_vllm.install_in_process()
    paths = os.pathsep.join((real_vllm.PYTHONPATH, str(real_vllm.install_eyes())))
    _run_inside(venv / "bin" / "python", {**real_vllm.environment(), "PYTHONPATH": paths})


@outside
async def test_all_of_this_file_in_the_environment_of_sglang() -> None:
    _run_inside(*real_sglang.sglang_program())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vlm(tmp_path_factory.mktemp("models") / MODEL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[Any]:
    if INSIDE == "sglang":
        from singletree.in_process.sglang_engine import InProcessSglangEngine

        given = (*real_sglang.IN_PROCESS, "--enable-multimodal", *LOAD)
        started: Any = InProcessSglangEngine(EngineSettings(str(folder), WINDOW, 8, given), name=MODEL)
    else:
        from singletree.in_process.vllm_engine import InProcessVllmEngine

        limits = json.dumps({"image": 4, "video": 0})
        given = ("--enforce-eager", *LOAD, "--limit-mm-per-prompt", limits)
        started = InProcessVllmEngine(EngineSettings(str(folder), WINDOW, 8, given), name=MODEL)
    await started.start()
    yield started
    await started.close()


@inside
async def test_a_picture_is_counted_cached_and_compared(engine: Any, folder: Path) -> None:
    async with picture_loop.seeing(engine, folder) as served:
        await picture_loop.a_picture_is_counted_cached_and_compared(served, GRANULARITY[INSIDE])


@inside
async def test_pictures_of_tool_results_are_counted_and_cached(engine: Any, folder: Path) -> None:
    async with picture_loop.seeing(engine, folder) as served:
        await picture_loop.pictures_of_tool_results_are_counted_and_cached(served, GRANULARITY[INSIDE])


@inside
async def test_text_that_reads_like_a_placeholder_is_text(engine: Any, folder: Path) -> None:
    async with picture_loop.seeing(engine, folder) as served:
        await picture_loop.text_that_reads_like_a_placeholder_is_text(served)


@inside
async def test_wrong_counts_are_refused(engine: Any) -> None:
    await picture_loop.wrong_counts_are_refused(engine)


@pytest.mark.skipif(INSIDE != "vllm", reason="SGLang gets all bytes each time")
async def test_a_picture_is_decoded_once(engine: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[bool]] = []
    made = engine._pictures._make_prompt

    def keep(token_ids: list[int], pictures: Any, cache_salt: str | None) -> Any:
        given.append([data is not None for _, data in pictures])
        return made(token_ids, pictures, cache_salt)

    monkeypatch.setattr(engine._pictures, "_make_prompt", keep)
    first = picture_loop.user(block(picture("navy", size=(56, 56))), "What is this?")
    async with picture_loop.seeing(engine, folder) as served:
        for _ in range(3):
            await picture_loop.ask(served, first)
    assert given == [[True], [False], [False]]
