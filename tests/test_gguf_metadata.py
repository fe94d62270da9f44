"""What is read at the head of a GGUF file, and that a damaged file raises one error."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from singletree.errors import WeightsUnavailable
from singletree.gguf import read_metadata, trained_context
from tiny_gguf import tiny_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "Tiny ü",
    "llama.context_length": 8192,
    "truth": True,
    "number": 0.5,
    "numbers": [1, -2],
    "fractions": [0.5, 2.0],
    "truths": [True, False],
    "texts": ["a", "", "日"],
}
FIRST_KEY = 24
"""Position of the length of the first key."""


def write(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def plain(metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata with lists in place of arrays."""
    return {key: value.tolist() if hasattr(value, "tolist") else value for key, value in metadata.items()}


def test_values_of_every_kind(tmp_path: Path) -> None:
    assert plain(read_metadata(write(tmp_path, tiny_gguf(METADATA)))) == METADATA


def test_longer_arrays_are_skipped(tmp_path: Path) -> None:
    long = {"words": ["x"] * 5, "ids": [7] * 5}
    path = write(tmp_path, tiny_gguf({**long, **METADATA}))
    assert plain(read_metadata(path, longest_array=4)) == METADATA
    assert plain(read_metadata(path, longest_array=5)) == {**long, **METADATA}


def test_the_context_is_that_of_the_architecture() -> None:
    assert trained_context(METADATA) == 8192
    assert trained_context({"general.architecture": "qwen3", "llama.context_length": 8192}) is None
    assert trained_context({"general.architecture": "llama", "llama.context_length": 0}) is None


@pytest.mark.parametrize("version", [1, 4])
def test_other_versions_are_refused(tmp_path: Path, version: int) -> None:
    with pytest.raises(WeightsUnavailable, match="not a GGUF file"):
        read_metadata(write(tmp_path, tiny_gguf(METADATA, version)))


@pytest.mark.parametrize("data", [b"PK\x03\x04" + bytes(100), b"hello\n"])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(WeightsUnavailable, match="not a GGUF file"):
        read_metadata(write(tmp_path, data))


@pytest.mark.parametrize("longest_array", [None, 0])
def test_every_truncation_is_refused(tmp_path: Path, longest_array: int | None) -> None:
    data = tiny_gguf(METADATA)
    for end in range(len(data)):
        with pytest.raises(WeightsUnavailable):
            read_metadata(write(tmp_path, data[:end]), longest_array=longest_array)


@pytest.mark.parametrize("longest_array", [None, 0])
def test_damage_raises_nothing_else(tmp_path: Path, longest_array: int | None) -> None:
    data = tiny_gguf(METADATA)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        path = write(tmp_path, bytes(damaged))
        try:
            read_metadata(path, longest_array=longest_array)
        except WeightsUnavailable:
            continue


@pytest.mark.parametrize("at", [16, FIRST_KEY], ids=["number of keys", "length of a key"])
def test_huge_lengths_are_refused(tmp_path: Path, at: int) -> None:
    data = tiny_gguf(METADATA)
    with pytest.raises(WeightsUnavailable, match="damaged"):
        read_metadata(write(tmp_path, data[:at] + struct.pack("<Q", 2**60) + data[at + 8 :]))


@pytest.mark.parametrize("depth", [1, 100_000])
def test_arrays_of_arrays_are_refused(tmp_path: Path, depth: int) -> None:
    head = tiny_gguf({"k": ["a"]})[: FIRST_KEY + 8 + len("k") + 4]
    arrays = struct.pack("<IQ", 9, 1) * depth
    with pytest.raises(WeightsUnavailable, match="value type 9"):
        read_metadata(write(tmp_path, head + arrays))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnavailable, match=r"none\.gguf cannot be read: No such file"):
        read_metadata(tmp_path / "none.gguf")
