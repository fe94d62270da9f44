"""Files with saved states: cut, changed, of another origin, encrypted, and on a disk that is full."""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engines.test_saved_shapes import PROMPT, ask, kill, read_anew, running
from singletree.errors import BadConfiguration
from singletree.llamacpp import prefix_files
from singletree.llamacpp.prefix_files import PrefixFiles, pack_ids
from singletree.llamacpp.process import LlamaProcess
from singletree.llamacpp.state_files import StateOrigin, StateSeal

ORIGIN = StateOrigin("model", "build", "settings", "model.gguf")
IDS = pack_ids(range(1000))
STATE = os.urandom(1_200_000)
STEP = 4096
KEY, OTHER_KEY = "5a" * 32, "a passphrase of the tests"

Files = Callable[[], PrefixFiles]


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "singletree.llamacpp")


@pytest.fixture(params=[None, KEY], ids=["plain", "sealed"])
def files(tmp_path: Path, request: pytest.FixtureRequest) -> Files:
    """Opens the folder anew."""
    return lambda: opened(tmp_path, request.param)


def opened(tmp_path: Path, key: str | None) -> PrefixFiles:
    folder = tmp_path / "saved"
    folder.mkdir(exist_ok=True)
    return PrefixFiles(folder, 10**9, ORIGIN, StateSeal(key) if key else None)


def source(tmp_path: Path, state: bytes = STATE) -> Path:
    path = tmp_path / "state"
    path.write_bytes(state)
    return path


def placed(files: PrefixFiles, tmp_path: Path) -> bytes | None:
    """What llama.cpp would be given; None if nothing."""
    found = files.longest(IDS, 10**6)
    if found is None:
        return None
    try:
        path = files.place(found[0], tmp_path)
    except ValueError:
        return None
    data = path.read_bytes()
    path.unlink()
    return data


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**20 + 1, len(STATE)])
def test_what_was_added_comes_back(tmp_path: Path, files: Files, size: int) -> None:
    files().add(source(tmp_path, STATE[:size]), IDS)
    found = placed(files(), tmp_path)
    assert found is not None
    assert found[:size] == STATE[:size]
    [path] = (tmp_path / "saved").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [IDS[:64] in path.read_bytes()] == [files().seal is None]
    assert not size > 99 or (STATE[:99] in path.read_bytes()) == (files().seal is None)


def test_a_file_that_is_cut_is_not_restored(tmp_path: Path, files: Files) -> None:
    files().add(source(tmp_path), IDS)
    [path] = (tmp_path / "saved").iterdir()
    whole = path.read_bytes()
    for size in [*range(0, len(whole), STEP), len(whole) - 1]:
        path.write_bytes(whole[:size])
        assert placed(files(), tmp_path) is None
        assert not path.exists(), "it is removed"


def test_a_file_that_was_changed_is_not_restored(tmp_path: Path, files: Files) -> None:
    files().add(source(tmp_path, STATE[:100_000]), IDS)
    [path] = (tmp_path / "saved").iterdir()
    whole = path.read_bytes()
    for at in [*range(0, len(whole), STEP), len(whole) - 1]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert placed(files(), tmp_path) is None


def test_a_full_disk_loses_nothing(tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = files()
    kept.add(source(tmp_path), IDS[:2000])
    [before] = (tmp_path / "saved").iterdir()
    state = source(tmp_path, STATE[:100_000])
    for room in range(0, 100_000, STEP):
        monkeypatch.setattr(prefix_files, "open", partial(_Full, room), raising=False)
        with pytest.raises(OSError, match="No space"):
            kept.add(state, IDS)
        assert list((tmp_path / "saved").iterdir()) == [before]
    monkeypatch.undo()
    assert placed(kept, tmp_path) is not None
    assert placed(files(), tmp_path) is not None


class _Full:
    """A file on a disk with so many bytes of room."""

    def __init__(self, room: int, *how: Any, **more: Any) -> None:
        self._file = builtins.open(*how, **more)  # noqa: SIM115 (__exit__ closes it)
        self._room = room

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        self._file.write(data[: self._room])
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda: StateOrigin("other", "build", "settings", "other.gguf"), "another model file (other.gguf"),
        (
            lambda: StateOrigin("model", "older", "settings"),
            "another build of llama.cpp (older; this is build)",
        ),
        (
            lambda: StateOrigin("model", "build", "cache_type_k=8"),
            "other settings (cache_type_k=8; not settings)",
        ),
    ],
)
def test_another_origin_is_refused_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[], StateOrigin], reason: str
) -> None:
    PrefixFiles(tmp_path, 10**9, change()).add(source(tmp_path), IDS)
    assert placed(PrefixFiles(tmp_path, 10**9, ORIGIN), tmp_path) is None
    assert reason in caplog.text
    assert len(list(tmp_path.glob("*.prefix"))) == 1, "it stays for whom it is for"


@pytest.mark.parametrize(
    ("wrote", "reads", "reason"),
    [
        (KEY, None, "it is encrypted: give --prefix-cache-key"),
        (KEY, OTHER_KEY, "encrypted with another key"),
        (None, KEY, "it is not encrypted"),
    ],
)
def test_another_key_is_refused_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrote: str | None, reads: str | None, reason: str
) -> None:
    opened(tmp_path, wrote).add(source(tmp_path), IDS)
    assert placed(opened(tmp_path, reads), tmp_path) is None
    assert reason in caplog.text
    assert placed(opened(tmp_path, wrote), tmp_path) is not None


def test_pieces_cannot_be_exchanged(tmp_path: Path) -> None:
    """Whoever may write to the folder can compute the checksum, but has not the key."""
    seal = StateSeal(KEY)
    pieces = list(seal.seal(source(tmp_path).open("rb"), b"id"))
    whole = tmp_path / "sealed"

    def joined(parts: Iterable[bytes], id: bytes = b"id") -> bytes:
        whole.write_bytes(b"".join(parts))
        with whole.open("rb") as file:
            return b"".join(seal.open(file, whole.stat().st_size, id))

    assert joined(pieces) == STATE
    for parts in (pieces[:1], pieces[::-1], pieces[1:]):
        with pytest.raises(ValueError, match="changed"):
            joined(parts)
    with pytest.raises(ValueError, match="changed"):
        joined(pieces, b"di")


def test_a_short_key_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="--prefix-cache-key has 5 characters"):
        StateSeal("short")


async def test_the_engine_refuses_states_of_other_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running("dense", tmp_path) as engine:
        await ask(engine, PROMPT)
        await kill(engine)
    made = LlamaProcess.__init__

    def other(self: LlamaProcess, process: Any, ready: Any, log: Any) -> None:
        made(self, process, {**ready, "state_settings": "cache_type_k=8"}, log)

    monkeypatch.setattr(LlamaProcess, "__init__", other)
    async with running("dense", tmp_path) as engine:
        assert (await ask(engine, PROMPT))[0] == 0
    assert "1 saved states in" in caplog.text
    assert "other settings (cache_type_k=1" in caplog.text


async def test_the_engine_restores_what_is_sealed(tmp_path: Path) -> None:
    async with running("dense", tmp_path, prefix_cache_key=KEY) as engine:
        _, answer = await ask(engine, PROMPT)
        await kill(engine)
        prompt = [*PROMPT, *answer, 7]
        cached, restored = await ask(engine, prompt)
        assert engine._process is not None
        assert list(engine._process.states.iterdir()) == [], "nothing plain is left"
    assert cached == len(prompt) - 2
    assert restored == await read_anew("dense", prompt)
    async with running("dense", tmp_path) as engine:
        assert (await ask(engine, prompt))[0] == 0
