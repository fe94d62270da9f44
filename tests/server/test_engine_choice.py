"""``--engine auto``: which engine is chosen, and what is said when none fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from singletree.engines.devices import Gpu
from singletree.engines.progress import Progress, no_progress
from singletree.errors import BadConfiguration, WeightsUnavailable
from singletree.model_files import resolve
from singletree.model_files.engine_choice import EngineSites, choose_engine
from singletree.model_files.hub import HuggingFaceHub
from singletree.server.models.model_source import engine_arguments_apply, find_model_source
from singletree.server.settings.config import Config, EngineName

GPU = Gpu("H100", 80 * 2**30)
REPOS = {
    "org/both": ["config.json", "tokenizer.json", "model.safetensors"],
    "org/both-GGUF": ["both-Q4_K_M.gguf"],
    "org/weights": ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"],
    "org/gguf-GGUF": ["gguf-Q4_K_M.gguf"],
}


class MemoryHub(HuggingFaceHub):
    """A hub of a few names."""

    def files(self, repo: str) -> Mapping[str, int]:
        if repo not in REPOS:
            raise WeightsUnavailable(f"{repo} is not available")
        return dict.fromkeys(REPOS[repo], 1)

    def cached(self, repo: str) -> Mapping[str, Path]:
        return {}

    def fetch(self, repo: str, files: Sequence[str], progress: Progress) -> Path:
        raise AssertionError("nothing is fetched to choose")


def sites(*packages: str, gpus: Sequence[Gpu] = ()) -> EngineSites:
    return EngineSites(lambda name: name in packages, lambda: gpus, MemoryHub)


@pytest.mark.parametrize(
    ("model", "there", "chosen"),
    [
        (None, sites("vllm", gpus=[GPU]), "llamacpp"),
        ("smollm2-135m-instruct", sites("vllm", gpus=[GPU]), "llamacpp"),
        ("org/both", sites("vllm", "sglang", gpus=[GPU]), "vllm"),
        ("org/both", sites("sglang", gpus=[GPU]), "sglang"),
        ("org/both", sites(gpus=[GPU]), "llamacpp"),
        ("org/both", sites("vllm"), "llamacpp"),
        ("org/both:Q4_K_M", sites("vllm", gpus=[GPU]), "llamacpp"),
        ("org/gguf-GGUF", sites("vllm", gpus=[GPU]), "llamacpp"),
        ("missing.gguf", sites("vllm", gpus=[GPU]), "llamacpp"),
    ],
)
def test_auto(model: str | None, there: EngineSites, chosen: str) -> None:
    assert choose_engine(Config(model=model), there) == chosen


@pytest.mark.parametrize("model", ["./nothing", "../nothing", "./folder/nothing"])
def test_no_hub_is_asked_for_a_path(model: str) -> None:
    there = replace(sites("vllm", gpus=[GPU]), hub=lambda: pytest.fail("the hub was asked"))
    assert choose_engine(Config(model=model), there) == "llamacpp"


@pytest.mark.parametrize(
    ("engine", "title"), [("llamacpp", "llama.cpp"), ("vllm", "vLLM"), ("sglang", "SGLang")]
)
async def test_a_missing_package_is_reported_before_a_model_is_fetched(
    engine: EngineName, title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(resolve, "resolve", lambda *_, **__: pytest.fail("the model was fetched"))
    says = rf"{title} is not installed: pip install 'singletree\[{engine}\]'"
    with pytest.raises(BadConfiguration, match=says):
        await find_model_source(Config(engine=engine, model="org/both"), no_progress)


def test_folders_and_files(tmp_path: Path) -> None:
    with_gpu = sites("vllm", gpus=[GPU])
    (tmp_path / "m.gguf").touch()
    assert choose_engine(Config(model=str(tmp_path / "m.gguf")), with_gpu) == "llamacpp"
    assert choose_engine(Config(model=str(tmp_path)), with_gpu) == "llamacpp"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").touch()
    assert choose_engine(Config(model=str(folder)), with_gpu) == "vllm"
    with pytest.raises(BadConfiguration, match="no GGUF file"):
        choose_engine(Config(model=str(folder)), sites("vllm"))


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (sites(), ("no GPU", "pip install 'singletree[vllm]'")),
        (sites("sglang"), ("no GPU", "--engine sglang --model org/weights")),
        (sites(gpus=[GPU]), ("neither vLLM nor SGLang is installed", "pip install 'singletree[vllm]'")),
    ],
)
def test_none_fits_and_three_commands_help(there: EngineSites, says: tuple[str, ...]) -> None:
    with pytest.raises(BadConfiguration) as caught:
        choose_engine(Config(model="org/weights"), there)
    for words in (*says, "singletree serve --engine-url", "singletree serve --model Qwen2.5-Coder"):
        assert words in caught.value.message
    assert len(caught.value.message.splitlines()) == 4


def test_a_model_that_is_nowhere_is_the_hubs_to_refuse() -> None:
    with pytest.raises(WeightsUnavailable):
        choose_engine(Config(model="org/none"), sites())


def test_arguments_for_an_engine_that_takes_none() -> None:
    given = ("--tensor-parallel-size", "4")
    engine_arguments_apply(Config(engine_arguments=given), "vllm")
    with pytest.raises(BadConfiguration, match="unknown arguments: --tensor-parallel-size 4"):
        engine_arguments_apply(Config(engine_arguments=given), "llamacpp")
    with pytest.raises(BadConfiguration, match="runs already"):
        engine_arguments_apply(Config(engine_url=("http://127.0.0.1:1",), engine_arguments=given), "vllm")
