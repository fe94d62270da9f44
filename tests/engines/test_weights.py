"""Names, paths and ids become models on this machine."""

from __future__ import annotations

import hashlib
import io
import time
from pathlib import Path

import pytest

from engines.fake_hub import FakeHub
from engines.fake_wheels import Index
from singletree.cli.progress_bar import TerminalProgress
from singletree.engines.checkpoint import DEFAULT_MODEL, cache_folder, known_models
from singletree.engines.progress import shown_step
from singletree.errors import WeightsUnavailable
from singletree.model_files import built_in
from singletree.model_files.built_in import PACKAGED_FILES
from singletree.model_files.hub import HubUnreachable
from singletree.model_files.resolve import resolve
from tiny_gguf import tiny_gguf

ID = f"HuggingFaceTB/{DEFAULT_MODEL}"
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
    monkeypatch.setattr(built_in, "PACKAGED_FILES", {DEFAULT_MODEL: made.add("small", [HEADER])})
    return made


@pytest.fixture
def hub(tmp_path: Path) -> FakeHub:
    """A hub that has the default model."""
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "smollm2-q8_0.gguf").write_bytes(HEADER)
    return FakeHub(
        folder,
        {ID: ["tokenizer.json", "config.json", "model.safetensors"], f"{ID}-GGUF": ["smollm2-q8_0.gguf"]},
    )


@pytest.mark.parametrize("model", [DEFAULT_MODEL, DEFAULT_MODEL.upper(), ID, ID.lower()])
def test_a_known_name_in_any_spelling(index: Index, hub: FakeHub, cache: Path, model: str) -> None:
    found = resolve(model, gguf=True, fetch=index.fetch, hub=hub)
    assert (found.name, found.context_window) == (DEFAULT_MODEL, 8192)
    assert found.path == hub.folder / "smollm2-q8_0.gguf"
    assert found.aliases == (ID, "smollm2-q8_0")
    assert index.fetched == []


def test_packages_are_for_where_there_is_no_hub(
    index: Index, hub: FakeHub, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.online = False
    found = resolve(DEFAULT_MODEL, gguf=True, fetch=index.fetch, hub=hub)
    assert (found.name, found.context_window) == (DEFAULT_MODEL, 8192)
    assert found.path.is_relative_to(cache)
    assert found.aliases == (ID, "small")
    (line,) = caplog.messages
    for words in ("no network", "small-0==1.0", hashlib.sha256(HEADER).hexdigest(), "--no-package-weights"):
        assert words in line


def test_once_fetched_no_network_is_needed(index: Index, hub: FakeHub) -> None:
    hub.online = False
    first = resolve(DEFAULT_MODEL, gguf=True, fetch=index.fetch, hub=hub)
    index.online = False
    assert resolve(DEFAULT_MODEL, gguf=True, fetch=index.fetch, hub=hub) == first
    assert resolve(DEFAULT_MODEL, fetch=index.fetch, hub=hub) == first, "its tokenizer is in the file"


def test_a_flag_refuses_packages(index: Index, hub: FakeHub) -> None:
    hub.online = False
    resolve(DEFAULT_MODEL, gguf=True, fetch=index.fetch, hub=hub)
    index.fetched.clear()
    with pytest.raises(HubUnreachable):
        resolve(DEFAULT_MODEL, gguf=True, packages=False, fetch=index.fetch, hub=hub)
    hub.online = True
    found = resolve(DEFAULT_MODEL, gguf=True, packages=False, fetch=index.fetch, hub=hub)
    assert (found.path.parent, index.fetched) == (hub.folder, [])


@pytest.mark.parametrize("needs_weights", [False, True])
def test_packages_are_for_llama_cpp_alone(index: Index, hub: FakeHub, needs_weights: bool) -> None:
    assert resolve(DEFAULT_MODEL, fetch=index.fetch, hub=hub, weights=needs_weights).path == hub.folder
    weights = ["model.safetensors"] if needs_weights else []
    assert hub.taken == [(ID, sorted(["config.json", *weights, "tokenizer.json"]))]
    hub.online = False
    with pytest.raises(HubUnreachable):
        resolve(DEFAULT_MODEL, fetch=index.fetch, hub=hub, weights=needs_weights)
    assert index.fetched == []


def test_a_cache_without_weights_is_no_model(hub: FakeHub) -> None:
    hub.online, hub.here = False, {ID: ["tokenizer.json", "config.json"]}
    with pytest.raises(WeightsUnavailable, match="no weights"):
        resolve(ID, hub=hub, weights=True)


def test_what_the_hub_refuses_does_not_come_from_packages(index: Index, hub: FakeHub) -> None:
    hub.repos = {}
    with pytest.raises(WeightsUnavailable, match="is not there"):
        resolve(DEFAULT_MODEL, gguf=True, fetch=index.fetch, hub=hub)
    assert index.fetched == []


def test_the_owner_of_another_model_is_not_taken_for_it(index: Index, hub: FakeHub) -> None:
    with pytest.raises(WeightsUnavailable, match=f"somebody/{DEFAULT_MODEL} is not there"):
        resolve(f"somebody/{DEFAULT_MODEL}", fetch=index.fetch, hub=hub)


def test_every_known_model_has_its_packages() -> None:
    assert set(PACKAGED_FILES) == set(known_models())


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(WeightsUnavailable) as caught:
        resolve("SmolLM3")
    assert all(name in caught.value.message for name in known_models())


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.Q4_0.gguf"
    path.write_bytes(HEADER)
    found = resolve(str(path))
    assert (found.name, found.path, found.context_window) == ("mine.Q4_0", path, 8192)


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


def test_progress_on_a_terminal_is_a_bar() -> None:
    stream = Terminal()
    with TerminalProgress(stream) as progress:
        progress("model", 0, 100)
        progress("model", 100, 100)
    assert "model" in stream.getvalue()
    assert "100/100 bytes" in stream.getvalue()


def test_progress_that_is_never_reported_prints_nothing() -> None:
    stream = io.StringIO()
    with TerminalProgress(stream):
        pass
    assert stream.getvalue() == ""


def test_the_template_of_a_built_in_model_is_corrected() -> None:
    correction = built_in._CORRECTIONS["Qwen2.5-Coder-1.5B-Instruct"]
    own = (
        r"XML tags:\n<tool_call>\n{{\"name\": <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>"
        r"<|im_end|>\n{{- '\n</tool_response>' }}"
    )
    corrected = correction.correct(own)
    assert (
        r"\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"
        in corrected
    )
    assert r"{{\"name\"" not in corrected
    assert r"\n</tool_response>\n\nIf this is enough, answer the user now" in corrected
    assert correction.correct("another template") == "another template"
