"""Stores and processes that several keys share: each key finds its own there, and what has no key stays readable."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from singletree.processes.served_process import join_processes
from singletree.prompts.prompt_cache import PromptCache
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.capsules import Tampered
from singletree.server.settings.api_keys import ApiKeys
from singletree.server.settings.config import Config
from singletree.stored_responses.store import Store
from singletree.stored_responses.tables import StoredConversation
from singletree.turn_stores.store import SqliteTurnStore
from singletree.turn_stores.stored_memory import StoredTurnMemory

from .carrying import INTERLEAVED, PATHS, capsules, kept_in, last_prompt
from .carrying import Client as Harness
from .inspecting import peers_in_memory
from .owning import KEYS, client, tenants
from .serving import MODEL, TOKENIZER
from .store_contract import *  # noqa: F403
from .store_contract import NOW, OpenStore, asking, ids, item, turn
from .test_owners import CHAT, QUESTION, RESPONSES, SCRIPTS, chat, prompt, stored
from .turn_stores import conversation, generated, memory_in

ROOM = 2**20
A, B = ApiKeys(Config(api_key=KEYS)).owners


@pytest.fixture
def open_store() -> Iterator[OpenStore]:
    """The contract holds for one owner's part of a store."""
    opened: list[Store] = []

    def open(limit: int) -> Store:
        opened.append(store := Store(None, limit))
        return store.of(A)

    yield open
    for store in opened:
        store.close()


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[Store]:
    """A store in a file, with the responses of a server with one key."""
    store = Store(tmp_path / "responses.sqlite", 2**30)
    yield store
    store.close()


async def test_each_owner_has_what_it_stored(file_store: Store) -> None:
    parts = {"": file_store, A: file_store.of(A), B: file_store.of(B)}
    for owner, part in parts.items():
        await part.put(turn(0)._replace(body=json.dumps(owner).encode()))
        await part.put(turn(1, previous="r0"))
        await part.add_conversation(StoredConversation("c", NOW, b"{}"), [item("i")])
    for owner, part in parts.items():
        assert json.loads(await part.body("r0") or b"") == owner
        assert ids(await part.history("r1")) == ["in0", "out0", "in1", "out1"]
        assert ids(await part.items_of("c")) == ["i"]
    a, b = parts[A], parts[B]
    assert await a.delete("r1")
    await a.delete_conversation("c")
    assert await a.history("r1") is None
    assert await a.conversation("c") is None
    for other in (b, file_store):
        assert ids(await other.history("r1")) == ["in0", "out0", "in1", "out1"]
        assert await other.conversation("c") == StoredConversation("c", NOW, b"{}")
        assert await other.item("in0") is not None


async def test_equal_inputs_of_two_owners_are_not_one(file_store: Store) -> None:
    """Otherwise the one's items would go with the other's, or be named by the other's ids."""
    a, b = file_store.of(A), file_store.of(B)
    for part in (a, b):
        await part.put(turn(0)._replace(input=asking("same")))
        assert await part.item("same") is not None
    await a.delete("r0")
    assert await a.item("same") is None
    assert await b.item("same") is not None


async def test_the_file_of_one_key_has_the_same_form_and_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    before = Store(path, 2**30)
    await before.put(turn(0))
    before.close()
    several = Store(path, 2**30)
    own = several.of(A)
    assert await own.body("r0") is None, "it is nobody's"
    await own.put(turn(1))
    several.close()
    with closing(sqlite3.connect(path)) as file:
        assert sorted(id for (id,) in file.execute("SELECT id FROM responses")) == [f"{A}/r1", "r0"]
    after = Store(path, 2**30)
    assert await after.body("r0") == b"{}"
    assert await after.body("r1") is None
    after.close()


def keyed(path: Path, **sealing: Any) -> StoredTurnMemory:
    return StoredTurnMemory(ROOM, SqliteTurnStore(path, ROOM), capsules(**sealing))


