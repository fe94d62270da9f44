"""A tokenizer file that was loaded before is loaded for its first text; one that was changed is loaded at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from prompts.tiny_vocabulary import byte_level, sentencepiece, write_directory
from singletree.prompts.tokenizer import encoder
from singletree.prompts.tokenizer.tokenizer import Tokenizer, load_tokenizer

KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "first": lambda: sentencepiece("first"),
}
TEXT = "<|im_start|> the quick brown fox<|im_end|> Straße 👍🏽"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each definition that the library was given."""
    sizes: list[int] = []

    class Library:
        class Tokenizer:
            @staticmethod
            def from_buffer(definition: bytes) -> tokenizers.Tokenizer:
                sizes.append(len(definition))
                return tokenizers.Tokenizer.from_buffer(definition)

    monkeypatch.setattr(encoder, "tokenizers", Library)
    return sizes


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    return tmp_path / "facts"


def shown(tokenizer: Tokenizer) -> tuple[object, ...]:
    """What a server sees of a tokenizer, encoding included."""
    ids = tokenizer.encode(TEXT)
    return ids, tokenizer.decode(ids), tokenizer.sample(), tokenizer.vocabulary_size, tokenizer.facts()


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_file_is_loaded_for_its_first_text(
    kind: str, tmp_path: Path, facts: Path, loads: list[int]
) -> None:
    folder = write_directory(tmp_path / kind, KINDS[kind]())
    plain = load_tokenizer(folder)
    first = load_tokenizer(folder, facts_folder=facts)
    assert loads
    loads.clear()
    again = load_tokenizer(folder, facts_folder=facts)
    assert (again.vocabulary_size, again.sample()) == (plain.vocabulary_size, plain.sample())
    assert not loads
    assert shown(again) == shown(first) == shown(plain)
    assert loads


def test_loading_once_is_enough(tmp_path: Path, facts: Path, loads: list[int]) -> None:
    folder = write_directory(tmp_path / "model", byte_level())
    load_tokenizer(folder, facts_folder=facts)
    known = load_tokenizer(folder, facts_folder=facts)
    loads.clear()
    known.load()
    known.load()
    known.encode(TEXT)
    assert len(loads) == 1


def test_a_changed_file_is_loaded_at_once(tmp_path: Path, facts: Path, loads: list[int]) -> None:
    folder = write_directory(tmp_path / "model", byte_level())
    load_tokenizer(folder, facts_folder=facts)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8") + " ", encoding="utf-8")
    loads.clear()
    changed = load_tokenizer(folder, facts_folder=facts)
    assert loads
    assert shown(changed) == shown(load_tokenizer(folder))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-2],
        lambda data: data.replace(b"false", b"true"),
        lambda data: data[:9] + b'{"vocabulary_size": "x"}',
        lambda data: b"\xff" * 40,
    ],
)
def test_damaged_facts_are_ignored(
    damage: Callable[[bytes], bytes], tmp_path: Path, facts: Path, loads: list[int]
) -> None:
    folder = write_directory(tmp_path / "model", byte_level())
    whole = shown(load_tokenizer(folder, facts_folder=facts))
    (kept,) = facts.iterdir()
    data = kept.read_bytes()
    kept.write_bytes(damage(data))
    loads.clear()
    assert shown(load_tokenizer(folder, facts_folder=facts)) == whole
    assert loads
    assert kept.read_bytes() == data, "written anew"


def test_a_folder_that_cannot_be_written_to_changes_nothing(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "model", byte_level())
    blocked = tmp_path / "file"
    blocked.write_text("no folder", encoding="utf-8")
    assert shown(load_tokenizer(folder, facts_folder=blocked / "facts")) == shown(load_tokenizer(folder))
