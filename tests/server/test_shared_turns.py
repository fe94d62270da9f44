"""Turns that one process generated are exact in another one, and a store that fails stops nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from singletree.conversation import Text, Turn
from singletree.prompts.replay.turn_keys import HistoryDigests
from singletree.prompts.replay.turn_memory import GeneratedTurn
from singletree.server.telemetry import STORE_FAILURES
from singletree.turn_stores.store import SqliteTurnStore, StoredTurn, StoreUnavailable
from singletree.turn_stores.stored_memory import StoredTurnMemory

from .carrying import capsules
from .turn_stores import conversation, generated

ROOM = 2**20

Process = Callable[[], StoredTurnMemory]


@pytest.fixture
def process(tmp_path: Path) -> Process:
    """Start one more process that shares the turns."""
    return lambda: StoredTurnMemory(ROOM, SqliteTurnStore(tmp_path / "turns", ROOM), capsules())


def digest(turns: Sequence[Turn] = (Turn("user", (Text("Go on."),)),)) -> str:
    return HistoryDigests(turns)[len(turns)]


async def test_a_turn_is_found_by_another_process(process: Process) -> None:
    here, there = process(), process()
    by_id, by_text = generated("one", call="call_1"), generated("two", digest=digest())
    for each in (by_id, by_text):
        here.remember(each)
    await here.settled()
    for each in (by_id, by_text):
        turns, digests = conversation(each)
        assert there.find(turns[1], digests[1]) is None
        there.refresh(turns, digests)
        found = there.find(turns[1], digests[1])
        assert found is not None
        assert (found.turn, found.token_ids, found.opening) == (each.turn, each.token_ids, each.opening)


async def test_rivals_have_the_same_order_everywhere(process: Process) -> None:
    here, there, third = process(), process(), process()
    ours, theirs = (
        generated(text, digest=digest(), reasoning="Hm.") for text in ("Yes, sure.", "Yes,  sure.")
    )
    here.remember(ours)
    await here.settled()
    there.remember(theirs)
    await there.settled()
    turns, digests = conversation(ours)
    for memory in (here, there, third):
        memory.refresh(turns, digests)
        found, is_complete = memory.find_candidates(turns[1], digests[1], lambda turn, known: True)
        assert [each.token_ids for each in found] == [ours.token_ids, theirs.token_ids]
        assert is_complete


def is_certain(memory: StoredTurnMemory, known: GeneratedTurn) -> bool:
    """Whether the turn is found, and no other one that was forgotten can be meant."""
    turns, digests = conversation(known)
    memory.refresh(turns, digests)
    found, is_complete = memory.find_candidates(turns[1], digests[1], lambda turn, known: True)
    assert [each.token_ids for each in found] == [known.token_ids]
    return is_complete


async def test_a_rival_that_the_file_forgot_counts_too(tmp_path: Path) -> None:
    """It may be the one that comes back, so no process may be sure of the one that is left."""
    path, room = tmp_path / "turns", 250
    rivals = [generated(text, digest=digest()) for text in ("Yes.", "Yes .", "Y es.")]

    async def remember(turn: GeneratedTurn) -> None:
        memory = StoredTurnMemory(ROOM, SqliteTurnStore(path, room), capsules())
        memory.remember(turn)
        await memory.settled()

    for each in rivals:
        await remember(each)
    assert not is_certain(StoredTurnMemory(ROOM, SqliteTurnStore(path, room), capsules()), rivals[-1])
    await remember(generated("Something else.", digest="elsewhere"))
    await remember(rivals[0])
    assert is_certain(StoredTurnMemory(ROOM, SqliteTurnStore(path, room), capsules()), rivals[0]), (
        "nothing is left of a key whose turns are all gone"
    )


async def test_a_rival_that_was_evicted_alone_counts_too() -> None:
    """Redis evicts turns one by one, and keeps their names."""
    store = BrokenStore()
    store.is_up = True
    rivals = [generated(text, digest=digest(), reasoning="Hm.") for text in ("Yes.", "Y es.")]
    for each in rivals:
        memory = StoredTurnMemory(ROOM, store, capsules())
        memory.remember(each)
        await memory.settled()
    store.evicted = {store.added[0].name}
    assert not is_certain(StoredTurnMemory(ROOM, store, capsules()), rivals[1])
    store.evicted.clear()


async def test_one_turn_of_two_processes_is_one_turn(process: Process) -> None:
    here, there = process(), process()
    for memory in (here, there):
        memory.remember(generated("Fine.", digest=digest()))
        await memory.settled()
    turns, digests = conversation(generated("Fine.", digest=digest()))
    for memory in (here, there):
        memory.refresh(turns, digests)
        before = memory.find(turns[1], digests[1])
        memory.refresh(turns, digests)
        assert memory.find(turns[1], digests[1]) is before is not None


async def test_another_key_reads_nothing(tmp_path: Path, process: Process) -> None:
    here = process()
    known = generated("Secret words.", digest=digest())
    here.remember(known)
    await here.settled()
    stranger = StoredTurnMemory(ROOM, SqliteTurnStore(tmp_path / "turns", ROOM), capsules(key=b"x" * 32))
    turns, digests = conversation(known)
    stranger.refresh(turns, digests)
    assert stranger.find(turns[1], digests[1]) is None
    here.close()
    stranger.close()
    assert b"Secret" not in (tmp_path / "turns").read_bytes()


class BrokenStore:
    """A store that answers when it is told to."""

    is_remote = False

    def __init__(self) -> None:
        self.is_up = False
        self.asked = 0
        self.added: list[StoredTurn] = []
        self.evicted: set[bytes] = set()

    def add(self, turn: StoredTurn) -> None:
        self._ask()
        self.added.append(turn)

    def names(self, keys: Sequence[bytes]) -> list[list[bytes]]:
        self._ask()
        return [[each.name for each in self.added if key in each.keys] for key in keys]

    def turns(self, names: Sequence[bytes]) -> dict[bytes, StoredTurn]:
        self._ask()
        return {each.name: each for each in self.added if each.name in {*names} - self.evicted}

    def close(self) -> None:
        pass

    def _ask(self) -> None:
        self.asked += 1
        if not self.is_up:
            raise StoreUnavailable("it is down")


def failures(access: str) -> float:
    return next(
        s.value for m in STORE_FAILURES.collect() for s in m.samples if s.labels == {"access": access}
    )


async def test_a_store_that_is_down_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store, time = BrokenStore(), [0.0]
    memory = StoredTurnMemory(ROOM, store, capsules(), now=lambda: time[0])
    first, second = generated("one", call="call_1"), generated("two", call="call_2")
    STORE_FAILURES.labels("write").inc(0)
    before = failures("write")
    for each in (first, second):
        memory.remember(each)
        await memory.settled()
    turns, digests = conversation(first, second)
    memory.refresh(turns, digests)
    assert memory.find(turns[1], digests[1]) is first
    assert (store.asked, failures("write") - before, len(caplog.records)) == (1, 1, 1)
    store.is_up, time[0] = True, 60.0
    memory.remember(third := generated("three", call="call_3"))
    await memory.settled()
    # What was generated meanwhile is stored, too.
    other = StoredTurnMemory(ROOM, store, capsules())
    turns, digests = conversation(first, second, third)
    other.refresh(turns, digests)
    assert [other.find(turn) is not None for turn in turns[1::2]] == [True, True, True]


async def test_what_a_store_missed_is_stored_at_the_end_and_nothing_after_it() -> None:
    store = BrokenStore()
    memory = StoredTurnMemory(ROOM, store, capsules(), now=lambda: 0.0)
    memory.remember(generated("one", call="call_1"))
    await memory.settled()
    assert store.added == []
    store.is_up = True
    memory.close()
    assert len(store.added) == 1
    # A turn may end while the server does.
    memory.remember(generated("two", call="call_2"))
    await memory.settled()
    assert len(store.added) == 1


async def test_the_least_recently_used_conversation_goes_first(tmp_path: Path) -> None:
    path, room = tmp_path / "turns", 820
    memory = StoredTurnMemory(ROOM, SqliteTurnStore(path, room), capsules())
    chains: dict[str, list[GeneratedTurn]] = {"a": [], "b": [], "c": []}
    for name in "aabbcc":
        turn = generated(f"{name}{len(chains[name])}" * 300, call=f"call_{name}{len(chains[name])}")
        memory.remember(turn, behind=chains[name])
        chains[name].append(turn)
    await memory.settled()
    fresh = StoredTurnMemory(ROOM, SqliteTurnStore(path, room), capsules())
    kept: dict[str, list[bool]] = {}
    for name, chain in chains.items():
        turns, digests = conversation(*chain)
        fresh.refresh(turns, digests)
        kept[name] = [fresh.find(turn) is not None for turn in turns[1::2]]
    with closing(sqlite3.connect(path)) as file:
        [size] = file.execute("SELECT sum(bytes) FROM stored_turns").fetchone()
    assert size <= room
    assert kept == {"a": [True, False], "b": [True, True], "c": [True, True]}
