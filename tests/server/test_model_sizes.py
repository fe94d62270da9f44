"""Which models fit a machine, and what ``doctor --machine`` prints of it."""

from __future__ import annotations

import json

import pytest

from singletree.cli import main
from singletree.cli.doctor import AGENT_WINDOW, MODEL_SIZES, ModelSize, find_fits
from singletree.engines.checkpoint import known_models
from singletree.engines.devices import Gpu

GIB = 2**30
SMALL = ModelSize("small", 1 * GIB, 3 * GIB, 10, 2, 128, 65_536)  # 10 KiB a token


def test_what_a_token_takes() -> None:
    assert SMALL.token_bytes == 2 * 10 * 2 * 128 * 2
    [qwen] = [size for size in MODEL_SIZES if size.name == "Qwen/Qwen3-8B"]
    assert qwen.token_bytes == 147_456


def test_the_main_memory_gives_llamacpp_an_eighth_for_its_cache() -> None:
    [fit] = find_fits(16 * GIB, (), [SMALL])
    assert (fit.where, fit.weights_bytes) == ("memory", 1 * GIB)
    tokens = 2 * GIB // SMALL.token_bytes
    assert (fit.window, fit.streams) == (65_536, tokens // AGENT_WINDOW)
    [tight] = find_fits(2 * GIB, (), [SMALL])
    assert tight.window == GIB // 4 // SMALL.token_bytes
    assert tight.streams == 1
    [none] = find_fits(1 * GIB, (), [SMALL])
    assert (none.window, none.streams) == (0, 0)


def test_gpus_are_added_up() -> None:
    [on_one, _] = find_fits(16 * GIB, [Gpu("a", 6 * GIB)], [SMALL])
    [on_two, _] = find_fits(16 * GIB, [Gpu("a", 6 * GIB)] * 2, [SMALL])
    assert on_one.where == "gpu"
    assert 0 < on_one.window < on_two.window
    assert on_two.streams > on_one.streams


def test_the_table_has_the_models_that_singletree_brings() -> None:
    names = [size.name for size in MODEL_SIZES]
    assert set(known_models()) <= set(names)
    assert len(set(names)) == len(names)
    files = [size.gguf_bytes or 0 for size in MODEL_SIZES]
    assert files == sorted(files)


def test_doctor_shows_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = (Gpu("NVIDIA H100", 80 * GIB, 79 * GIB),)
    monkeypatch.setattr("singletree.cli.doctor.find_gpus", lambda: gpus)
    main(["doctor", "--machine"])
    shown = capsys.readouterr().out
    for words in (
        "memory",
        "NVIDIA H100, 80.0 GiB, 79.0 free",
        "llama.cpp",
        "vLLM",
        "openai/gpt-oss-20b",
        "streams:",
    ):
        assert words in shown
    main(["doctor", "--machine", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["gpus"] == [{"name": "NVIDIA H100", "memory": 80 * GIB, "free": 79 * GIB}]
    assert {fit["where"] for fit in report["models"]} == {"memory", "gpu"}
    assert set(report["engines"]) == {"llama.cpp", "vLLM", "SGLang"}


def test_doctor_needs_something_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor"])
    assert "--machine" in capsys.readouterr().err
