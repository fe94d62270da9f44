"""Flags, environment and file: which of them wins, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cyclopts import App
from cyclopts.exceptions import CycloptsError

from singletree.cli import main
from singletree.errors import BadConfiguration
from singletree.server.models.config import Config, read_settings


def read(*flags: str) -> Config:
    """The configuration that a command line gives."""
    app = App(config=read_settings, result_action="return_value")

    @app.default
    def command(config: Config = Config()) -> Config:  # noqa: B008
        return config

    found = app(list(flags), print_error=False, exit_on_error=False)
    assert isinstance(found, Config)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text('port = 1\nhost = "::1"\napi-key = ["f"]\nenable_anthropic_api = false\nslots = 2\n')
    return path


def test_defaults() -> None:
    config = read()
    assert config == Config()
    assert (config.host, config.port, config.enable_anthropic_api) == ("127.0.0.1", 8000, True)
    assert config.strip_anthropic_preamble


def test_flag_wins_over_environment_over_file_over_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINGLETREE_PORT", "2")
    monkeypatch.setenv("SINGLETREE_HOST", "::2")
    config = read("--config", str(file), "--port", "3")
    assert (config.port, config.host, config.slots, config.keep_alive_seconds) == (3, "::2", 2, 10.0)
    assert (config.api_key, config.enable_anthropic_api) == (("f",), False)
    monkeypatch.setenv("SINGLETREE_CONFIG", str(file))
    assert read().slots == 2


ALIASES: list[tuple[list[str], dict[str, Any]]] = [
    (["--http-host", "::1", "--http-port", "9"], {"host": "::1", "port": 9}),
    (["--dyn-tool-call-parser", "hermes"], {"tool_call_parser": "hermes"}),
    (["--dyn-reasoning-parser", "qwen3"], {"reasoning_parser": "qwen3"}),
    (["--tool-call-parser", "hermes", "--reasoning-parser", "x"], {"tool_call_parser": "hermes"}),
    (["--custom-jinja-template", "t.jinja"], {"chat_template": Path("t.jinja")}),
    (["--model-path", "m.gguf"], {"model": "m.gguf"}),
    (["--model-name", "a"], {"model_name": ("a",)}),
    (["--served-model-name", "a", "b"], {"model_name": ("a", "b")}),
    (["--enable-anthropic-api"], {"enable_anthropic_api": True}),
    (["--no-enable-anthropic-api"], {"enable_anthropic_api": False}),
    (["--strip-anthropic-preamble"], {"strip_anthropic_preamble": True}),
    (["--no-strip-anthropic-preamble"], {"strip_anthropic_preamble": False}),
    (["--enable-streaming-tool-dispatch"], {"enable_streaming_tool_dispatch": True}),
    (["--api-key", "a", "--api-key", "b"], {"api_key": ("a", "b")}),
    (["--max-model-len", "4096"], {"context_window": 4096}),
]


@pytest.mark.parametrize(("flags", "meant"), ALIASES, ids=[" ".join(a[0]) for a in ALIASES])
def test_flags_of_other_servers(flags: list[str], meant: dict[str, Any]) -> None:
    config = read(*flags)
    assert {name: getattr(config, name) for name in meant} == meant


WRONG = [
    (["--port", "70000"], "--port is 70000"),
    (["--slots", "0"], "--slots is 0"),
    (["--api-key", ""], "--api-key is empty"),
    (["--config", "nowhere.toml"], "nowhere.toml: No such file"),
    (["--port", "x"], '"x"'),
    (["--prt", "1"], "--prt"),
    (["--engine", "magic"], "magic"),
]


@pytest.mark.parametrize(("flags", "says"), WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_what_is_wrong_is_named(flags: list[str], says: str) -> None:
    with pytest.raises((BadConfiguration, CycloptsError)) as caught:
        read(*flags)
    assert says in str(caught.value)


@pytest.mark.parametrize("content", ["port = ", "prot = 1", 'port = "x"', "[server]\nport = 1"])
def test_a_file_that_is_wrong_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(content)
    with pytest.raises((BadConfiguration, CycloptsError), match=r"wrong\.toml"):
        read("--config", str(path))


def test_arguments_for_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = ("--tensor-parallel-size", "4", "-O3")
    seen: list[Config] = []
    monkeypatch.setattr("singletree.cli.serve._event_loop_runner", lambda: lambda running: running.close())

    def run_server(config: Config, *more: object) -> Any:
        seen.append(config)

        async def nothing() -> None:
            """Nothing is served."""

        return nothing()

    monkeypatch.setattr("singletree.server.http.run.run_server", run_server)
    path = tmp_path / "settings.toml"
    path.write_text('engine-arguments = ["--dtype", "half"]\n')
    main(["serve", "--engine", "vllm", "--model", "m", "--", *given])
    main(["serve", "--config", str(path), "--", *given])
    assert [config.engine_arguments for config in seen] == [given, ("--dtype", "half", *given)]
    assert (seen[0].engine, seen[1].engine) == ("vllm", "auto")
