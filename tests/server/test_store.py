"""The contract of the store on SQLite, in memory and in a file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from singletree.server.storage.response_store import Store

from .store_contract import *  # noqa: F403
from .store_contract import NOW, OpenStore, ids, item, texts, turn, whole

EARLIER_SCHEMA = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, created INTEGER NOT NULL, previous TEXT, conversation TEXT, body BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE items (
    at INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, response TEXT, conversation TEXT,
    is_output INTEGER NOT NULL, item BLOB NOT NULL
);
"""
"""The tables of responses, as version 0.1.0 made them."""


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


async def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(sqlite3.connect(path)) as earlier:
        earlier.executescript(EARLIER_SCHEMA)
        earlier.execute("INSERT INTO responses VALUES ('old', ?, NULL, NULL, x'7b7d')", (NOW,))
        for id, is_output in (("in0", 0), ("out0", 1)):
            row = (id, "old", None, is_output, item(id).json)
            query = "INSERT INTO items (id, response, conversation, is_output, item) VALUES (?, ?, ?, ?, ?)"
            earlier.execute(query, row)
        earlier.commit()
    store = Store(path, 2**30)
    await store.put(replace(whole(1, "a", "b"), previous="old"))
    assert ids(await store.history("old")) == ["in0", "out0"]
    assert ids(await store.input_items("old")) == ["in0"]
    assert len(await store.history("r1") or []) == 5
    assert await store.delete("old")
    assert await store.item("in0") is None
    store.close()


async def test_an_input_that_another_process_deleted_is_written_again(tmp_path: Path) -> None:
    here, there = Store(tmp_path / "s.sqlite", 2**30), Store(tmp_path / "s.sqlite", 2**30)
    await here.put(whole(0, "a", "b"))
    await there.delete("r0")
    await here.put(whole(1, "a", "b", "c"))
    assert texts(await there.input_items("r1")) == ["a", "b", "c"]
    here.close()
    there.close()
