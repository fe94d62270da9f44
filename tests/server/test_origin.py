"""Where a model comes from, with weights and engines stood in for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from singletree.engines.checkpoint import DEFAULT_MODEL, Checkpoint
from singletree.engines.engine import EngineInfo
from singletree.engines.progress import no_progress
from singletree.errors import BadConfiguration, WeightsUnavailable
from singletree.llamacpp import source as llamacpp
from singletree.model_files import resolve as weights
from singletree.remote import detection, servers
from singletree.server.models import model_source
from singletree.server.settings.config import Config
from singletree.testing import byte_model


class Engine:
    """Remembers how it was made and whether it runs."""

    last: Engine

    def __init__(self, *given: Any, **settings: Any) -> None:
        self.given, self.settings, self.runs = given, settings, False
        Engine.last = self

    async def start(self) -> None:
        """Run."""
        self.runs = True

    def complete(self, **settings: Any) -> None:
        """Remember what the server does not report."""
        self.completed = settings

    async def close(self) -> None:
        """Stop."""
        self.runs = False

    async def tokenize(self, text: str) -> list[int]:
        """Return the tokens of the tokenizer in these tests."""
        return list(byte_model.byte_tokenizer().encode(text))

    def use_sampling_defaults(self, defaults: dict[str, float]) -> None:
        """As vLLM's."""

    def info(self) -> EngineInfo:
        """As a vLLM server tells it."""
        return EngineInfo("served-name", 4096, 8, checkpoint="org/model")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The models that were asked for, and whether a GGUF file was needed."""
    wanted: list[tuple[str, bool]] = []

    def resolve(
        model: str, *, progress: Any, packages: bool, gguf: bool = False, weights: bool = False
    ) -> Checkpoint:
        wanted.append((model, gguf))
        if model == "missing":
            raise WeightsUnavailable("there is none")
        return Checkpoint(model, Path("/nowhere"), 4096, ("short",))

    monkeypatch.setattr(weights, "resolve", resolve)
    monkeypatch.setattr(llamacpp, "LlamaCppEngine", Engine)
    monkeypatch.setattr(servers, "RemoteEngine", Engine)
    return wanted


async def test_llamacpp(asked: list[tuple[str, bool]]) -> None:
    found = await model_source.find_model_source(Config(slots=2, threads=3, context_window=1024), no_progress)
    assert asked == [(DEFAULT_MODEL, True)]
    assert found.names == (DEFAULT_MODEL, "short")
    await found.start_workers(byte_model.byte_tokenizer())
    assert Engine.last.runs
    assert Engine.last.settings["slots"] == 2
    assert (Engine.last.settings["threads"], Engine.last.settings["context_window"]) == (3, 1024)


async def test_what_is_not_set_is_the_engines_to_choose() -> None:
    found = await model_source.find_model_source(Config(model="org/m", engine="llamacpp"), no_progress)
    await found.start_workers(byte_model.byte_tokenizer())
    assert "slots" not in Engine.last.settings


async def test_vllm_reports_what_it_serves(asked: list[tuple[str, bool]]) -> None:
    found = await model_source.find_model_source(
        Config(engine="vllm", engine_url=("http://127.0.0.1:1",)), no_progress
    )
    assert asked == [("org/model", False)]
    assert found.names == ("served-name", "org/model", "short")
    [worker] = await found.start_workers(byte_model.byte_tokenizer())
    assert worker.name == "http://127.0.0.1:1"
    assert worker.engine.info() == Engine.last.info()
    server, url = Engine.last.given
    assert (server.title, url) == ("vLLM", "http://127.0.0.1:1")
    assert Engine.last.completed == {"window": 4096, "model_defaults": {}}


async def test_a_url_alone_is_asked_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    async def detect(url: str, key: str | None) -> str:
        asked.append((url, key))
        return "sglang"

    monkeypatch.setattr(detection, "detect_server", detect)
    config = Config(engine_url=("http://127.0.0.1:1",), engine_api_key="k", context_window=1000)
    await model_source.find_model_source(config, no_progress)
    assert asked == [("http://127.0.0.1:1", "k")]
    assert Engine.last.given[0].title == "SGLang"
    assert Engine.last.completed["window"] == 1000


@pytest.mark.parametrize("engine", ["tensorrt-llm", "llama-server"])
def test_a_server_needs_its_url(engine: Any) -> None:
    with pytest.raises(BadConfiguration, match="needs --engine-url"):
        Config(engine=engine)


def test_scripts_have_no_url() -> None:
    with pytest.raises(BadConfiguration, match="--engine-url"):
        Config(engine="scripted", engine_url=("http://127.0.0.1:1",))


async def test_vllm_is_left_when_its_tokenizer_is_not_to_be_had() -> None:
    with pytest.raises(WeightsUnavailable):
        await model_source.find_model_source(
            Config(engine="vllm", engine_url=("http://127.0.0.1:1",), model="missing"), no_progress
        )
    assert not Engine.last.runs


async def test_scripted_plays_for_any_model(asked: list[tuple[str, bool]]) -> None:
    found = await model_source.find_model_source(Config(engine="scripted", model="org/m"), no_progress)
    assert asked == [("org/m", False)]
    [worker] = await found.start_workers(byte_model.byte_tokenizer())
    assert worker.engine.info().context_window == byte_model.CONTEXT_WINDOW


def test_the_tokenizer_alone(asked: list[tuple[str, bool]]) -> None:
    name, tokenizer = model_source.find_tokenizer(Config(engine="scripted"), no_progress)
    assert (name, tokenizer.decode(tokenizer.encode("h\u00e9"))) == ("scripted", "h\u00e9")
    with pytest.raises(BadConfiguration, match="--model"):
        model_source.find_tokenizer(Config(engine="vllm", engine_url=("http://127.0.0.1:1",)), no_progress)
    with pytest.raises(WeightsUnavailable):
        model_source.find_tokenizer(Config(model="missing"), no_progress)
    assert asked == [("missing", False)]
