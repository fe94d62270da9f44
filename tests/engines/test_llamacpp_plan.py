"""What is decided before llama.cpp is loaded: window, room, threads and how they wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from singletree.engines import devices
from singletree.errors import BadConfiguration
from singletree.gguf import GgufHeader
from singletree.llamacpp import engine, process
from singletree.llamacpp.engine import LlamaCppEngine

GIB = 2**30


def header(window: int | None = 8192, cost: int | None = 16 * 1024) -> GgufHeader:
    return GgufHeader("", window, cost)


@pytest.mark.parametrize(
    ("settings", "memory", "found"),
    [
        ({}, 64 * GIB, (8192, 4 * 8192)),
        ({"slots": 2}, 64 * GIB, (8192, 2 * 8192)),
        ({"context_window": 4096}, 64 * GIB, (4096, 4 * 4096)),
        ({}, 2 * GIB, (8192, 16384)),
        ({}, GIB // 2, (4096, 4096)),
        ({"context_window": 8192}, GIB // 2, (8192, 8192)),
        ({"kv_tokens": 1000}, 64 * GIB, (1024, 1024)),
        ({"kv_tokens": 100_000}, 64 * GIB, (8192, 100_096)),
    ],
    ids=[
        "plenty",
        "fewer slots",
        "a smaller window",
        "little memory",
        "less",
        "insisted",
        "given",
        "given more",
    ],
)
def test_window_and_room(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], memory: int, found: tuple[int, int]
) -> None:
    monkeypatch.setattr(engine, "usable_memory", lambda: memory)
    assert LlamaCppEngine("x.gguf", **settings)._plan(header()) == found  # type: ignore[arg-type]


def test_a_model_that_says_nothing_gets_something() -> None:
    assert LlamaCppEngine("x.gguf")._plan(header(None, None)) == (4096, 4096)


def test_more_than_the_training_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="give 8192 or less"):
        LlamaCppEngine("x.gguf", context_window=8193)._plan(header())


async def test_without_the_wheel_the_cure_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadConfiguration, match="pip install"):
        await LlamaCppEngine("x.gguf").start()


def test_threads_spin_a_little_unless_the_user_chose_otherwise() -> None:
    assert process._environment({"A": "b"}) == {"A": "b", "GOMP_SPINCOUNT": "1000"}
    for own in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}):
        assert process._environment(own) == own


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two cores of two threads each, and a container's limits."""
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / str(cpu)).write_text(f"{siblings}\n")
    monkeypatch.setattr(devices, "_SIBLINGS", f"{tmp_path}/{{}}")
    monkeypatch.setattr(devices, "_CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(devices, "_MEMORY_LIMIT", tmp_path / "memory.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 2), ("100000 100000", 1), ("50000 100000", 1), ("800000 100000", 2), ("", 2)],
)
def test_cores_are_counted_once_and_within_the_quota(system: Path, quota: str, cores: int) -> None:
    (system / "cpu.max").write_text(f"{quota}\n")
    assert devices.usable_cores() == cores


def test_cores_that_are_not_described_count_each(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_SIBLINGS", "/nowhere/{}")
    assert devices.usable_cores() == 4


def test_memory_is_the_containers_if_it_has_a_limit(system: Path) -> None:
    physical = devices.usable_memory()
    (system / "memory.max").write_text("max\n")
    assert devices.usable_memory() == physical
    (system / "memory.max").write_text("1048576\n")
    assert devices.usable_memory() == 1048576
