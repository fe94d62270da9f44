"""The files that the server writes: who may read them, and what is told of a disk that does not take them."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from singletree.errors import BadConfiguration, Overloaded, without_passwords
from singletree.private_files import create_private
from singletree.records import record_queue
from singletree.records.record_queue import AnswerRecords, RecordFile
from singletree.server.http.app import App
from singletree.server.http.run import close_service, open_service
from singletree.server.settings.config import Config
from singletree.server.sparse_log import QUIET_SECONDS, OncePerMinute
from singletree.stored_responses.database import SqliteDatabase
from singletree.stored_responses.store import Store

from .memory import Client
from .serving import body
from .store_contract import turn

KEY = ("k" * 32,)


@pytest.fixture
def _generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_generous_umask")
async def test_every_file_is_for_its_owner_only(tmp_path: Path) -> None:
    config = Config(
        engine="scripted",
        capsule_key=KEY,
        store_path=tmp_path / "made/below/store.sqlite",
        turn_memory_path=tmp_path / "turns.sqlite",
        trace_path=tmp_path / "trace.jsonl",
        trace_limit=4000,
        script_log=tmp_path / "script.jsonl",
    )
    service = await open_service(config, lambda line: None)
    try:
        client = Client(App(service))
        for _ in range(9):
            reply = await client.post("/v1/responses", body("/v1/responses", "[[echo:x]]", model="scripted"))
            assert reply.status == 200
        assert service.store is not None
        await service.store.settled()
        open_to_others = _open_to_others(tmp_path)
    finally:
        await close_service(service)
    assert {"store.sqlite", "turns.sqlite", "trace.jsonl", "trace.jsonl.1", "script.jsonl"} <= _names(
        tmp_path
    )
    assert open_to_others == _open_to_others(tmp_path) == {"made"}  # a parent folder, like those that exist


def _names(folder: Path) -> set[str]:
    return {each.name for each in folder.rglob("*")}


def _open_to_others(folder: Path) -> set[str]:
    """Return the names of files that others may read. A file that is renamed meanwhile is left to the next look."""
    names = set()
    for each in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if each.stat().st_mode & 0o077:
                names.add(each.name)
    return names


@pytest.mark.usefixtures("_generous_umask")
def test_the_permissions_of_a_file_that_exists_stay(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.touch(0o640)
    create_private(shared)
    assert shared.stat().st_mode & 0o777 == 0o640


def test_one_line_a_minute_says_how_many_there_were() -> None:
    now = 0.0
    lines = OncePerMinute(lambda: now)
    assert lines.take() == ""
    assert [lines.take() for _ in range(3)] == [None] * 3
    now += QUIET_SECONDS
    assert lines.take() == " (3 more since the last such line)"
    now += QUIET_SECONDS
    assert lines.take() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_records_on_a_full_disk_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    file = RecordFile(Path("/dev/full"), 2**20)
    with caplog.at_level(logging.WARNING, record_queue.__name__):
        for _ in range(20):
            file.write(AnswerRecords([{"x": "y"}]))
    [line] = caplog.messages
    assert line == "--trace-path /dev/full: records of requests are lost: No space left on device"
    assert caplog.records[0].exc_info is None
    file._handler.stream = None  # What is in its buffer would be written by its end.


async def test_responses_on_a_full_disk_are_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = SqliteDatabase(tmp_path / "s.sqlite")
    store = Store(database, 2**30)
    await store.put(turn(0))
    pages = await store._thread.run(database.fetch, "PRAGMA page_count")
    await store._thread.run(database.fetch, f"PRAGMA max_page_count = {pages[0][0]}")
    large = turn(1)._replace(body=b"x" * 100_000)
    for _ in range(20):
        store.put_soon(large)
        await store.settled()
    with pytest.raises(Overloaded, match="cannot be used now"):
        await store.put(large)
    assert await store.body("r0") is not None, "what is stored can be read"
    [line] = caplog.messages
    assert "responses could not be stored: database or disk is full; they cannot be continued" in line
    store.close()


def _no_database(folder: Path) -> dict[Path, str]:
    (folder / "text").write_bytes(b"no database " * 100)
    (folder / "file").touch()
    with closing(sqlite3.connect(folder / "old.sqlite")) as old, old:
        old.execute("CREATE TABLE responses (other TEXT)")
    return {
        folder / "text": "file is not a database",
        folder: "Is a directory",
        folder / "file/s.sqlite": "a folder of its path is a file",
        folder / "old.sqlite": "no such column",
        Path("/proc/nowhere/s.sqlite"): "No such file",
    }


async def test_a_store_that_cannot_be_used_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for path, reason in _no_database(tmp_path).items():
        with pytest.raises(BadConfiguration) as refused:
            await open_service(Config(engine="scripted", store_path=path), lambda line: None)
        assert refused.value.message.startswith(f"--store-path {path}: ")
        assert reason.lower() in refused.value.message.lower()
        assert "--no-store" in refused.value.message
    # What nobody asked for must not end the start.
    monkeypatch.setenv("SINGLETREE_CACHE", str(tmp_path / "file"))
    caplog.clear()
    service = await open_service(Config(engine="scripted"), lambda line: None)
    assert service.store is not None
    assert await service.store.opened() is None
    await close_service(service)
    [warning] = [record.message for record in caplog.records]
    assert "responses are not stored" in warning
    assert "a folder of its path is a file" in warning


async def test_a_database_that_does_not_answer_ends_the_start(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    url = f"postgresql://user:pass%40word@/db?host={tmp_path}"
    with pytest.raises(BadConfiguration) as refused:
        await open_service(Config(engine="scripted", store_url=url), lambda line: None)
    assert refused.value.message.startswith(f"--store-url postgresql://user:***@/db?host={tmp_path}: ")
    assert "pass" not in refused.value.message
    with pytest.raises(BadConfiguration) as refused:
        await open_service(Config(engine="scripted", store_url="postgresql://u:pass@[h"), lambda line: None)
    assert "pass@" not in refused.value.message


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:secret@h:1/0", "redis://:***@h:1/0"),
        ("at redis://u:s@ec/ret@h:1/0!", "at redis://u:***@h:1/0!"),
        ("postgresql://u@h/d", "postgresql://u@h/d"),
        ("no url: a@b", "no url: a@b"),
    ],
)
def test_messages_show_no_passwords(text: str, shown: str) -> None:
    assert without_passwords(text) == shown
