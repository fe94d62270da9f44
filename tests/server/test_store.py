"""The contract of the store on SQLite, in memory and in a file."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest

from singletree.stored_responses import store as response_store
from singletree.stored_responses.database import SqliteDatabase
from singletree.stored_responses.store import Store

from .store_contract import *  # noqa: F403
from .store_contract import NOW, OpenStore, ids, item, rows, texts, turn, whole

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
    await store.put(whole(1, "a", "b")._replace(previous="old"))
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


async def test_responses_that_end_together_are_stored_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = 0
    transaction = SqliteDatabase.transaction

    def counted(database: SqliteDatabase) -> AbstractContextManager[None]:
        nonlocal transactions
        transactions += 1
        return transaction(database)

    monkeypatch.setattr(SqliteDatabase, "transaction", counted)
    here, there = Store(tmp_path / "s.sqlite", 2**30), Store(tmp_path / "s.sqlite", 2**30)
    for number in range(300):
        here.put_soon(whole(number, *(f"w{at}" for at in range(number % 7 + 1))))
        assert not here.is_settled
    await here.settled()
    assert here.is_settled
    assert transactions == 3
    for number in (0, 6, 150, 299):
        assert texts(await there.input_items(f"r{number}")) == [f"w{at}" for at in range(number % 7 + 1)]
    here.put_soon(turn(400))
    here.put_soon(turn(400, size=3))
    assert await here.item("out400") == item("out400", 3).json, "the last one of an id counts"
    for number in range(300):
        await there.delete(f"r{number}")
    await here.delete("r400")
    assert [await rows(here, table) for table in ("responses", "inputs", "response_inputs", "items")] == [
        0
    ] * 4
    here.close()
    there.close()


async def test_a_response_is_stored_soon_although_nobody_asks(tmp_path: Path) -> None:
    here, there = Store(tmp_path / "s.sqlite", 2**30), Store(tmp_path / "s.sqlite", 2**30)
    here.put_soon(turn(0))
    await asyncio.sleep(2 * response_store._GROUP_SECONDS)
    assert here._thread._timer is None
    here.close()
    assert await there.body("r0") == b"{}"
    here = Store(tmp_path / "s.sqlite", 2**30)
    here.put_soon(turn(1))
    here.close()
    assert await there.body("r1") == b"{}", "closing stores what waits"
    there.close()


async def test_an_input_that_was_deleted_is_written_once_for_a_group(tmp_path: Path) -> None:
    here, there = Store(tmp_path / "s.sqlite", 2**30), Store(tmp_path / "s.sqlite", 2**30)
    await here.put(whole(0, "a"))
    await there.delete("r0")
    for number, words in enumerate((("a", "b"), ("a", "c"), ("a",), ("a", "b")), 1):
        here.put_soon(whole(number, *words))
    await here.settled()
    assert [texts(await there.input_items(f"r{number}")) for number in range(1, 5)] == [
        ["a", "b"],
        ["a", "c"],
        ["a"],
        ["a", "b"],
    ]
    for number in range(1, 5):
        await there.delete(f"r{number}")
    assert [await rows(here, table) for table in ("inputs", "items")] == [0, 0]
    here.close()
    there.close()


async def test_a_group_that_cannot_be_stored_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "s.sqlite").write_bytes(b"no database " * 100)
    store = Store(tmp_path / "s.sqlite", 2**30)
    store.put_soon(turn(0))
    await store.settled()
    assert "responses could not be stored" in caplog.text
    store.close()
