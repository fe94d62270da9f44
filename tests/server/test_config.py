"""Flags, environment and file: which of them wins, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cyclopts import App
from cyclopts.exceptions import CycloptsError

from singletree.cli import main
from singletree.cli.flags import SECTIONS, read_settings
from singletree.errors import BadConfiguration
from singletree.server.settings.config import Config


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


def test_each_flag_is_in_one_section_of_the_help() -> None:
    app = App()

    @app.default
    def command(config: Config = Config()) -> None:  # noqa: B008
        """Take the flags."""

    flags = [each for each in app.assemble_argument_collection() if each.parse and each.keys]
    found = {each.keys[0]: each.parameter.group for each in flags}
    assert found == {name: (section,) for name, section in SECTIONS.items()}


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


SECRETS: dict[str, tuple[str, Any]] = {
    "admin-key": ("admin_key", ("one", "two words")),
    "api-key": ("api_key", ("one", "two words")),
    "capsule-key": ("capsule_key", ("one", "two words")),
    "engine-api-key": ("engine_api_key", "one"),
    "store-url": ("store_url", "one"),
    "turn-memory-url": ("turn_memory_url", "one"),
}
"""Flags whose values other users of the machine must not see, with what is read from a file."""


@pytest.mark.parametrize("flag", SECRETS)
@pytest.mark.parametrize("place", ["flag", "environment", "file"])
def test_secrets_are_read_from_files(
    flag: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    field, expected = SECRETS[flag]
    secrets = tmp_path / "secrets"
    secrets.write_text("one\n" if isinstance(expected, str) else "\n one\r\n\ntwo words\n", encoding="utf-8")
    more = [] if flag == "capsule-key" else ["--capsule-key", "k"]
    if place == "flag":
        config = read(f"--{flag}", f"@{secrets}", *more)
    elif place == "environment":
        monkeypatch.setenv("SINGLETREE_" + flag.upper().replace("-", "_"), f"@{secrets}")
        config = read(*more)
    else:
        (tmp_path / "c.toml").write_text(f'{flag} = "@{secrets}"')
        config = read("--config", str(tmp_path / "c.toml"), *more)
    assert getattr(config, field) == expected


def test_several_secrets_may_come_from_several_places(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo")
    config = read("--api-key", f"@{tmp_path / 'a'}", "--api-key", "three@four", "--engine-api-key", "k@")
    assert (config.api_key, config.engine_api_key) == (("one", "two", "three@four"), "k@")


def test_a_file_of_secrets_that_cannot_be_used_is_named_without_them(tmp_path: Path) -> None:
    contents = {"empty": b" \n", "large": b"hush\n" * 20_000, "binary": b"\xff\xfe", "two": b"hush\nhush"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name, reason in {
        "none": "No such file",
        "empty": "no secret",
        "large": "65,536 bytes",
        "binary": "not text",
        "two": "2 lines",
    }.items():
        with pytest.raises(BadConfiguration) as refused:
            read("--engine-api-key", f"@{tmp_path / name}")
        assert refused.value.message.startswith(f"--engine-api-key @{tmp_path / name}: ")
        assert reason in refused.value.message
        assert "hush" not in refused.value.message


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
    (["--context-window", "1"], "give a number from 2 to 2147483648"),
    (["--keep-alive-seconds", "0"], "give a number from 0.01 to 3600"),
    (["--turn-memory", "12XB"], "--turn-memory: '12XB' is not a number of bytes"),
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


def test_limits_of_a_request_come_from_flag_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('limit = ["stop_strings=7"]')
    assert read("--config", str(file)).limit == ("stop_strings=7",)
    monkeypatch.setenv("SINGLETREE_LIMIT", "stop_strings=8, stop_characters=9")
    assert read("--config", str(file)).limit == ("stop_strings=8", "stop_characters=9")
    assert read("--limit", "stop_strings=1", "--limit", "stop_characters=2").limit == (
        "stop_strings=1",
        "stop_characters=2",
    )


def test_an_unknown_limit_ends_the_start() -> None:
    with pytest.raises(BadConfiguration, match="no limit has this name"):
        Config(limit=("nothing=1",))
