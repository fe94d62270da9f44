"""The settings of the Ray application, in the environment with Ray: ``make ray``. No cluster is started.

Outside that environment the one test here runs this file inside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.real_vllm import ROOT
from ray_cluster import real_ray
from singletree.errors import BadConfiguration
from singletree.server.settings.config import Config

pytestmark = pytest.mark.ray

INSIDE = importlib.util.find_spec("ray") is not None
inside = pytest.mark.skipif(not INSIDE, reason="runs in Ray's own environment")
SECONDS = 300


@pytest.mark.skipif(INSIDE, reason="runs outside Ray's environment")
def test_all_of_this_file_in_the_environment_of_ray() -> None:
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests", "docs"))
    python = real_ray.install() / "bin" / "python"
    command = [str(python), "-m", "pytest", "-q", "-m", "ray", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=SECONDS, check=False)
    assert done.returncode == 0


@inside
def test_settings_come_from_arguments_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from singletree.ray.application import read_ray_settings

    file = tmp_path / "singletree.toml"
    file.write_text('engine = "scripted"\nslots = 3\nhold-seconds = 7\n', encoding="utf-8")
    monkeypatch.setenv("SINGLETREE_SLOTS", "5")
    settings = read_ray_settings(
        {"config": str(file), "engines": "3", "model_name": ["a", "b"], "store": False}
    )
    config = settings.config
    assert (settings.engines, config.slots, config.hold_seconds, config.store) == (3, 5, 7.0, False)
    assert config.model_name == ("a", "b")


@inside
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "engine is not set"),
        ({"engine": "scripted", "engines": 0}, "engines is 0"),
        ({"engine": "scripted", "engine_options": "many"}, "engine_options is 'many'"),
        ({"engine": "scripted", "no_such_flag": 1}, "no-such-flag"),
        ({"engine": "scripted", "idle_unload": 60}, "idle-unload"),
        ({"config": "/nowhere.toml"}, "/nowhere.toml"),
        ({"engine": "vllm", "engines": 2, "publish_kv_events": "yes"}, "publish_kv_events is 'yes'"),
        ({"engine": "llamacpp", "engines": 2, "publish_kv_events": True}, "no model has several engines"),
        ({"engine": "vllm", "publish_kv_events": True}, "no model has several engines"),
    ],
    ids=["engine", "engines", "options", "flag", "unload", "file", "word", "publishes none", "one engine"],
)
def test_wrong_settings_are_explained(arguments: dict[str, Any], complaint: str) -> None:
    from singletree.ray.application import read_ray_settings

    with pytest.raises(BadConfiguration, match=complaint):
        read_ray_settings(arguments)


@inside
@pytest.mark.parametrize(
    ("engine", "words", "gpus"),
    [
        ("vllm", [], 1),
        ("vllm", ["--tensor-parallel-size", "4"], 4),
        ("vllm", ["--tensor-parallel-size=4", "-pp", "2"], 8),
        ("sglang", ["--tp", "2"], 2),
        ("llamacpp", [], 0),
    ],
)
def test_an_engine_gets_the_gpus_that_its_arguments_ask_for(engine: str, words: list[str], gpus: int) -> None:
    from singletree.ray.application import gpus_of, read_ray_settings

    settings = read_ray_settings({"engine": engine, "model": "m", "engine_arguments": words})
    assert gpus_of(settings.config) == gpus


@inside
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_publishes_its_kv_events_where_it_says(engine: str) -> None:
    from singletree.ray.application import read_ray_settings
    from singletree.ray.replicas import publish_kv_events

    arguments = {"engine": engine, "model": "m", "engines": 2, "publish_kv_events": "true"}
    settings = read_ray_settings(arguments)
    assert settings.publish_kv_events
    config, publisher = publish_kv_events(settings.config, "10.0.0.7")
    *_, flag, value = config.engine_arguments
    published = json.loads(value)
    assert flag == "--kv-events-config"
    assert publisher.events == published["endpoint"].replace("*", "10.0.0.7")
    assert publisher.replay == published["replay_endpoint"].replace("*", "10.0.0.7")
    assert publisher.events != publisher.replay
    assert publish_kv_events(settings.config, "fd00::7")[1].events.startswith("tcp://[fd00::7]:")


@inside
@pytest.mark.parametrize("word", ["--kv_events_config={}", "--data-parallel-size=2", "-dp"])
def test_settings_of_the_users_own_are_left_alone(word: str) -> None:
    from singletree.ray.replicas import can_publish

    config = Config(engine="vllm", engine_arguments=("--enforce-eager",))
    assert can_publish(config)
    assert not can_publish(replace(config, engine_arguments=(word,)))


@inside
def test_the_application_is_a_function_of_the_package() -> None:
    from singletree.ray import app

    assert app({"engine": "vllm", "model": "m", "engines": 2, "engine_arguments": ["-tp", "2"]})
