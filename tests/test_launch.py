"""``singletree launch``: the settings that each harness gets, and how it is started."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, get_args

import pytest

from singletree.cli import harness_settings, launch, main
from singletree.cli.harness_settings import Api
from singletree.cli.running_server import RunningServer
from singletree.errors import BadConfiguration

LIVE = {"x-singletree-live-arguments": "1"}
SERVED = harness_settings.Served("http://127.0.0.1:8000", "key", "org/model", 8192)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Mapping[str, Any]]:
    """Replace harnesses, and a server that serves ``SERVED``; return what was started."""
    seen: list[Mapping[str, Any]] = []
    monkeypatch.setenv("SINGLETREE_CACHE", str(tmp_path))
    monkeypatch.setattr(launch, "fetch_served", lambda target: SERVED)

    def start(program: str, install: str, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
        seen.append({"program": program, "arguments": arguments, "environment": environment})

    monkeypatch.setattr(launch, "exec_harness", start)
    return seen


def run(*arguments: str) -> None:
    """Run ``singletree launch`` with ``arguments``."""
    main(["launch", *arguments])


def test_claude_gets_one_model_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the user's own")
    monkeypatch.delenv("CLAUDE_CODE_MAX_OUTPUT_TOKENS", raising=False)
    environment = harness_settings.claude_environment(SERVED)
    assert "ANTHROPIC_API_KEY" not in environment
    assert environment["ANTHROPIC_BASE_URL"] == SERVED.base_url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "key"
    assert {v for k, v in environment.items() if k.startswith("ANTHROPIC") and k.endswith("MODEL")} == {
        "org/model"
    }
    for window, spare in ((32_768, 8_904), (131_072, 0)):
        larger = harness_settings.claude_environment(replace(SERVED, window=window))
        assert larger["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(window + spare)
        assert larger["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == str(min(32_000, window // 4))


def test_codex_gets_a_configuration_with_the_catalog() -> None:
    config = tomllib.loads(harness_settings.codex_configuration(SERVED))
    provider = config["model_providers"][config["model_provider"]]
    assert config["model"] == "org/model"
    assert provider["base_url"] == "http://127.0.0.1:8000/v1"
    assert provider["model_catalog_url"] == "http://127.0.0.1:8000/v1/models"
    assert provider["wire_api"] == "responses"


def test_harnesses_that_run_only_complete_calls_get_live_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    codex = tomllib.loads(harness_settings.codex_configuration(SERVED))
    assert codex["model_providers"]["singletree"]["http_headers"] == LIVE
    variable = "ANTHROPIC_CUSTOM_HEADERS"
    monkeypatch.delenv(variable, raising=False)
    assert harness_settings.claude_environment(SERVED)[variable] == "x-singletree-live-arguments: 1"
    for own in ("x-team: a\nX-Singletree-Live-Arguments: 0", "x-singletree-live-arguments: 0"):
        monkeypatch.setenv(variable, own)
        assert harness_settings.claude_environment(SERVED)[variable] == own
    monkeypatch.setenv(variable, "x-team: a")
    added = harness_settings.claude_environment(SERVED)[variable]
    assert added.splitlines() == ["x-team: a", "x-singletree-live-arguments: 1"]
    for harness in ("cline", "copilot", "kimi", "pi", "openclaw", "qwen"):
        assert not any(harness_settings.live_arguments(harness, api) for api in EVERY_API)


def test_a_harness_is_started_with_its_own_arguments(tmp_path: Path) -> None:
    program = tmp_path / "claude"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    started: list[tuple[str, list[str]]] = []

    def become(path: str, arguments: list[str], environment: Mapping[str, str]) -> NoReturn:
        started.append((path, arguments))
        raise SystemExit

    with pytest.raises(SystemExit):
        launch.exec_harness("claude", "npm", ("-p", "hi"), {"PATH": str(tmp_path)}, become=become)
    assert started == [(str(program), ["claude", "-p", "hi"])]
    with pytest.raises(BadConfiguration, match="npm install"):
        launch.exec_harness("claude", "npm install", (), {"PATH": ""}, become=become)


def test_a_model_may_be_asked_for_by_any_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"id": "org/model", "context_window": 8192}
    answers: dict[str, dict[str, Any]] = {
        "/v1/models": {"data": [known]},
        "/v1/models/openai/openai/gpt-5.5": known,
    }

    def fetch(server: RunningServer, path: str) -> dict[str, Any]:
        if path not in answers:
            raise BadConfiguration("404")
        return answers[path]

    monkeypatch.setattr(RunningServer, "fetch", fetch)
    served = launch.fetch_served(launch.Target(model="openai/openai/gpt-5.5"))
    assert (served.model, served.window) == ("openai/openai/gpt-5.5", 8192)
    with pytest.raises(
        BadConfiguration, match="does not serve the model 'gpt-4'; give --model one of org/model"
    ):
        launch.fetch_served(launch.Target(model="gpt-4"))


def test_arguments_after_the_dashes_go_to_the_harness(started: list[Mapping[str, Any]]) -> None:
    run("claude", "--model", "m", "--", "-p", "say hi", "--verbose")
    assert started[0]["arguments"] == ("-p", "say hi", "--verbose")


EVERY_API: tuple[Api, ...] = get_args(Api)


@pytest.mark.parametrize("api", EVERY_API)
def test_opencode_knows_this_model_alone_and_its_window(api: Api) -> None:
    config = harness_settings.opencode_configuration(SERVED, api)
    (name,) = config["enabled_providers"]
    provider = config["provider"][name]
    assert config["model"] == config["small_model"] == f"{name}/org/model"
    assert provider["options"] == {
        "baseURL": "http://127.0.0.1:8000/v1",
        "apiKey": "key",
        "headers": LIVE,
    }
    assert provider["models"]["org/model"]["limit"] == {"context": 8192, "output": 2048}


@pytest.mark.parametrize(
    ("api", "url"),
    [
        ("messages", "http://127.0.0.1:8000"),
        ("chat", "http://127.0.0.1:8000/v1"),
        ("responses", "http://127.0.0.1:8000/v1"),
    ],
)
def test_pi_and_openclaw_add_the_path_of_messages_themselves(api: Api, url: str) -> None:
    for configuration in (
        harness_settings.pi_models(SERVED, api),
        harness_settings.openclaw_configuration(SERVED, api)["models"],
    ):
        (provider,) = configuration["providers"].values()
        assert provider["baseUrl"] == url
        assert provider["models"][0]["contextWindow"] == 8192


def test_qwen_is_configured_by_environment_and_command_line() -> None:
    variables, _ = harness_settings.qwen_settings(SERVED, "messages")
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000"
    variables, arguments = harness_settings.qwen_settings(SERVED, "chat")
    assert variables["OPENAI_BASE_URL"] == "http://127.0.0.1:8000/v1"
    assert arguments == ("--auth-type", "openai", "-m", "org/model")


@pytest.mark.parametrize("api", EVERY_API)
def test_copilot_and_kimi_know_the_window_of_a_model_that_nobody_knows(api: Api) -> None:
    url = SERVED.url(api)
    copilot = harness_settings.copilot_environment(SERVED, api)
    assert copilot["COPILOT_PROVIDER_BASE_URL"] == url
    limits = ("COPILOT_PROVIDER_MAX_PROMPT_TOKENS", "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS")
    assert sum(int(copilot[name]) for name in limits) == SERVED.window
    kimi = harness_settings.kimi_environment(SERVED, api)
    assert kimi["KIMI_MODEL_BASE_URL"] == url
    assert kimi["KIMI_MODEL_MAX_CONTEXT_SIZE"] == str(SERVED.window)


@pytest.mark.parametrize(
    ("window", "given"), [(32_768, 32_768), (65_536, 50_000), (92_499, 50_000), (92_500, 92_500)]
)
def test_kimi_does_not_summarize_all_the_time(window: int, given: int) -> None:
    """It reserves 50,000 tokens of each larger window, so that its 21,000 do not fit beside them."""
    kimi = harness_settings.kimi_environment(replace(SERVED, window=window), "messages")
    assert kimi["KIMI_MODEL_MAX_CONTEXT_SIZE"] == str(given)


@pytest.mark.parametrize("api", EVERY_API)
def test_cline_is_given_the_version_in_the_url(api: Api) -> None:
    [provider] = harness_settings.cline_providers(SERVED, api)["providers"].values()
    assert provider["settings"]["baseUrl"] == "http://127.0.0.1:8000/v1"


def test_copilot_keeps_the_transport_that_the_user_chose(
    started: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COPILOT_PROVIDER_TRANSPORT", "websockets")
    run("copilot", "--api", "responses")
    environment = started[0]["environment"]
    assert environment["COPILOT_PROVIDER_TRANSPORT"] == "websockets"
    assert environment["COPILOT_PROVIDER_WIRE_API"] == "responses"


@pytest.mark.parametrize(
    ("harness", "variable", "file"),
    [
        ("codex", "CODEX_HOME", "config.toml"),
        ("openclaw", "OPENCLAW_CONFIG_PATH", ""),
        ("opencode", "OPENCODE_CONFIG", ""),
        ("pi", "PI_CODING_AGENT_DIR", "models.json"),
    ],
)
def test_a_configuration_of_ours_is_where_the_harness_looks_and_nobody_else_reads_it(
    started: list[Mapping[str, Any]], tmp_path: Path, harness: str, variable: str, file: str
) -> None:
    run(harness)
    written = Path(started[0]["environment"][variable]) / file
    assert written.is_relative_to(tmp_path)
    assert written.stat().st_mode & 0o077 == 0
    text = written.read_text(encoding="utf-8")
    assert "org/model" in text
    assert tomllib.loads(text) if written.suffix == ".toml" else json.loads(text)


def test_a_preamble_that_does_not_fit_the_window_is_announced(
    started: list[Mapping[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    run("claude")
    assert capsys.readouterr().err == (
        "model      org/model\n"
        "WARNING    Claude Code begins with about 12,000 tokens of instructions and tools, and org/model is served "
        "with a window of 8,192: serve a model with a window of 24,000 or more, such as Qwen/Qwen3-8B, or raise "
        "--context-window if it was set, or use pi\n"
    )
    run("pi")
    assert capsys.readouterr().err == "model      org/model\n"
    assert [each["program"] for each in started] == ["claude", "pi"], (
        "its own settings may shorten the preamble"
    )


def test_what_to_expect_is_reported_before_the_harness_starts() -> None:
    [pi] = [each for each in launch.HARNESSES if each.program == "pi"]
    mute = replace(SERVED, calls_tools=False)
    assert any("can only chat" in line and "Qwen2.5-Coder-1.5B" in line for line in pi.forecast(mute))
    later = replace(SERVED, model="Qwen2.5-Coder-1.5B-Instruct", is_loaded=False)
    assert any("(1.1 GB)" in line for line in pi.forecast(later))
    assert not any("GB" in line for line in pi.forecast(replace(later, model="another")))
    measured = replace(SERVED, prompt_speed=70.0)
    assert any("first turn about 20 s" in line and "unless" in line for line in pi.forecast(measured))


def test_the_first_turn_of_a_model_that_is_not_loaded_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"id": "SmolLM2-135M-Instruct", "calls_tools": False, "prompt_tokens_per_second": 90.0}
    able = {"id": "Qwen2.5-Coder-1.5B-Instruct", "context_window": 32768, "is_loaded": False}
    other = {"id": "org/other", "context_window": 32768, "is_loaded": False}
    monkeypatch.setattr(RunningServer, "fetch", lambda *_: {"data": [small, able, other]})
    served = launch.fetch_served(launch.Target())
    assert served.prompt_speed == pytest.approx(90 * 92_871_040 / 1_117_320_736, rel=0.1)
    [pi] = [each for each in launch.HARNESSES if each.program == "pi"]
    assert any("first turn about 3 min" in line for line in pi.forecast(served))
    assert launch.fetch_served(launch.Target(model="org/other")).prompt_speed is None


def test_a_model_that_calls_tools_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"id": "small", "context_window": 8192, "calls_tools": False}
    able = {"id": "able", "context_window": 32768, "is_loaded": False, "prompt_tokens_per_second": 66.5}
    listed = {"data": [small, able]}
    monkeypatch.setattr(RunningServer, "fetch", lambda *_: listed)
    served = launch.fetch_served(launch.Target())
    assert (served.model, served.is_loaded, served.prompt_speed) == ("able", False, 66.5)
    assert launch.fetch_served(launch.Target(model="small")).calls_tools is False
    listed["data"] = [small]
    assert launch.fetch_served(launch.Target()).model == "small"


@pytest.mark.parametrize("window", [4096, 8192, 32_768, 262_144])
def test_pi_compacts_only_when_the_window_is_nearly_full(window: int) -> None:
    compaction = harness_settings.pi_settings(replace(SERVED, window=window))["compaction"]
    # What is kept, and a summary of four fifths of the reserve, leave room for the preamble and the next turn.
    after = 1_400 + compaction["keepRecentTokens"] + 0.8 * compaction["reserveTokens"]
    assert after < window - compaction["reserveTokens"] + 1_400


def test_settings_that_pi_wrote_itself_stay(started: list[Mapping[str, Any]], tmp_path: Path) -> None:
    run("pi")
    file = Path(started[0]["environment"]["PI_CODING_AGENT_DIR"]) / "settings.json"
    own = {**json.loads(file.read_text()), "theme": "light"}
    for text in (json.dumps(own), "{damaged"):
        file.write_text(text)
        run("pi")
        assert json.loads(file.read_text())["compaction"] == own["compaction"]
        assert ("theme" in json.loads(file.read_text())) == (text != "{damaged")


def test_pi_learns_what_the_server_takes() -> None:
    for api in EVERY_API:
        compat = harness_settings.pi_models(SERVED, api)["providers"]["singletree"]["compat"]
        assert compat["supportsMidConvoSystemMessages"] is True
        assert ("sendSessionAffinityHeaders" in compat) is (api != "responses"), "there it always does"
        openclaw = harness_settings.openclaw_configuration(SERVED, api)["models"]["providers"]["singletree"]
        assert "compat" not in openclaw


def test_pi_chooses_the_model_before_its_own_arguments(started: list[Mapping[str, Any]]) -> None:
    run("pi", "--", "-p", "hi")
    assert started[0]["arguments"] == ("--provider", "singletree", "--model", "org/model", "-p", "hi")


def test_an_api_that_a_harness_does_not_speak_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("qwen", "--api", "responses")
    assert "--api" in capsys.readouterr().err
