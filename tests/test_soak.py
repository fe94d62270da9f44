"""The soak: what counts as growth, which failures are excused, and which answers are wrong."""

from __future__ import annotations

import functools
import json
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from benchmarks.counted_server import _CACHE_ENTRIES, _CACHE_PAGES, _count, _shrink_caches, _shrink_tables
from benchmarks.soak import Client, Reading, Troubles, Wrong, growth
from benchmarks.vllm_stub import Asked, Player
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from singletree.checking.returned_turns import ReturnedBlock
from singletree.lru import LruCache
from singletree.prompts.tokenizer.detokenizer import TokenTexts
from singletree.server.answers import response
from singletree.server.models import chat_format

FLAT = [300, 400, 401, 400, 402, 401, 400, 401, 400, 401]
SWINGING = [9, 3, 5, 4, 6, 3, 5, 4, 5, 4]


def readings(held: Sequence[float], sockets: Sequence[int]) -> list[Reading]:
    return [
        Reading(number / 100, {"held": mib, "resident": 500.0}, {"sockets": count}, {"x.Leak": 100 * number})
        for number, (mib, count) in enumerate(zip(held, sockets, strict=True))
    ]


def test_what_swings_does_not_grow() -> None:
    assert growth(readings(FLAT, SWINGING))[1] == []


def test_what_grows_is_named() -> None:
    slopes, found = growth(readings([300 + 5.0 * number for number in range(10)], SWINGING))
    assert slopes == {"held": pytest.approx(500), "resident": 0}
    assert found == ["held memory: +500 MiB an hour, +25.0 MiB in 3 minutes", "objects: +500 of x.Leak"]
    _, found = growth(readings(FLAT, list(range(10))))
    assert found[0] == "sockets: [4, 5] to begin with, [8, 9] at the end"


async def test_a_pool_may_have_as_many_threads_as_it_states(tmp_path: Path) -> None:
    def room() -> int:
        _count(tmp_path / "counts.json")
        return int(json.loads((tmp_path / "counts.json").read_bytes())["room of pools"])

    before = room()
    with ThreadPoolExecutor(3) as pool:
        assert room() == before + 3
        pool.submit(int).result()
        assert room() == before + 2
    assert room() == before


def test_nothing_that_has_a_limit_takes_hours_to_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {
        (LruCache, "__init__"),
        (functools, "lru_cache"),
        (sqlite3, "connect"),
        (TokenTexts, "__missing__"),
        (response, "_FINISHED_JOBS"),
        (chat_format, "_PROMPT_BYTES"),
    }
    for owner, name in changed:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # It is put back at the end.
    _shrink_caches()
    _shrink_tables()
    assert functools.lru_cache(1024)(abs).cache_info().maxsize == _CACHE_ENTRIES
    with closing(sqlite3.connect(":memory:")) as database:
        assert database.execute("PRAGMA cache_size").fetchone() == (_CACHE_PAGES,)
    texts = TokenTexts((), {7: "a"}.get, "byte_level")
    assert (texts[7], texts[8], len(texts)) == ("a", "", 0)


def test_a_failure_is_excused_only_in_a_trouble() -> None:
    troubles = Troubles()
    assert not troubles.excuse(0.0)
    with troubles.now():
        assert troubles.excuse(0.0)


@pytest.mark.parametrize("number", range(3))
def test_an_answer_is_that_of_the_script_or_wrong(number: int) -> None:
    client = Client(1, number, Troubles())
    blocks = [ReturnedBlock(kind, text) for kind, text in client.expected]
    client.compare(blocks, is_whole=True)
    client.compare([blocks[0], ReturnedBlock("text", blocks[1].text[:5])], is_whole=False)
    for wrong in (blocks[:-1], [*blocks, blocks[0]], [blocks[1], *blocks[1:]]):
        with pytest.raises(Wrong, match="the script was"):
            client.compare(wrong, is_whole=True)
    with pytest.raises(Wrong, match="the beginning"):
        client.compare([blocks[0], ReturnedBlock("text", "\0")], is_whole=False)


def test_the_engine_goes_on_with_a_turn_that_another_one_began(tmp_path: Path) -> None:
    words = ["<|im_end|>", "<|im_start|>", "assistant", "newline", "one", "two", "[[", "]]", "echo", ":"]
    tokenizer = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="newline"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    player = Player(tmp_path, "one two")

    def played(*had: int) -> list[int]:
        events, _ = player.play(Asked([1, 2, 3, *had]))
        texts = [event.removeprefix(b"data: ").split(b"\n\n")[0] for event in events]
        return [token for text in texts for token in json.loads(text)["choices"][0]["token_ids"]]

    assert played() == [4, 5, 0]
    assert played(4) == [5, 0]
    assert played(5) == [4, 5, 0]
