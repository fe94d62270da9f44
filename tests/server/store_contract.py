"""The contract of the store, for every database: chains of responses, conversations, references, and what is dropped.

A module that imports these tests has a fixture ``open_store``, which opens an empty store with a limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from singletree.protocols.responses.state import (
    InputForms,
    ItemForm,
    input_forms,
    item_digest,
    joined_forms,
)
from singletree.stored_responses import tables
from singletree.stored_responses.store import Store
from singletree.stored_responses.tables import KEPT_SECONDS, StoredConversation, StoredItem, StoredResponse

OpenStore = Callable[[int], Store]

NOW = int(time.time())


def item(id: str, size: int = 0) -> StoredItem:
    return StoredItem(id, b'{"id":"%b","text":"%b"}' % (id.encode(), b"x" * size))


def asking(id: str, size: int = 0) -> InputForms:
    """An input of one item that has an id."""
    asked = item(id, size)
    return joined_forms(InputForms(), [ItemForm({}, id, "", asked.json, b"", item_digest(asked.json))])


def turn(number: int, *, previous: str | None = None, size: int = 0, created: int = NOW) -> StoredResponse:
    asked, answer = asking(f"in{number}", size), item(f"out{number}", size)
    return StoredResponse(f"r{number}", created, b"{}", asked, [answer], previous)


def ids(items: list[bytes] | None) -> list[str]:
    assert items is not None
    return [one.split(b'"')[3].decode() for one in items]


@pytest.fixture
def store(open_store: OpenStore) -> Store:
    """A store with room for everything."""
    return open_store(2**30)


async def test_a_response_follows_those_before_it(store: Store) -> None:
    for number in range(3):
        await store.put(turn(number, previous=f"r{number - 1}" if number else None))
    assert ids(await store.history("r2")) == ["in0", "out0", "in1", "out1", "in2", "out2"]
    assert ids(await store.input_items("r2")) == ["in0", "out0", "in1", "out1", "in2"]
    assert ids(await store.history("r1")) == ["in0", "out0", "in1", "out1"]


async def test_two_may_follow_one(store: Store) -> None:
    await store.put(turn(0))
    await store.put(turn(1, previous="r0"))
    await store.put(turn(2, previous="r0"))
    assert ids(await store.history("r2")) == ["in0", "out0", "in2", "out2"]


async def test_what_was_put_soon_is_found_at_once(store: Store) -> None:
    store.put_soon(turn(0))
    assert await store.body("r0") == b"{}"


async def test_an_item_is_found_by_its_id(store: Store) -> None:
    await store.put(turn(0))
    assert await store.item("out0") == item("out0").json
    assert await store.item("none") is None


async def test_a_chain_with_a_hole_is_no_history(store: Store) -> None:
    await store.put(turn(0))
    await store.put(turn(1, previous="r0"))
    assert await store.delete("r0")
    assert await store.history("r1") is None
    assert await store.body("r1") == b"{}"
    assert await store.item("in0") is None
    assert not await store.delete("r0")


async def test_the_oldest_go_when_it_is_full(open_store: OpenStore) -> None:
    store = open_store(400_000)
    for number in range(20):
        await store.put(turn(number, size=20_000, created=NOW + number))
    assert await store.body("r0") is None
    assert await store.body("r19") == b"{}"
    left = [number for number in range(20) if await store.body(f"r{number}") is not None]
    assert left == list(range(left[0], 20))
    assert len(left) >= 5


async def test_one_that_is_larger_than_the_limit_is_kept_until_the_next(open_store: OpenStore) -> None:
    store = open_store(1)
    await store.put(turn(0))
    assert await store.body("r0") == b"{}"
    await store.put(turn(1))
    assert await store.body("r0") is None


async def test_a_response_is_kept_for_its_time(store: Store) -> None:
    await store.put(turn(0, created=NOW - KEPT_SECONDS - 1))
    await store.put(turn(1))
    assert await store.body("r0") is None


async def test_a_conversation_takes_the_items_of_its_responses(store: Store) -> None:
    await store.add_conversation(StoredConversation("c", NOW, b"{}"), [item("a")])
    await store.put(StoredResponse("r", NOW, b"{}", asking("b"), [item("c")], conversation="c"))
    assert ids(await store.items_of("c")) == ["a", "b", "c"]
    assert ids(await store.input_items("r")) == ["a", "b"]
    await store.delete_item("c", "b")
    assert ids(await store.items_of("c")) == ["a", "c"]
    await store.delete("r")
    assert ids(await store.items_of("c")) == ["a", "c"], "they are the conversation's now"
    await store.set_metadata("c", b'{"a":"b"}')
    assert await store.conversation("c") == StoredConversation("c", NOW, b'{"a":"b"}')
    await store.delete_conversation("c")
    assert await store.conversation("c") is None
    assert await store.items_of("c") == []
    assert await store.item("a") is None, "nobody has it any more"


async def test_conversations_go_when_no_response_is_left_to_go(open_store: OpenStore) -> None:
    store = open_store(200_000)
    await store.add_conversation(StoredConversation("c", NOW, b"{}"), [item("a", 300_000)])
    await store.put(turn(0))
    assert await store.conversation("c") is None
    assert await store.body("r0") is not None


async def test_ids_with_odd_characters_are_ids(store: Store) -> None:
    assert await store.body("r\0\ud800") is None
    await store.put(StoredResponse("odd", NOW, b"{}", asking("a"), [item("b")], conversation="none"))
    assert ids(await store.items_of("none")) == ["a", "b"]


async def test_what_was_put_has_settled(store: Store) -> None:
    await store.settled()
    store.put_soon(turn(0))
    await store.settled()
    assert store.is_settled


def whole(number: int, *texts: str) -> StoredResponse:
    """A response to a request that sends its whole input, without ids."""
    input = input_forms([{"role": "user", "content": text} for text in texts])
    return StoredResponse(f"r{number}", NOW, b"{}", input, [item(f"out{number}")])


def texts(items: list[bytes] | None) -> list[str]:
    assert items is not None
    return [json.loads(one)["content"][0]["text"] for one in items]


async def rows(store: Store, table: str) -> int:
    found = await store._thread.run(store._tables._fetch_all, f"SELECT count(*) FROM {table}", ())
    return int(found[0][0])


async def test_an_input_is_stored_once(store: Store) -> None:
    await store.put(whole(0, "a", "b"))
    await store.put(whole(1, "a", "b"))
    await store.put(whole(2, "a", "b", "c", "d"))
    await store.put(whole(3, "a", "x", "b"))
    assert await rows(store, "items") == 3 + 1 + 3 + 4
    assert texts(await store.input_items("r1")) == ["a", "b"]
    assert texts(await store.input_items("r2")) == ["a", "b", "c", "d"]
    assert texts(await store.input_items("r3")) == ["a", "x", "b"]
    assert ids(await store.history("r2"))[-1] == "out2"
    listed = await store.input_items("r2") or []
    assert len({one["id"] for one in map(json.loads, listed)}) == 4
    assert await store.item(json.loads(listed[0])["id"]) == listed[0]


async def test_equal_items_of_one_input_have_ids_of_their_own(store: Store) -> None:
    await store.put(whole(0, "a", "a"))
    await store.put(whole(1, "a", "a", "a"))
    assert len({json.loads(one)["id"] for one in await store.input_items("r1") or []}) == 3


async def test_a_shared_input_stays_until_its_last_response_goes(store: Store) -> None:
    await store.put(whole(0, "a"))
    await store.put(whole(1, "a", "b"))
    await store.put(whole(2, "a", "b", "c"))
    await store.delete("r0")
    await store.delete("r1")
    assert texts(await store.input_items("r2")) == ["a", "b", "c"]
    assert ids(await store.history("r2"))[-1] == "out2"
    await store.put(whole(3, "a"))
    await store.delete("r2")
    assert texts(await store.input_items("r3")) == ["a"]
    await store.delete("r3")
    assert [await rows(store, table) for table in ("responses", "inputs", "response_inputs", "items")] == [
        0
    ] * 4
    await store.put(whole(4, "a", "b"))
    assert texts(await store.input_items("r4")) == ["a", "b"], "what is gone is written again"


async def test_a_response_that_is_put_again_keeps_its_input(store: Store) -> None:
    await store.put(whole(0, "a", "b"))
    before = await store.input_items("r0")
    await store.put(whole(0, "a", "b"))
    assert await store.input_items("r0") == before
    assert await rows(store, "items") == 3
    await store.delete("r0")
    assert await rows(store, "inputs") == 0


async def test_a_response_follows_one_with_a_shared_input(store: Store) -> None:
    await store.put(whole(0, "a"))
    await store.put(whole(1, "a", "b"))
    await store.put(whole(2, "a")._replace(previous="r1"))
    assert texts(await store.input_items("r1")) == ["a", "b"]
    history = [json.loads(one) for one in await store.history("r2") or []]
    written = [one["id"] if one["id"].startswith("out") else one["content"][0]["text"] for one in history]
    assert written == ["a", "b", "out1", "a", "out2"]


async def test_a_long_chain_of_inputs_begins_anew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_LONGEST_INPUT_CHAIN", 3)
    words = [f"w{number}" for number in range(8)]
    for number in range(1, 9):
        await store.put(whole(number, *words[:number]))
    for number in range(1, 9):
        assert texts(await store.input_items(f"r{number}")) == words[:number]
    for number in range(1, 9):
        await store.delete(f"r{number}")
    assert [await rows(store, table) for table in ("inputs", "items")] == [0, 0]


async def test_sharing_makes_room(open_store: OpenStore) -> None:
    store = open_store(400_000)
    long = "x" * 100_000
    for number in range(40):
        await store.put(whole(number, long, *map(str, range(number))))
    assert await store.body("r0") == b"{}", "all 40 take little more than one"
    for number in range(40, 44):
        await store.put(whole(number, f"{number}{long}"))
    assert await store.body("r0") is None
    assert texts(await store.input_items("r43")) == [f"43{long}"]