async def test_processes_share_the_turns_of_an_owner_only_with_it(tmp_path: Path) -> None:
    here, there = keyed(tmp_path / "turns"), keyed(tmp_path / "turns")
    made = generated("one", call="call_1")
    here.of(A).remember(made)
    await here.of(A).settled()
    turns, digests = conversation(made)
    for owner, finds in ((B, False), ("", False), (A, True)):
        memory = there.of(owner)
        memory.refresh(turns, digests)
        assert (memory.find(turns[1], digests[1]) is not None) is finds
    assert here.of(A) is here.of(A)
    here.close()
    there.close()


async def test_turns_of_one_key_stay_in_a_shared_store(tmp_path: Path) -> None:
    before, after = keyed(tmp_path / "turns"), keyed(tmp_path / "turns")
    made = generated("one", call="call_1")
    before.remember(made)
    await before.settled()
    turns, digests = conversation(made)
    after.of(A).refresh(turns, digests)
    assert after.of(A).find(turns[1], digests[1]) is None
    after.refresh(turns, digests)
    assert after.find(turns[1], digests[1]) is not None
    before.close()
    after.close()


def test_a_file_gives_each_owner_its_turns_after_a_restart(tmp_path: Path) -> None:
    path, made = (
        tmp_path / "turns",
        {owner: generated(owner, call="call_1", reasoning=owner) for owner in ("", A, B)},
    )
    before = memory_in(path, owners=(A, B))
    for owner, each in made.items():
        before.of(owner).remember(each)
    before.close()
    after = memory_in(path, owners=(A, B))
    for owner, each in made.items():
        assert after.of(owner).find(each.turn) == each
    size = after.bytes
    after.close()
    # A server with one key keeps what it cannot read, and the owners find it again.
    alone = memory_in(path)
    assert alone.bytes < size
    assert alone.find(made[""].turn) == made[""]
    alone.close()
    again = memory_in(path, owners=(A, B))
    assert again.bytes == size
    again.close()


def test_memories_of_owners_share_one_limit() -> None:
    memory, turns = TurnMemory(8000), [generated("x" * 200, call=f"call_{i}") for i in range(20)]
    for i, each in enumerate(turns):
        memory.of((A, B)[i % 2]).remember(each)
        assert memory.bytes == memory.of(A).bytes <= 8000
    kept = [each for i, each in enumerate(turns) if memory.of((A, B)[i % 2]).find(each.turn)]
    assert kept == turns[-len(kept) :]
    assert 0 < len(kept) < 20
    assert memory.find(turns[-1].turn) is None


def test_checkpoints_of_prompts_are_found_by_their_owner_only() -> None:
    cache = PromptCache(1000)
    turns = conversation(generated("one"), generated("two"))[0]

    class Checkpoint:
        bytes = 10

    for owner in (A, B):
        assert cache.of(owner).new_turns(turns, (), None) == turns
        work = cache.of(owner).resume(turns)
        assert (work.replaces, work.run(_Keeps(Checkpoint()), 1)) == (None, 1)
        work.keep()
        assert list(cache.of(owner).new_turns([*turns, turns[0]], (), None)) == [turns[0]]
    assert cache.new_turns(turns, (), None) == turns
    assert cache.bytes == cache.of(A).bytes == 20


class _Keeps:
    """A stage with a checkpoint."""

    def __init__(self, checkpoint: Any) -> None:
        self._checkpoint = checkpoint

    def run(self, value: int, checkpoint: Any) -> tuple[int, Any]:
        assert checkpoint is None
        return value, self._checkpoint


def test_capsules_belong_to_an_owner() -> None:
    sealing = capsules(strict=True)
    a, b = sealing.of(A), sealing.of(B)
    made = a.seal_text(b"secret", b"p")
    assert capsules().of(A).open_text(made, b"p") == b"secret", "on every replica with the key"
    assert [each.open_text(made, b"p") for each in (b, sealing)] == [None, None]
    with pytest.raises(Tampered):
        a.open_text(made[:-2] + ("AA" if made[-2:] != "AA" else "BB"), b"p")
    earlier = sealing.seal_text(b"earlier", b"p")
    assert [each.open_text(earlier, b"p") for each in (a, b)] == [b"earlier"] * 2, "it was given out before"
    assert a.open_bytes(sealing.seal_bytes(b"stored", b"p"), b"p") is None, "but no store is read so"
    assert len({tuple(each.names("k", b"p")) for each in (a, b, sealing)}) == 3


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strict", [False, True])
async def test_a_capsule_of_another_key_gives_no_tokens_and_no_error(path: str, strict: bool) -> None:
    scripts = {"a": INTERLEAVED, "b": "Fine."}
    harness = Harness(path, "[[script:a,b]] How is it?", stream=False)
    sealing = capsules(strict=strict)
    async with tenants(scripts, capsules=sealing) as many:
        harness.take(await harness.ask(many.served._replace(client=many.a)))
        before = last_prompt(many.served)
    generated, found = TOKENIZER.encode(INTERLEAVED), []
    for key in KEYS:
        async with tenants(scripts, capsules=sealing) as many:
            await harness.ask(many.served._replace(client=client(many.served, key)))
            found.append(kept_in(last_prompt(many.served), before, generated) == len(generated))
    assert found == [True, False]


