"""Turns in a real Redis: the tests of shared turns, with its store."""

from __future__ import annotations

import pytest

from scale.databases import Database
from server.carrying import capsules
from server.test_shared_turns import (
    Process,
    test_a_turn_is_found_by_another_process,  # noqa: F401
    test_one_turn_of_two_processes_is_one_turn,  # noqa: F401
    test_rivals_have_the_same_order_everywhere,  # noqa: F401
)
from server.turn_stores import conversation, generated
from singletree.errors import BadConfiguration
from singletree.turn_stores.redis_store import RedisTurnStore
from singletree.turn_stores.store import RIVALS, StoredTurn
from singletree.turn_stores.stored_memory import StoredTurnMemory

pytestmark = pytest.mark.scale


@pytest.fixture
def process(redis: Database) -> Process:
    RedisTurnStore(redis.url)._client.flushall()
    return lambda: StoredTurnMemory(2**20, RedisTurnStore(redis.url), capsules())


async def test_a_restarted_store_is_connected_again(process: Process, redis: Database) -> None:
    here, there = process(), process()
    here.remember(generated("one", call="call_1"))
    await here.settled()
    redis.stop()
    redis.start()
    here.remember(known := generated("two", call="call_2"))
    await here.settled()
    turns, digests = conversation(known)
    there.refresh(turns, digests)
    assert there.find(turns[1]) is not None


def test_a_key_forgets_its_oldest_turns(process: Process, redis: Database) -> None:
    store = RedisTurnStore(redis.url)
    names = [bytes([number]) * 16 for number in range(RIVALS + 3)]
    for name in names:
        store.add(StoredTurn(name, name, b"sealed", [b"k" * 16]))
    assert store.names([b"k" * 16, b"none" * 4]) == [names[3:], []]
    assert set(store.turns([names[-1], b"none" * 4])) == {names[-1]}


def test_a_wrong_url_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="--turn-memory-url"):
        RedisTurnStore("http://127.0.0.1")
