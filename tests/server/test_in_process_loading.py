"""How an engine that runs inside the server is loaded: its checkpoint, its arguments, and what the user reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from singletree.engines.checkpoint import Checkpoint
from singletree.engines.engine import EngineInfo
from singletree.engines.progress import no_progress
from singletree.errors import BadConfiguration
from singletree.in_process.startup import EnginePackage
from singletree.model_files import resolve as weights
from singletree.server.models import model_source
from singletree.server.settings.config import Config, EngineName
from singletree.testing import byte_model


class Engine:
    """Remembers how it was made."""

    last: Engine

    def __init__(self, settings: Any, **more: Any) -> None:
        self.settings, self.more, self.runs = settings, more, False
        Engine.last = self

    async def start(self) -> None:
        """Run."""
        self.runs = True

    async def close(self) -> None:
        """Stop."""

    def info(self) -> EngineInfo:
        """As an engine."""
        return EngineInfo("m", 4096)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, bool]]:
    """The models that were asked for, and whether their weights were needed."""
    wanted: list[tuple[str, bool]] = []
    monkeypatch.setattr(model_source, "check_installed", lambda engine: None)  # `Engine` stands for them.
    (tmp_path / "m.gguf").touch()

    def resolve(model: str, *, progress: Any, packages: bool, gguf: bool, weights: bool) -> Checkpoint:
        wanted.append((model, weights))
        path = tmp_path / "m.gguf" if model.endswith("gguf") else tmp_path
        return Checkpoint(model, path, 4096, ("short",))

    monkeypatch.setattr(weights, "resolve", resolve)
    monkeypatch.setattr("singletree.in_process.vllm_engine.InProcessVllmEngine", Engine)
    monkeypatch.setattr("singletree.in_process.sglang_engine.InProcessSglangEngine", Engine)
    return wanted


@pytest.mark.parametrize(
    ("engine", "flag"), [("vllm", "--enable-prefix-caching"), ("sglang", "--enable-priority-scheduling")]
)
async def test_the_engine_gets_the_checkpoint_and_the_arguments(
    asked: list[tuple[str, bool]], tmp_path: Path, engine: EngineName, flag: str
) -> None:
    given = ("--tensor-parallel-size", "4")
    config = Config(engine=engine, model="org/m", context_window=1024, slots=3, engine_arguments=given)
    found = await model_source.find_model_source(config, no_progress)
    assert asked == [("org/m", True)]
    assert (found.names, found.engine) == (("org/m", "short"), engine)
    assert any(note.startswith(f"set        {flag}") for note in found.notes)
    await found.start_workers(byte_model.byte_tokenizer())
    settings = Engine.last.settings
    assert (settings.model, settings.context_window, settings.slots) == (str(tmp_path), 1024, 3)
    assert settings.arguments == given
    assert Engine.last.more["name"] == "org/m"
    assert Engine.last.runs


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"engine": "vllm"}, "needs --model"),
        ({"engine": "sglang", "model": "m.gguf"}, "--engine llamacpp"),
        ({"engine": "vllm", "model": "org/m", "engine_arguments": ("--max-num-seqs", "3")}, "--slots"),
        ({"engine": "llamacpp", "engine_arguments": ("--dtype", "half")}, "unknown arguments: --dtype half"),
    ],
    ids=["no model", "gguf", "own argument", "not its own"],
)
async def test_what_cannot_be_loaded_is_refused_before_the_engine_starts(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadConfiguration, match=says):
        await model_source.find_model_source(Config(**settings), no_progress)


async def test_a_saved_cache_belongs_to_the_weights_of_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EnginePackage, "version", lambda package: "1")
    root = tmp_path / "saved"
    config = Config(engine="vllm", model="org/m", prefix_cache_path=root)
    found = await model_source.find_model_source(config, no_progress)
    assert not root.exists()  # With Ray the machine that serves HTTP finds models, and generates nothing.
    folders = set()
    for weights_now in (b"1", b"2", b"2"):  # What was unloaded is started again.
        (tmp_path / "model.safetensors").write_bytes(weights_now)
        await found.start_workers(byte_model.byte_tokenizer())
        folders.add(Engine.last.settings.saved.folder)
    assert {folder.parent for folder in folders} == {root}
    assert len(folders) == 2


async def test_the_files_of_vllm_cannot_be_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EnginePackage, "version", lambda package: "1")
    config = Config(engine="vllm", model="org/m", prefix_cache_path=tmp_path, prefix_cache_key="secret " * 9)
    found = await model_source.find_model_source(config, no_progress)
    with pytest.raises(BadConfiguration, match="in plain form"):
        await found.start_workers(byte_model.byte_tokenizer())
