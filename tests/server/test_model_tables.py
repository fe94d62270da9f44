"""Several models by --config and by --model: what each gets, and what is said of a wrong table."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from cyclopts.exceptions import CycloptsError

from singletree.cli.flags import MODEL_FIELDS, with_each_model
from singletree.errors import BadConfiguration
from singletree.server.settings.config import Config

from .test_config import read


def written(tmp_path: Path, text: str, *flags: str) -> Config:
    """The configuration by a file with ``text``, and by flags."""
    path = tmp_path / "models.toml"
    path.write_text(text)
    return with_each_model(read("--config", str(path), *flags))


def test_a_table_wins_over_what_holds_for_all(tmp_path: Path) -> None:
    text = """
        port = 9
        slots = 2
        [[models]]
        model = "a b.gguf"
        served-model-name = ["big", "bigger"]
        max_model_len = 4096
        turn-memory = "3MiB"
        [[models]]
        engine = "scripted"
        model-alias = "claude-haiku-*"
        slots = 4
        restore-reasoning = false
    """
    config = written(tmp_path, text, "--threads", "3")
    one, two = config.each_model
    assert (one.model, one.model_name, one.context_window, one.slots, one.turn_memory) == (
        "a b.gguf",
        ("big", "bigger"),
        4096,
        2,
        3 * 2**20,
    )
    assert (two.model, two.engine, two.model_alias, two.slots, two.restore_reasoning) == (
        None,
        "scripted",
        ("claude-haiku-*",),
        4,
        False,
    )
    assert [(each.port, each.threads) for each in (config, one, two)] == [(9, 3)] * 3
    assert one.restore_reasoning


def test_model_several_times() -> None:
    config = with_each_model(read("--model", "a", "--model-path", "b", "--slots", "3"))
    assert [(each.model, each.slots) for each in config.each_model] == [("a", 3), ("b", 3)]


def test_without_any_model_there_is_one_for_words_and_one_for_agents() -> None:
    config = with_each_model(read("--slots", "2", "--port", "9"))
    words, agents = config.each_model
    assert config.built_in
    assert (words.model, words.load, words.slots) == ("SmolLM2-135M-Instruct", "start", 2)
    assert (agents.model, agents.load, agents.slots) == ("Qwen2.5-Coder-1.5B-Instruct", "lazy", 2)
    assert agents.context_window == 32_768


@pytest.mark.parametrize(
    "given",
    [
        ("--context-window", "4096"),
        ("--model-name", "mine"),
        ("--engine", "scripted"),
        ("--engine", "vllm"),
        ("--engine-url", "http://127.0.0.1:1"),
        ("--chat-template", "a.jinja"),
        ("--turn-memory-path", "a", "--capsule-key", "b"),
    ],
)
def test_a_setting_of_one_model_leaves_one_model(given: tuple[str, ...]) -> None:
    config = read(*given)
    assert with_each_model(config) is config


def test_one_model_is_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    one = read("--model", "a")
    assert with_each_model(one) is one
    assert (one.model, one.each_model) == ("a", ())
    monkeypatch.setenv("SINGLETREE_MODEL", "my models/a, b.gguf")
    assert read().model == "my models/a, b.gguf"


def test_the_fields_of_a_model_exist() -> None:
    assert {each.name for each in fields(Config)} > MODEL_FIELDS


WRONG = [
    (
        '[[models]]\n[[models]]\nmodle = "x"',
        r"models\.toml: \[\[models\]\] 2: there is no setting 'modle'; is model",
    ),
    ("[[models]]\nqqqqq = 1", "the keys are chat-template, .*turn-memory"),
    ("[[models]]\nport = 1", "port holds for the whole server; put it at the top"),
    ('[[models]]\nslots = "x"', r"\[\[models\]\] 1: slots is 'x'.*int"),
    ("[[models]]\nslots = 0", r"\[\[models\]\] 1: --slots is 0; give a number"),
    ('[[models]]\nengine = "magic"', "engine is 'magic'.*scripted"),
    ('[[models]]\nturn-memory = "much"', "'much' is not a number of bytes"),
    ('[[models]]\nmodel = ["a", "b"]', "one table for each model"),
    ("[[models]]\nslots = 1\nmax-num-seqs = 2", "max-num-seqs is set twice"),
    ("[models]\nslots = 1", "not a list of tables"),
    ('model = "x"\n[[models]]\nslots = 1', "--model x is given besides the tables"),
    ('model-name = "x"\n[[models]]\n[[models]]\n', "--model-name holds for one model"),
    ('[[models]]\nmodel-name = "x"\n[[models]]\nmodel-alias = "X"', "'x' is that of .*1, too"),
    ('[[models]]\nload = "lazy"', "--load lazy needs --context-window"),
    ('[[models]]\nidle-unload = 9\nengine-url = "http://h"', "leave it out with --engine-url"),
]


@pytest.mark.parametrize(("text", "says"), WRONG, ids=[wrong[1][:30] for wrong in WRONG])
def test_what_is_wrong_in_a_table_is_named(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises((BadConfiguration, CycloptsError), match=f"(?s){says}"):
        written(tmp_path, text)
