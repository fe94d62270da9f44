"""The contract of the store on a real PostgreSQL, and what happens when it is away."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from scale.databases import Database
from server.store_contract import *  # noqa: F403
from server.store_contract import OpenStore, ids, turn
from singletree.errors import BadConfiguration, Overloaded
from singletree.stored_responses import database as database_module
from singletree.stored_responses.database import PostgresDatabase
from singletree.stored_responses.store import Store

pytestmark = pytest.mark.scale


@pytest.fixture
def open_store(postgres: Database) -> Iterator[OpenStore]:
    opened: list[Store] = []

    def open(limit: int) -> Store:
        database = PostgresDatabase(postgres.url)
        database.measured_every = 1
        for table in ("responses", "items", "conversations", "inputs", "response_inputs"):
            database.execute(f"DELETE FROM {table}")
        opened.append(Store(database, limit))
        return opened[-1]

    yield open
    for store in opened:
        store.close()


async def test_another_server_finds_a_response(open_store: OpenStore, postgres: Database) -> None:
    here, there = open_store(2**30), Store(PostgresDatabase(postgres.url), 2**30)
    here.put_soon(turn(0))
    await here.settled()
    assert ids(await there.history("r0")) == ["in0", "out0"]
    there.put_soon(turn(1, previous="r0"))
    await there.settled()
    assert ids(await here.history("r1")) == ["in0", "out0", "in1", "out1"]
    there.close()


async def test_a_restarted_database_is_connected_again(open_store: OpenStore, postgres: Database) -> None:
    store = open_store(2**30)
    await store.put(turn(0))
    postgres.stop()
    postgres.start()
    assert ids(await store.history("r0")) == ["in0", "out0"]


async def test_one_that_is_away_is_refused_in_words(
    open_store: OpenStore, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(2**30)
    monkeypatch.setattr(database_module, "_PAUSE_SECONDS", 1000.0)
    postgres.stop()
    try:
        for _ in range(2):
            with pytest.raises(Overloaded, match="cannot be used now"):
                await store.history("r0")
        store.put_soon(turn(1))
        await store.settled()
    finally:
        postgres.start()
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 2000)
    await store.put(turn(2))
    assert ids(await store.history("r2")) == ["in2", "out2"]


def test_a_wrong_url_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="--store-url"):
        PostgresDatabase("postgresql://[")
