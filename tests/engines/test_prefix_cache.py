"""Prompts that were read survive a restart of llama.cpp: with the real engine, and the files alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from engines.contract import collect, tokens_of
from engines.tiny_shapes import tiny_model
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, GenerationJob
from singletree.errors import BadConfiguration
from singletree.llamacpp import prefix_cache, slots
from singletree.llamacpp.engine import LlamaCppEngine
from singletree.llamacpp.prefix_cache import PrefixCache
from singletree.llamacpp.prefix_files import PrefixFiles, pack_ids
from singletree.llamacpp.state_files import StateOrigin, read_state_origin
from singletree.model_files.saved_cache import open_folder

pytestmark = pytest.mark.embedded

PREAMBLE = [5 + at * 79 % 241 for at in range(60)]
OTHER = [6 + at * 60 % 239 for at in range(60)]
ITALY = [200, 11, 17, 202, 42, 31, 201]
ANSWER = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
LONGER = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
HERE = StateOrigin("model", "build", "settings", "here.gguf")
THERE = StateOrigin("other", "build", "settings", "there.gguf")
KEY = HERE.key


@pytest.fixture(autouse=True)
def short_prompts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "LEAST_TOKENS", 32)
    monkeypatch.setattr(prefix_cache, "LEAST_NEW_TOKENS", 16)
    monkeypatch.setattr(slots, "LEAST_TOKENS", 32)


@asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncIterator[LlamaCppEngine]:
    """The engine; at the end it has saved what was due."""
    settings = {"slots": 2, "context_window": 2048, **settings}
    made = LlamaCppEngine(tiny_model("dense"), prefix_cache_path=folder, threads=1, **settings)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def run(engine: LlamaCppEngine, prompt: Sequence[int], sampling: Sampling = ANSWER) -> list[Chunk]:
    return await collect(engine.generate(GenerationJob(prompt, sampling, "test")))


def cached(chunks: Sequence[Chunk]) -> int | None:
    return next(chunk.cached_tokens for chunk in chunks if chunk.cached_tokens is not None)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def saved(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.prefix"))


def disk(engine: LlamaCppEngine) -> PrefixCache:
    assert engine._states is not None
    assert engine._states.prefixes is not None
    return engine._states.prefixes


async def until_saved(engine: LlamaCppEngine) -> None:
    prefixes = disk(engine)
    assert prefixes._saving is not None
    async with asyncio.timeout(10):
        await prefixes._saving


async def test_a_preamble_survives_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    async with running(folder) as engine:
        first = await run(engine, [*PREAMBLE, *ITALY])
        assert cached(first) == 0
    [file] = saved(folder)
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    another = [*PREAMBLE, *ITALY[::-1]]
    async with running(folder) as engine:
        restored = await run(engine, another)
        assert cached(restored) == len(PREAMBLE)
    assert names(folder) == [file.name], "what is saved already is not saved again"
    change(file)
    async with running(folder) as engine:
        # llama.cpp ends its process on a damaged file, so it must not see one.
        read = await run(engine, another)
        assert cached(read) == 0
    assert tokens_of(restored) == tokens_of(read)
    [other] = names(folder)
    assert other != file.name, "the damaged file was removed, and the prompt was saved again"


async def test_each_turn_is_saved_and_goes_on_after_the_engine_was_killed(tmp_path: Path) -> None:
    prompt = [*PREAMBLE, *ITALY]
    async with running(tmp_path) as engine:
        for _ in range(3):
            prompt += [*tokens_of(await run(engine, prompt, LONGER)), *ITALY]
            await until_saved(engine)
            assert len(saved(tmp_path)) == 1, "one state has the whole conversation"
        assert engine._process is not None
        os.kill(engine._process.pid, signal.SIGKILL)
        await engine._process.exit_reason(10)
        restored = await run(engine, prompt, LONGER)
        assert cached(restored) == len(prompt) - len(ITALY) - 1
    async with running(tmp_path / "empty") as engine:
        read = await run(engine, prompt, LONGER)
    assert (cached(read), tokens_of(read)) == (0, tokens_of(restored))


async def test_saves_wait_for_the_budget_but_not_at_the_end(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        disk(engine)._next_save = monotonic() + 3600
        await run(engine, PREAMBLE)
        await asyncio.sleep(0.5)
        assert names(tmp_path) == []
    assert len(saved(tmp_path)) == 1


async def test_a_state_that_loses_its_slot_is_saved_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "_LONGEST_DELAY", 3600.0)
    async with running(tmp_path, slots=2) as engine, endless(engine):
        await run(engine, PREAMBLE)
        assert names(tmp_path) == []
        await run(engine, OTHER)
        async with asyncio.timeout(10):
            await asyncio.gather(*disk(engine)._writing)
        assert len(saved(tmp_path)) == 1


async def test_short_prompts_leave_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        await run(engine, ITALY)
    assert names(tmp_path) == []


async def test_nothing_is_restored_that_is_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "singletree.llamacpp.prefix_cache")
    async with running(tmp_path) as engine:
        await run(engine, PREAMBLE)
        await until_saved(engine)
        await run(engine, OTHER)
        assert cached(await run(engine, [*PREAMBLE, *ITALY])) == len(PREAMBLE)
    assert [record for record in caplog.records if "restored" in record.getMessage()] == []


async def test_it_is_restored_beside_a_generation_that_runs(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        await run(engine, PREAMBLE)
    async with running(tmp_path, context_window=2048) as engine:
        endless = Sampling(temperature=0.0, max_tokens=150, ignore_eos=True)
        other = asyncio.create_task(run(engine, OTHER, endless))
        await asyncio.sleep(0)
        both = await asyncio.gather(run(engine, [*PREAMBLE, *ITALY]), run(engine, ITALY))
        assert cached(both[0]) == len(PREAMBLE)
        assert len(tokens_of(await other)) == 150


@pytest.mark.parametrize("delay", [0.3, 3600.0])
async def test_other_generations_delay_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    monkeypatch.setattr(prefix_cache, "_LONGEST_DELAY", delay)
    async with running(tmp_path) as engine, endless(engine):
        await run(engine, PREAMBLE)
        await asyncio.sleep(1)
        assert len(saved(tmp_path)) == (delay < 1)


@asynccontextmanager
async def endless(engine: LlamaCppEngine) -> AsyncIterator[None]:
    """A generation that runs until the end of the block."""
    sampling = Sampling(max_tokens=1800, ignore_eos=True)
    chunks = engine.generate(GenerationJob(ITALY, sampling, "endless"))
    await anext(chunks)
    yield
    await chunks.aclose()


def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


async def test_a_state_larger_than_the_room_is_not_restored(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        await run(engine, [*PREAMBLE, *OTHER])
    async with running(tmp_path, context_window=256, kv_tokens=256) as engine:
        longer = Sampling(temperature=0.0, max_tokens=150, ignore_eos=True)
        other = asyncio.create_task(run(engine, [*ITALY, *ITALY, *ITALY], longer))
        await asyncio.sleep(0)
        assert cached(await run(engine, [*PREAMBLE, 77])) == 0
        assert len(tokens_of(await other)) == 150


def add(files: PrefixFiles, folder: Path, ids: Sequence[int], state: bytes = b"s" * 1000) -> Path:
    before = set(saved(folder))
    source = folder / "state"
    source.write_bytes(state)
    files.add(source, pack_ids(ids))
    source.unlink()
    [added] = set(saved(folder)) - before
    return added


def ages(*paths: Path) -> None:
    """The first was used longest ago."""
    for at, path in enumerate(paths):
        os.utime(path, (at, at))


def test_numbers_that_are_no_token_ids_have_no_prefix() -> None:
    assert pack_ids([1, 2**40]) == b""


def test_the_longest_saved_prefix_wins(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, 10**6, HERE)
    short, long = add(files, tmp_path, [1, 2, 3]), add(files, tmp_path, [1, 2, 9, 9, 9])
    for reopened in (files, PrefixFiles(tmp_path, 10**6, HERE)):
        found = [reopened.longest(pack_ids(ids), 99) for ids in ([1, 2, 9, 9, 4], [1, 2, 3, 4], [1, 5], [8])]
        assert [each and (each[0].path, each[1]) for each in found] == [
            (long, 4),
            (short, 3),
            (short, 1),
            None,
        ]
        least = reopened.longest(pack_ids([1, 2, 9, 9]), 3)
        assert least is not None
        assert (least[0].path, least[1]) == (short, 2)
    assert PrefixFiles(tmp_path, 10**6, THERE).longest(pack_ids([1, 2, 3]), 99) is None, "of another model"


@pytest.mark.parametrize("damage", ["changed", "cut", "replaced"])
def test_a_damaged_file_is_removed(tmp_path: Path, damage: str) -> None:
    file = add(PrefixFiles(tmp_path, 10**6, HERE), tmp_path, [1, 2, 3])
    if damage == "changed":
        change(file)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.write_bytes(b"\0" * 2000)
    files = PrefixFiles(tmp_path, 10**6, HERE)
    if found := files.longest(pack_ids([1, 2, 3]), 9):
        with pytest.raises(ValueError, match="checksum"):
            files.place(found[0], tmp_path)
    assert (len(files), list(tmp_path.iterdir())) == (0, [])


def test_the_least_recently_used_files_are_removed(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, 4500, HERE)
    first, second, third = (add(files, tmp_path, [at]) for at in range(3))
    ages(first, second, third)
    found = files.longest(pack_ids([0]), 9)
    assert found is not None
    files.place(found[0], tmp_path).unlink()
    fourth = add(PrefixFiles(tmp_path, 4500, THERE), tmp_path, [4])
    assert saved(tmp_path) == sorted([first, third, fourth]), "the models share the limit"
    assert not files.has_room(4501)
    assert files.has_room(4500)


def test_what_others_put_there_stays(tmp_path: Path) -> None:
    foreign = [tmp_path / "notes.prefix", tmp_path / "model.gguf", tmp_path / f"{KEY}.part"]
    for path in foreign:
        path.write_bytes(b"x" * 5000)
    left, young = tmp_path / f"{KEY}-{'0' * 32}.part", tmp_path / f"{KEY}-{'1' * 32}.part"
    left.touch()
    young.touch()
    ages(left)
    PrefixFiles(tmp_path, 1, HERE)
    assert sorted(tmp_path.iterdir()) == sorted([*foreign, young])


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(BadConfiguration, match="chmod 700"):
        open_folder(shared)
    (tmp_path / "file").touch()
    with pytest.raises(BadConfiguration, match="--prefix-cache-path"):
        open_folder(tmp_path / "file" / "cache")


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"model-{at:05}-of-00002.gguf" for at in (1, 2)]
    for path in made:
        path.write_bytes(bytes(3 * 2**20))
    return made


def test_the_key_changes_with_every_part_of_the_model_and_with_the_settings(parts: list[Path]) -> None:
    origins = [read_state_origin(parts[0], "1", "")]
    with parts[1].open("r+b") as file:
        file.seek(2**20 + 5)
        file.write(b"x")
    origins += [read_state_origin(parts[0], *settings) for settings in (("1", ""), ("2", ""), ("1", "q8_0"))]
    origins += [read_state_origin(parts[1].rename(parts[1].with_name("model.gguf")), "1", "")]
    assert len({origin.key for origin in origins}) == 5
    assert {bool(one.refusal(other)) for one in origins for other in origins if one != other} == {True}
