"""The contract of the store on SQLite, in memory and in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from singletree.server.storage.response_store import Store

from .store_contract import *  # noqa: F403
from .store_contract import OpenStore, ids, turn


@pytest.fixture
def open_store() -> Iterator[OpenStore]:
    opened: list[Store] = []

    def open(limit: int) -> Store:
        opened.append(Store(None, limit))
        return opened[-1]

    yield open
    for store in opened:
        store.close()


async def test_it_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "store.sqlite"
    first = Store(path, 2**30)
    await first.put(turn(0))
    first.close()
    again = Store(path, 2**30)
    assert ids(await again.history("r0")) == ["in0", "out0"]
    again.close()
    assert path.stat().st_mode & 0o077 == 0
