"""The turns in a file: a restart forgets nothing, and who has not the key reads nothing."""

from __future__ import annotations

import sqlite3
import time
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from singletree.conversation import Reasoning, Text, ToolCall, Turn
from singletree.errors import BadConfiguration
from singletree.prompts.replay.turn_memory import GeneratedTurn, GenerationPrompt
from singletree.server.models.catalog import load_models
from singletree.server.settings.config import Config
from singletree.turn_stores.store import SqliteTurnStore
from singletree.turn_stores.stored_memory import StoredTurnMemory

from .carrying import INTERLEAVED, capsules, last_prompt, server
from .serving import TOKENIZER
from .test_replay import PATHS, Session
from .turn_stores import conversation, generated, memory_in

ROOM = 2**20


@contextmanager
def memory(path: Path, room: int = ROOM, **sealing: Any) -> Iterator[StoredTurnMemory]:
    kept = memory_in(path, room, **sealing)
    try:
        yield kept
    finally:
        kept.close()


def known(number: int, tokens: int = 200, history_digest: str = "") -> GeneratedTurn:
    call = ToolCall("get", f'{{"n":{number}}}', f"call_{number}", complete=number != 1)
    turn = Turn("assistant", (Reasoning("Secret thought."), Text("One."), call, Text("two")))
    return GeneratedTurn(
        turn,
        GenerationPrompt("<A>", "<think>\n", "<E><A><think>\n", "0"),
        array("I", [(number * 7919 + i * 104_729) % 50_000 for i in range(tokens)]),
        history_digest,
    )


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as file:
        count: int = file.execute("SELECT count(*) FROM stored_turns").fetchone()[0]
        return count


def test_a_turn_is_the_same_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "turns.sqlite"
    turns = [known(0), known(1, history_digest="a place"), known(2, tokens=1)]
    with memory(path) as before:
        for each in turns:
            before.remember(each)
    with memory(path) as after:
        assert [after.find(each.turn, each.history_digest) for each in turns] == turns
        size = after.bytes
    with memory(path) as again:
        assert again.bytes == size
    assert rows(path) == 3


@pytest.mark.parametrize("path", PATHS)
async def test_a_restart_loses_no_token(path: str, tmp_path: Path) -> None:  # C3
    """On every API, and whatever the harness wrote anew: it is as if the server had never stopped."""
    scripts: Any = {"a": INTERLEAVED, "b": "Fine."}
    with memory(tmp_path / "t") as kept:
        async with server(scripts, memory=kept, capsules=None) as served:
            session = Session(served, path)
            session.ask("[[script:a,b]] How is it?")
            await session.go_on()
            before = last_prompt(served)
    with memory(tmp_path / "t") as kept:
        async with server(scripts, memory=kept, capsules=None) as served:
            await Session(served, path).send(session.messages)
            whole = before + TOKENIZER.encode(INTERLEAVED)
            assert last_prompt(served)[: len(whole)] == whole


def test_the_file_reports_nothing(tmp_path: Path) -> None:
    with memory(tmp_path / "t") as kept:
        kept.remember(known(0))
    data = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"Secret" not in data
    assert b"call_0" not in data
    assert (tmp_path / "t").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("other", [{"key": b"o" * 32}, {"of": b"another model"}])
def test_another_key_or_model_passes_over_it(other: dict[str, Any], tmp_path: Path) -> None:
    with memory(tmp_path / "t") as kept:
        kept.remember(known(0))
    with memory(tmp_path / "t", **other) as kept:
        assert kept.find(known(0).turn) is None
    with memory(tmp_path / "t") as kept:
        assert kept.find(known(0).turn) == known(0)


def test_what_the_disk_spoilt_is_passed_over(tmp_path: Path) -> None:
    with memory(tmp_path / "t") as kept:
        for number in range(3):
            kept.remember(known(number))
    with closing(sqlite3.connect(tmp_path / "t")) as file, file:
        file.execute("UPDATE stored_turns SET sealed = substr(sealed, 1, 60) WHERE at = 1")
        file.execute("UPDATE stored_turns SET sealed = x'00' WHERE at = 2")
    with memory(tmp_path / "t") as kept:
        assert [kept.find(known(n).turn) is not None for n in range(3)] == [False, False, True]


def test_the_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with memory(path, room=20_000) as kept:
        for number in range(200):
            kept.remember(known(number))
        assert kept.bytes <= 20_000
    assert 0 < rows(path) < 70
    with memory(path, room=20_000) as kept:
        assert kept.find(known(199).turn) is not None
        assert kept.find(known(0).turn) is None
    before = rows(path)
    with memory(path, room=5_000) as kept:
        assert kept.bytes <= 5_000
        kept.remember(known(200, tokens=1))
    assert 0 < rows(path) < before


def test_half_a_character_is_not_written_and_breaks_nothing(tmp_path: Path) -> None:
    odd = Turn("assistant", (ToolCall("\ud800", "{}", "call_9"),))
    with memory(tmp_path / "t") as kept:
        kept.remember(GeneratedTurn(odd, GenerationPrompt(), array("I", [1])))
        kept.remember(known(0))
    with memory(tmp_path / "t") as kept:
        assert kept.find(known(0).turn) == known(0)


def test_a_turn_beyond_a_smaller_limit_is_left_out_alone(tmp_path: Path) -> None:
    with memory(tmp_path / "t") as before:
        before.remember(known(0))
        before.remember(known(1, tokens=60_000))
    with memory(tmp_path / "t", room=100_000) as after:
        assert after.find(known(0).turn) == known(0)
        assert after.find(known(1).turn) is None


