"""The turns in a file: a restart forgets nothing, and who has not the key reads nothing."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from singletree.conversation import Reasoning, Text, ToolCall, Turn
from singletree.errors import BadConfiguration
from singletree.prompts.replay.generation_prompt import GenerationPrompt
from singletree.prompts.replay.turn_memory import GeneratedTurn
from singletree.server.models.config import Config
from singletree.server.models.served_models import load_models
from singletree.server.models.turn_journal import JournalledMemory

from .carrying import INTERLEAVED, capsules, last_prompt, server
from .serving import TOKENIZER
from .test_replay import PATHS, Session

ROOM = 2**20


@contextmanager
def memory(path: Path, room: int = ROOM, **sealing: Any) -> Iterator[JournalledMemory]:
    kept = JournalledMemory(room, path, capsules(**sealing))
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
        count: int = file.execute("SELECT count(*) FROM turns").fetchone()[0]
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
            await Session(served, path).send(session.said)
            whole = before + TOKENIZER.encode(INTERLEAVED)
            assert last_prompt(served)[: len(whole)] == whole


def test_the_file_tells_nothing(tmp_path: Path) -> None:
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
        file.execute("UPDATE turns SET sealed = substr(sealed, 1, 60) WHERE id = 1")
        file.execute("UPDATE turns SET sealed = x'00' WHERE id = 2")
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
    with memory(path, room=5_000):
        pass
    assert 0 < rows(path) < before


def test_half_a_character_is_not_written_and_breaks_nothing(tmp_path: Path) -> None:
    odd = Turn("assistant", (ToolCall("\ud800", "{}", "call_9"),))
    with memory(tmp_path / "t") as kept:
        kept.remember(GeneratedTurn(odd, GenerationPrompt(), array("I", [1])))
        kept.remember(known(0))
    with memory(tmp_path / "t") as kept:
        assert kept.find(known(0).turn) == known(0)


def test_a_disk_that_fails_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with memory(tmp_path / "t") as kept:
        with closing(sqlite3.connect(tmp_path / "t")) as file, file:
            file.execute("DROP TABLE turns")
        kept.remember(known(0))
        assert kept.find(known(0).turn) is not None
    assert "they are lost at a restart" in caplog.text


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database " * 100, encoding="utf-8")
    for path, why in (
        (tmp_path / "text", "not a database"),
        (tmp_path, "directory"),
        (tmp_path / "a/b", "No such"),
    ):
        with pytest.raises(BadConfiguration, match=why):
            JournalledMemory(ROOM, path, capsules())


async def test_a_server_keeps_its_turns_where_it_is_told(tmp_path: Path) -> None:
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


def _said(conversation: str, number: int) -> GeneratedTurn:
    call = ToolCall("get", "{}", f"call_{conversation}{number}")
    return GeneratedTurn(Turn("assistant", (call,)), GenerationPrompt(), array("I", range(300)))


def test_a_restart_keeps_the_order_in_which_turns_go(tmp_path: Path) -> None:
    """The file holds what the memory holds, and a smaller memory lets go of the same turns as the old one would."""
    path = tmp_path / "t"
    said = {name: [_said(name, number) for number in range(6)] for name in "ab"}
    with memory(path) as kept:
        for number in range(6):  # the two take turns, and b has the last one
            for turns in said.values():
                kept.remember(turns[number], behind=turns[:number])
        kept.remember(extra := _said("a", 6), behind=said["a"])  # but then a goes on
        said["a"].append(extra)
        size = kept.bytes
    for room, left in ((size - 1, 5), (size // 2 + size // 4, 2), (size // 3, 0)):
        with memory(path, room=room) as kept:
            found = [each for each in said["b"] if kept.find(each.turn) is not None]
            assert found == said["b"][: len(found)], "the head of the older conversation stays"
            assert len(found) == left
            heads = [kept.find(each.turn) is not None for each in said["a"]]
            assert heads == sorted(heads, reverse=True)
            assert kept.bytes <= room
        assert rows(path) == len(found) + sum(heads)


def test_what_leaves_the_memory_leaves_the_file(tmp_path: Path) -> None:
    said = [_said("a", number) for number in range(50)]
    with memory(tmp_path / "t", room=20_000) as kept:
        for number, each in enumerate(said):
            kept.remember(each, behind=said[:number])
        held = [kept.find(each.turn) is not None for each in said]
    assert 0 < sum(held) < 50
    assert held == sorted(held, reverse=True)
    assert rows(tmp_path / "t") == sum(held)


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