async def test_sessions_and_responses_of_an_owner_are_found_in_all_processes() -> None:
    flags = {"inspect": True, "inspect_content": True}
    async with tenants(SCRIPTS, flags) as here, tenants(SCRIPTS, flags) as there:
        for each, peers in zip((here, there), peers_in_memory(2), strict=True):
            join_processes(each.served.service, peers)
        await chat(here.a, QUESTION, **{"x-session-id": "main"})
        path = "/v1/singletree/sessions"
        assert [len((await who.get(path)).json["data"]) for who in (there.a, there.b, there.admin)] == [
            1,
            0,
            1,
        ]
        [shown] = (await there.admin.get(path)).json["data"]
        assert shown["id"] == f"{A}/main"
        for who, id, status in (
            (there.a, "main", 200),
            (there.b, "main", 404),
            (there.b, f"{A}/main", 404),
            (there.admin, f"{A}/main", 200),
        ):
            assert (await who.get(f"{path}/{id}")).status == status
        assert [(await who.get("/inspect/api/sessions")).json["total"] for who in (there.a, there.b)] == [
            1,
            0,
        ]
        # The request of another key takes no session along; that of its own does.
        for who, matched in ((there.b, False), (there.a, True)):
            reply = await chat(who, QUESTION, **{"x-session-id": "main"})
            assert (int(reply.headers["x-singletree-matched-tokens"]) > 0) is matched
        job = await stored(here.a, input="[[script:slow]]", background=True)
        for who, status in ((there.b, 404), (there.admin, 404)):
            assert (await who.get(f"{RESPONSES}/{job['id']}")).status == status
            assert (await who.post(f"{RESPONSES}/{job['id']}/cancel", b"")).status == status
        cancelled = await there.a.post(f"{RESPONSES}/{job['id']}/cancel", b"")
        assert cancelled.json["status"] == "cancelled"


async def test_an_equal_request_in_another_process_cancels_only_that_of_its_key() -> None:
    async with tenants(SCRIPTS) as here, tenants(SCRIPTS) as there:
        for each, peers in zip((here, there), peers_in_memory(2), strict=True):
            join_processes(each.served.service, peers)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "[[script:slow]]"}], "stream": True}
        headers = {"idempotency-key": "k"}
        async with here.a.open("POST", CHAT, body, headers) as (first, _):
            await first.started.wait()
            await there.b.post(CHAT, body, headers)
            assert b"[DONE]" in await first.rest()
        async with here.a.open("POST", CHAT, body, headers) as (first, _):
            await first.started.wait()
            await there.a.post(CHAT, body, headers)
            assert b"do not repeat this one" in await first.rest()


async def test_the_memory_of_a_checkpoint_is_kept_by_owner(tmp_path: Path) -> None:
    """With the configuration of a server: its file has the owners of its keys."""
    path = tmp_path / "turns.sqlite"
    for knows in (False, True):
        memory = memory_in(path, owners=(A, B))
        async with tenants(SCRIPTS, memory=memory, capsules=capsules()) as many:
            if not knows:
                await chat(many.a, QUESTION)
            for who, finds in ((many.b, False), (many.a, True)):
                await chat(who, QUESTION, "Plain answer.", "And now? [[script:t]]")
                assert ("A secret thought." in prompt(many.served)) is finds
        memory.close()