def test_a_disk_that_fails_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with memory(tmp_path / "t") as kept:
        with closing(sqlite3.connect(tmp_path / "t")) as file, file:
            file.execute("DROP TABLE stored_turns")
        kept.remember(known(0))
        assert kept.find(known(0).turn) is not None
    assert "lost at a restart" in caplog.text
    assert len(caplog.records) == 1


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database " * 100, encoding="utf-8")
    for path, why in (
        (tmp_path / "text", "not a database"),
        (tmp_path, "directory"),
        (tmp_path / "a/b", "No such"),
    ):
        with pytest.raises(BadConfiguration, match=why):
            memory_in(path)
    with closing(sqlite3.connect(tmp_path / "other")) as file, file:
        file.execute("CREATE TABLE responses (id)")
    with pytest.raises(BadConfiguration, match="not a file of turns; give another path, or delete"):
        memory_in(tmp_path / "other")


async def test_a_server_keeps_its_turns_in_the_configured_file(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="--turn-memory-path needs --capsule-key"):
        Config(turn_memory_path=tmp_path / "t")
    config = Config(engine="scripted", turn_memory_path=tmp_path / "t", capsule_key=("a passphrase of ours",))
    for found in (None, known(0)):
        loaded = await load_models(config, lambda line: None)
        kept = loaded.models[0].memory
        assert kept is not None
        assert kept.find(known(0).turn) == found
        kept.remember(known(0))
        await loaded.close()


def _generated(conversation: str, number: int) -> GeneratedTurn:
    call = ToolCall("get", "{}", f"call_{conversation}{number}")
    return GeneratedTurn(Turn("assistant", (call,)), GenerationPrompt(), array("I", range(300)))


def test_a_restart_keeps_the_order_in_which_turns_go(tmp_path: Path) -> None:
    """The file holds what the memory holds, and a smaller memory lets go of the same turns as the old one would."""
    path = tmp_path / "t"
    fields = {name: [_generated(name, number) for number in range(6)] for name in "ab"}
    with memory(path) as kept:
        for number in range(6):  # the two take turns, and b has the last one
            for turns in fields.values():
                kept.remember(turns[number], behind=turns[:number])
        kept.remember(extra := _generated("a", 6), behind=fields["a"])  # but then a goes on
        fields["a"].append(extra)
        size = kept.bytes
    for room, left in ((size - 1, 5), (size // 2 + size // 4, 2), (size // 3, 0)):
        with memory(path, room=room) as kept:
            found = [each for each in fields["b"] if kept.find(each.turn) is not None]
            assert found == fields["b"][: len(found)], "the head of the older conversation stays"
            assert len(found) == left
            heads = [kept.find(each.turn) is not None for each in fields["a"]]
            assert heads == sorted(heads, reverse=True)
            assert kept.bytes <= room
        assert rows(path) == 13


def test_a_restart_finds_what_a_full_memory_held(tmp_path: Path) -> None:
    written = [_generated("a", number) for number in range(50)]
    with memory(tmp_path / "t", room=20_000) as kept:
        for number, each in enumerate(written):
            kept.remember(each, behind=written[:number])
        held = [kept.find(each.turn) is not None for each in written]
    assert 0 < sum(held) < 50
    assert held == sorted(held, reverse=True)
    with memory(tmp_path / "t", room=20_000) as kept:
        assert [kept.find(each.turn) is not None for each in written] == held


async def test_one_process_and_several_use_the_same_file(tmp_path: Path) -> None:
    path, made = tmp_path / "t", [known(number) for number in range(3)]
    with memory(path) as alone:
        alone.remember(made[0])
    shared = [StoredTurnMemory(ROOM, SqliteTurnStore(path, ROOM), capsules()) for _ in range(2)]
    shared[0].remember(made[1])
    await shared[0].settled()
    turns, digests = conversation(*made[:2])
    for each in shared:
        each.refresh(turns, digests)
        assert [each.find(turn) is not None for turn in turns[1::2]] == [True, True]
        each.close()
    with memory(path) as alone:
        assert [alone.find(each.turn) for each in made] == [*made[:2], None]


async def test_no_request_of_one_process_waits_for_the_file(tmp_path: Path) -> None:
    with (
        memory(tmp_path / "t") as kept,
        closing(sqlite3.connect(tmp_path / "t", isolation_level=None)) as file,
    ):
        file.execute("BEGIN EXCLUSIVE")
        kept.remember(known(0))
        started = time.monotonic()
        await kept.settled()
        kept.refresh(*conversation(known(0), known(1)))
        assert time.monotonic() - started < 0.1
        file.execute("COMMIT")
    with memory(tmp_path / "t") as kept:
        assert kept.find(known(0).turn) == known(0)


@pytest.mark.parametrize("room", [300, ROOM])
def test_rivals_keep_their_order_over_a_restart(tmp_path: Path, room: int) -> None:
    """And one that the file has no longer makes the others uncertain."""
    rivals = [generated("Yes.", digest="a place", reasoning=text) for text in ("Hm.", "So.", "Well.")]
    store = SqliteTurnStore(tmp_path / "t", room)
    before = StoredTurnMemory(ROOM, store, capsules())
    for each in rivals:
        before.remember(each)
    before.close()
    with memory(tmp_path / "t") as after:
        found, is_complete = after.find_candidates(rivals[0].turn, "a place", lambda turn, known: True)
    assert is_complete == (room == ROOM)
    assert found == (rivals if is_complete else rivals[-len(found) :])


def test_turns_of_another_key_make_room(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with memory(path, key=b"o" * 32) as kept:
        for number in range(20):
            kept.remember(known(number))
    with memory(path, room=8_000) as kept:
        for number in range(100, 103):
            kept.remember(known(number))
    assert rows(path) < 20 + 3
    with memory(path, room=8_000) as kept:
        assert all(kept.find(known(number).turn) for number in range(100, 103))
