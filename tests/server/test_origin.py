"""Where a model comes from, with weights and engines stood in for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from singletree.engines import llamacpp, vllm, weights
from singletree.engines.engine import EngineInfo
from singletree.engines.progress import quiet
from singletree.engines.weights import Checkpoint
from singletree.errors import BadConfiguration, WeightsUnavailable
from singletree.server import bytes_model, origin
from singletree.server.config import Config


class Engine:
    """Remembers how it was made and whether it runs."""

    last: Engine

    def __init__(self, *given: Any, **settings: Any) -> None:
        self.given, self.settings, self.runs = given, settings, False
        Engine.last = self

    async def start(self) -> None:
        """Run."""
        self.runs = True

    async def close(self) -> None:
        """Stop."""
        self.runs = False

    def info(self) -> EngineInfo:
        """As a vLLM server tells it."""
        return EngineInfo("served-name", 4096, 8, {"root": "org/model"})


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The models that were asked for, and whether a GGUF file was needed."""
    wanted: list[tuple[str, bool]] = []

    def resolve(model: str, *, progress: Any, gguf: bool = False) -> Checkpoint:
        wanted.append((model, gguf))
        if model == "missing":
            raise WeightsUnavailable("there is none")
        return Checkpoint(model, Path("/nowhere"), 4096, "hub", ("short",))

    monkeypatch.setattr(weights, "resolve", resolve)
    monkeypatch.setattr(llamacpp, "LlamaCppEngine", Engine)
    monkeypatch.setattr(vllm, "VllmEngine", Engine)
    return wanted


async def test_llamacpp(asked: list[tuple[str, bool]]) -> None:
    found = await origin.find(Config(slots=2, threads=3, context_window=1024), quiet)
    assert asked == [(weights.DEFAULT_MODEL, True)]
    assert found.names == (weights.DEFAULT_MODEL, "short")
    await found.start_engine(bytes_model.bytes_tokenizer())
    assert Engine.last.runs
    assert Engine.last.settings["slots"] == 2
    assert (Engine.last.settings["threads"], Engine.last.settings["context_window"]) == (3, 1024)


async def test_what_is_not_set_is_the_engines_to_choose() -> None:
    found = await origin.find(Config(model="org/m"), quiet)
    await found.start_engine(bytes_model.bytes_tokenizer())
    assert "slots" not in Engine.last.settings


async def test_vllm_tells_what_it_serves(asked: list[tuple[str, bool]]) -> None:
    found = await origin.find(Config(engine="vllm", engine_url="http://127.0.0.1:1"), quiet)
    assert asked == [("org/model", False)]
    assert found.names == ("served-name", "org/model", "short")
    engine: Any = await found.start_engine(bytes_model.bytes_tokenizer())
    assert engine is Engine.last
    assert Engine.last.given == ("http://127.0.0.1:1",)


async def test_vllm_is_left_when_its_tokenizer_is_not_to_be_had() -> None:
    with pytest.raises(WeightsUnavailable):
        await origin.find(Config(engine="vllm", engine_url="http://127.0.0.1:1", model="missing"), quiet)
    assert not Engine.last.runs


async def test_scripted_plays_for_any_model(asked: list[tuple[str, bool]]) -> None:
    found = await origin.find(Config(engine="scripted", model="org/m"), quiet)
    assert asked == [("org/m", False)]
    engine: Any = await found.start_engine(bytes_model.bytes_tokenizer())
    assert engine.info().context_window == bytes_model.CONTEXT_WINDOW


def test_the_tokenizer_alone(asked: list[tuple[str, bool]]) -> None:
    name, tokenizer = origin.tokenizer_of(Config(engine="scripted"), quiet)
    assert (name, tokenizer.decode(tokenizer.encode("h\u00e9"))) == ("scripted", "h\u00e9")
    with pytest.raises(BadConfiguration, match="--model"):
        origin.tokenizer_of(Config(engine="vllm", engine_url="http://127.0.0.1:1"), quiet)
    with pytest.raises(WeightsUnavailable):
        origin.tokenizer_of(Config(model="missing"), quiet)
    assert asked == [("missing", False)]
