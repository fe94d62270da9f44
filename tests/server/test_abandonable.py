"""Long work that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from singletree.errors import WeightsUnavailable
from singletree.server.models import model_source
from singletree.server.models.model_source import run_abandonable
from singletree.server.settings.config import Config


@pytest.mark.parametrize(
    ("engine", "work"),
    [("llamacpp", "resolve.resolve"), ("vllm", "resolve.resolve"), ("auto", "engine_choice.choose_engine")],
)
def test_a_stopped_start_does_not_wait_for_a_download(
    engine: Any, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, is_over = threading.Event(), threading.Event()
    came_to_an_end: list[bool] = []

    def download(*_: object, **__: object) -> None:
        begun.set()
        came_to_an_end.append(is_over.wait(10))

    async def stopped() -> None:
        config = Config(model="org/model", engine=engine)
        start = asyncio.ensure_future(model_source.find_model_source(config, lambda *_: None))
        await asyncio.to_thread(begun.wait, 10)
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await start

    monkeypatch.setattr(model_source, "check_installed", lambda engine: None)
    monkeypatch.setattr(f"singletree.model_files.{work}", download)
    asyncio.run(stopped())
    assert came_to_an_end == []
    is_over.set()


async def test_what_the_work_returns_or_raises() -> None:
    def fail() -> None:
        raise WeightsUnavailable("nothing there")

    assert await run_abandonable(lambda: 3) == 3
    with pytest.raises(WeightsUnavailable, match="nothing there"):
        await run_abandonable(fail)
