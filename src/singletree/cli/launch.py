"""``singletree launch`` and ``catalog``: start a harness on a running server, or write the catalog for Codex."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import quote

import msgspec
from cyclopts import App, Parameter

from singletree.cli import harness_settings
from singletree.cli.flag_values import Arguments
from singletree.cli.harness_settings import Api, QwenApi, Served
from singletree.cli.running_server import RunningServer
from singletree.engines.checkpoint import DEFAULT_AGENT_MODEL, cache_folder
from singletree.errors import BadConfiguration
from singletree.llamacpp.preambles import PREAMBLES, describe_duration
from singletree.model_files.built_in import packaged_size
from singletree.private_files import FOLDER_MODE, create_private

app = App(name="launch", help="Start a harness against a running server.")

_NO_KEY = "singletree"
"""The key that harnesses send to a server without keys: none of them starts without one."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Target:
    """The running server and the model that a command uses."""

    server: RunningServer = RunningServer()  # noqa: RUF009 (frozen)

    model: str | None = None
    """Name of the model; by default the server's first model that calls tools."""


Environment = dict[str, str]
Settings = Callable[[Served, Any], tuple[Environment, tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Harness:
    """A harness that a command of its own starts.

    Attributes:
        program: name of its executable, and of the command.
        package: the npm package that installs it.
        settings: returns its environment variables and the arguments before the user's own, for a server and an API;
            writes its configuration file, if it needs one.
        api: the API that it uses by default.
        apis: the type of ``--api``; None for a harness that knows only one API.
        summary: the end of the sentence "Start <title> …" in the command's help.
    """

    program: str
    package: str
    settings: Settings
    api: Api
    apis: Any = None
    summary: str = ""

    @property
    def title(self) -> str:
        return PREAMBLES[self.program].title

    @property
    def preamble_tokens(self) -> int:
        """About how many tokens its instructions and tools take in the first prompt of a session."""
        return PREAMBLES[self.program].tokens

    def run(self, arguments: tuple[str, ...], api: Api, target: Target) -> None:
        """Start the harness for the server ``target``, with the user's ``arguments``."""
        served = fetch_served(target)
        for line in self.forecast(served):
            print(line, file=sys.stderr)
        environment, own = self.settings(served, api)
        exec_harness(self.program, f"npm install -g {self.package}", (*own, *arguments), environment)

    def forecast(self, served: Served) -> list[str]:
        """Return lines that tell the user what to expect of ``served``: what will not work, and how long it takes."""
        lines = [f"model      {served.model}"]
        if not served.is_loaded:
            size = packaged_size(served.model)
            fetched = f", and fetches it if it is not there ({size / 1e9:.1f} GB)" if size else ""
            lines.append(f"first turn loads the model{fetched}")
        if served.calls_tools is False:
            lines.append(
                f"WARNING    {served.model} is never told of any tool, so that {self.title} can only chat: serve a "
                f"model that calls tools, such as `singletree serve --model {DEFAULT_AGENT_MODEL}`"
            )
        if served.window is not None and served.window < self.preamble_tokens:
            # No error: arguments and settings of the harness can make its preamble shorter.
            lines.append(f"WARNING    {self._window_problem(served.model, served.window)}")
        if served.prompt_speed and served.window and served.window >= self.preamble_tokens:
            seconds = describe_duration(self.preamble_tokens / served.prompt_speed)
            lines.append(
                f"first turn about {seconds} until the first word, unless the server has read the beginning before: "
                f"{self.title} begins with {self.preamble_tokens:,} tokens, and {served.prompt_speed:.0f} are read in "
                f"a second"
            )
        return lines

    def _window_problem(self, model: str, window: int) -> str:
        need = 2 * self.preamble_tokens  # as much again for the work itself
        fitting = [each.title for each in HARNESSES if 2 * each.preamble_tokens <= window]
        other = f", or use {' or '.join(fitting)}" if fitting else ""
        return (
            f"{self.title} begins with about {self.preamble_tokens:,} tokens of instructions and tools, and {model} is "
            f"served with a window of {window:,}: serve a model with a window of {need:,} or more, such as "
            f"Qwen/Qwen3-8B, or raise --context-window if it was set{other}"
        )


def _claude(served: Served, _: Api) -> tuple[Environment, tuple[str, ...]]:
    return harness_settings.claude_environment(served), ()


def _cline(served: Served, api: Api) -> tuple[Environment, tuple[str, ...]]:
    file = _write_configuration(
        "cline/settings/providers.json", harness_settings.cline_providers(served, api)
    )
    return {**os.environ}, ("--data-dir", str(file.parent.parent))


def _codex(served: Served, _: Api) -> tuple[Environment, tuple[str, ...]]:
    file = _write_configuration("codex/config.toml", harness_settings.codex_configuration(served))
    return {**os.environ, "CODEX_HOME": str(file.parent), "SINGLETREE_API_KEY": served.key}, ()


def _openclaw(served: Served, api: Api) -> tuple[Environment, tuple[str, ...]]:
    file = _write_configuration(
        "openclaw/openclaw.json", harness_settings.openclaw_configuration(served, api)
    )
    paths = {"OPENCLAW_CONFIG_PATH": str(file), "OPENCLAW_STATE_DIR": str(file.parent / "state")}
    return {**os.environ, **paths}, ()


def _opencode(served: Served, api: Api) -> tuple[Environment, tuple[str, ...]]:
    file = _write_configuration(
        "opencode/opencode.json", harness_settings.opencode_configuration(served, api)
    )
    return {**os.environ, "OPENCODE_CONFIG": str(file)}, ()


def _pi(served: Served, api: Api) -> tuple[Environment, tuple[str, ...]]:
    file = _write_configuration("pi/models.json", harness_settings.pi_models(served, api))
    _write_configuration(
        "pi/settings.json", _merged("pi/settings.json", harness_settings.pi_settings(served))
    )
    chosen = ("--provider", harness_settings.PROVIDER, "--model", served.model)
    return {**os.environ, "PI_CODING_AGENT_DIR": str(file.parent)}, chosen


def _variables(make: Callable[[Served, Any], Environment]) -> Settings:
    return lambda served, api: ({**os.environ, **make(served, api)}, ())


def _qwen(served: Served, api: QwenApi) -> tuple[Environment, tuple[str, ...]]:
    variables, arguments = harness_settings.qwen_settings(served, api)
    return {**os.environ, **variables}, arguments


_SEPARATE = "with a separate configuration"
_ON_TOP = "with the user's settings and a configuration on top of them"

HARNESSES: tuple[Harness, ...] = (
    Harness("claude", "@anthropic-ai/claude-code", _claude, "messages"),
    # On Messages it limits each answer to 4,096 tokens.
    Harness("cline", "cline", _cline, "chat", Api, _SEPARATE),
    Harness("codex", "@openai/codex", _codex, "responses", summary=_SEPARATE),
    Harness("copilot", "@github/copilot", _variables(harness_settings.copilot_environment), "messages", Api),
    Harness("kimi", "@moonshot-ai/kimi-code", _variables(harness_settings.kimi_environment), "messages", Api),
    # On the other two APIs it moves a message to the end of every prompt, so the engine reads the last turn again.
    Harness("openclaw", "openclaw", _openclaw, "responses", Api, _SEPARATE),
    Harness("opencode", "opencode-ai", _opencode, "messages", Api, _ON_TOP),
    Harness("pi", "@earendil-works/pi-coding-agent", _pi, "messages", Api, _SEPARATE),
    Harness("qwen", "@qwen-code/qwen-code", _qwen, "chat", QwenApi),
)


def _command(harness: Harness) -> Callable[..., None]:
    """Return the function from whose signature and docstring the command of ``harness`` is made."""

    def command(*arguments: Arguments, api: Any = harness.api, target: Target = Target()) -> None:
        harness.run(arguments, api, target)

    command.__annotations__["api"] = (
        Annotated[harness.apis, Parameter(help="API of the server that the harness uses.")]
        if harness.apis is not None
        else Annotated[Any, Parameter(parse=False)]
    )
    command.__doc__ = f"""{" ".join(("Start", harness.title, harness.summary)).rstrip()}.

    Parameters
    ----------
    arguments
        Arguments for {harness.title} itself, after --.
    """
    return command


for _harness in HARNESSES:
    app.command(_command(_harness), name=_harness.program)


def _write_configuration(name: str, content: str | dict[str, Any]) -> Path:
    """Write a configuration file into the cache, readable by its owner only: it may contain a key."""
    path = cache_folder() / name
    path.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content, indent=2)
    create_private(path)
    path.write_text(text, encoding="utf-8")
    return path


def _merged(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the file ``name`` of the cache, which the harness writes too, with ``settings`` added."""
    try:
        found = json.loads((cache_folder() / name).read_bytes())
    except (OSError, ValueError, RecursionError):
        found = None
    return {**(found if isinstance(found, dict) else {}), **settings}


def fetch_served(target: Target) -> Served:
    """Ask the server for the model of ``target``.

    Raises:
        BadConfiguration: the server does not answer, or does not serve that model.
    """
    base_url = target.server.root
    listed = target.server.fetch("/v1/models")
    try:
        models = {str(model["id"]): model for model in listed["data"]}
    except (KeyError, TypeError):
        raise BadConfiguration(f"{base_url} does not list its models; is it singletree?") from None
    model = target.model or next(
        (name for name, each in models.items() if each.get("calls_tools") is not False),
        next(iter(models), ""),
    )
    if not models:
        raise BadConfiguration(f"{base_url} serves no model")
    known = models.get(model)
    if known is None and target.model is not None:
        with suppress(BadConfiguration):  # It may be listed under another name.
            known = target.server.fetch(f"/v1/models/{quote(model)}")
        if known is None:
            raise BadConfiguration(
                f"{base_url} does not serve the model {model!r}; give --model one of {', '.join(models)}"
            )
    known = known or {}
    window, speed = known.get("context_window"), _prompt_speed(model, known, models)
    return Served(
        base_url,
        target.server.api_key or _NO_KEY,
        model,
        window if isinstance(window, int) else None,
        calls_tools=known.get("calls_tools"),
        is_loaded=known.get("is_loaded") is not False,
        prompt_speed=speed,
    )


def _prompt_speed(model: str, known: dict[str, Any], models: dict[str, dict[str, Any]]) -> float | None:
    """Return the measured speed of ``model``; before it is loaded, an estimate from the size of a measured one."""
    for name, each in ((model, known), *models.items()):
        speed, size, own = each.get("prompt_tokens_per_second"), packaged_size(name), packaged_size(model)
        if isinstance(speed, int | float) and speed > 0:
            if name == model:
                return speed
            if size and own:
                return speed * size / own
    return None


def exec_harness(
    program: str,
    install: str,
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    become: Callable[[str, list[str], Mapping[str, str]], NoReturn] = os.execve,
) -> None:
    """Replace this process by the harness.

    Args:
        program: name of the executable.
        install: command that installs it, for the error message.
        arguments: the program's arguments.
        environment: the program's environment variables.
        become: replaces the process.

    Raises:
        BadConfiguration: the program is not installed.
    """
    path = shutil.which(program, path=environment.get("PATH"))
    if path is None:
        raise BadConfiguration(f"{program} is not on the PATH; install it with: {install}")
    become(str(Path(path)), [program, *arguments], environment)


_CATALOG_SECONDS = 60


def catalog(
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    bundled: Annotated[bool, Parameter(negative="")] = False,
    codex: str = "codex",
    target: Target = Target(),
) -> None:
    """Write a running server's model catalog for Codex (`model_catalog_json`), after Codex has accepted it.

    Parameters
    ----------
    output
        File to write; standard output by default.
    bundled
        Write the catalog that comes with Codex, for `serve --codex-catalog`.
    codex
        Codex executable that checks the catalog.
    """
    program = shutil.which(codex)
    if program is None:
        raise BadConfiguration(f"{codex} is not on the PATH; install it with: npm install -g @openai/codex")
    if bundled:
        text = _run_codex(program, "--bundled")
    else:
        text = _served(target)
        _check(program, text)
    if output is None:
        sys.stdout.write(text)
        return
    output.write_text(text, encoding="utf-8")
    print(f"{output}: {', '.join(_slugs(text))}")


def _served(target: Target) -> str:
    """Return the catalog that the server sends to Codex. Raises BadConfiguration when it does not answer."""
    fetch_served(target)
    entries = target.server.fetch("/v1/models?client_version=0", seconds=_CATALOG_SECONDS)["models"]
    return msgspec.json.format(msgspec.json.encode({"models": entries}), indent=2).decode() + "\n"


def _check(program: str, text: str) -> None:
    """Raise BadConfiguration with Codex's own message when Codex does not accept the catalog."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        accepted = _run_codex(program, "-c", f"model_catalog_json={msgspec.json.encode(file.name).decode()}")
    missing = set(_slugs(text)) - set(_slugs(accepted))
    if missing:
        raise BadConfiguration(f"Codex accepted the catalog without {', '.join(sorted(missing))}")


def _run_codex(program: str, *arguments: str) -> str:
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [program, "debug", "models", *arguments],
            capture_output=True,
            text=True,
            timeout=_CATALOG_SECONDS,
            env={**os.environ, "CODEX_HOME": home},
            check=False,
        )
    if done.returncode:
        reason = next(
            (line for line in done.stderr.splitlines() if line.startswith("Error")), done.stderr.strip()
        )
        raise BadConfiguration(f"Codex does not accept the catalog: {reason}")
    return done.stdout


def _slugs(text: str) -> list[str]:
    return [entry["slug"] for entry in msgspec.json.decode(text)["models"]]
