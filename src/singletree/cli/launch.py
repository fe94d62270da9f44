"""``singletree launch``: a harness, told where the server is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import quote

from cyclopts import App, Parameter

from singletree.cli import harness_settings
from singletree.cli.harness_settings import Api, QwenApi, Served
from singletree.cli.running_server import DEFAULT_URL, fetch
from singletree.engines.weights import cache_folder
from singletree.errors import BadConfiguration

app = App(name="launch", help="Start a harness against a running server.")

_NO_KEY = "singletree"
"""What a harness sends where the server asks for no key: none of them goes without one."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Target:
    """A running server."""

    base_url: Annotated[str, Parameter(env_var="SINGLETREE_BASE_URL")] = DEFAULT_URL
    """Where it is."""

    model: str | None = None
    """Which of its models; the first by default."""

    api_key: Annotated[str | None, Parameter(env_var="SINGLETREE_API_KEY")] = None
    """A key that it takes."""


_SPOKEN = Parameter(help="Which of the server's protocols it speaks.")
Arguments = Annotated[str, Parameter(allow_leading_hyphen=True)]


@app.command
def claude(*arguments: Arguments, target: Target = Target()) -> None:
    """Start Claude Code.

    Parameters
    ----------
    arguments
        After --, for Claude Code itself.
    """
    environment = harness_settings.claude_environment(ask(target))
    start("claude", "npm install -g @anthropic-ai/claude-code", arguments, environment)


@app.command
def codex(*arguments: Arguments, target: Target = Target()) -> None:
    """Start Codex, with a configuration of its own.

    Parameters
    ----------
    arguments
        After --, for Codex itself.
    """
    served = ask(target)
    file = _written("codex/config.toml", harness_settings.codex_configuration(served))
    environment = {**os.environ, "CODEX_HOME": str(file.parent), "SINGLETREE_API_KEY": served.key}
    start("codex", "npm install -g @openai/codex", arguments, environment)


@app.command
def openclaw(
    *arguments: Arguments,
    api: Annotated[Api, _SPOKEN] = "responses",
    target: Target = Target(),
) -> None:
    """Start OpenClaw, with a configuration of its own.

    Parameters
    ----------
    arguments
        After --, for OpenClaw itself.
    """
    # On the other two it moves a message to the end of every prompt, and the last turn is read anew.
    served = ask(target)
    file = _written("openclaw/openclaw.json", harness_settings.openclaw_configuration(served, api))
    told = {"OPENCLAW_CONFIG_PATH": str(file), "OPENCLAW_STATE_DIR": str(file.parent / "state")}
    start("openclaw", "npm install -g openclaw", arguments, {**os.environ, **told})


@app.command
def opencode(
    *arguments: Arguments,
    api: Annotated[Api, _SPOKEN] = "messages",
    target: Target = Target(),
) -> None:
    """Start OpenCode: its own settings, and a configuration on top of them.

    Parameters
    ----------
    arguments
        After --, for OpenCode itself.
    """
    served = ask(target)
    file = _written("opencode/opencode.json", harness_settings.opencode_configuration(served, api))
    start("opencode", "npm install -g opencode-ai", arguments, {**os.environ, "OPENCODE_CONFIG": str(file)})


@app.command
def pi(
    *arguments: Arguments,
    api: Annotated[Api, _SPOKEN] = "messages",
    target: Target = Target(),
) -> None:
    """Start pi, with a configuration of its own.

    Parameters
    ----------
    arguments
        After --, for pi itself.
    """
    served = ask(target)
    file = _written("pi/models.json", harness_settings.pi_models(served, api))
    chosen = ("--provider", harness_settings.PROVIDER, "--model", served.model)
    environment = {**os.environ, "PI_CODING_AGENT_DIR": str(file.parent)}
    start("pi", "npm install -g @mariozechner/pi-coding-agent", (*chosen, *arguments), environment)


@app.command
def qwen(
    *arguments: Arguments,
    api: Annotated[QwenApi, _SPOKEN] = "chat",
    target: Target = Target(),
) -> None:
    """Start qwen-code.

    Parameters
    ----------
    arguments
        After --, for qwen-code itself.
    """
    served = ask(target)
    chosen = harness_settings.qwen_arguments(served, api)
    environment = harness_settings.qwen_environment(served, api)
    start("qwen", "npm install -g @qwen-code/qwen-code", (*chosen, *arguments), environment)


def _written(name: str, content: str | dict[str, Any]) -> Path:
    """A configuration file in the cache, for its owner's eyes: it may hold a key."""
    path = cache_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content, indent=2)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return path


def ask(target: Target) -> Served:
    """What the server says of the model. Raises BadConfiguration when it does not answer or has none such."""
    base_url = target.base_url.rstrip("/").removesuffix("/v1")
    key = target.api_key or _NO_KEY
    listed = fetch(base_url, key, "/v1/models")
    try:
        models = {str(model["id"]): model for model in listed["data"]}
    except (KeyError, TypeError):
        raise BadConfiguration(f"{base_url} does not list its models; is it singletree?") from None
    model = target.model or next(iter(models), "")
    if not models:
        raise BadConfiguration(f"{base_url} serves no model")
    known = models.get(model)
    if known is None and target.model is not None:
        known = _under_another_name(base_url, key, model)
        if known is None:
            raise BadConfiguration(f"{base_url} serves no {model!r}; it serves {', '.join(models)}")
    window = known.get("context_window") if known else None
    return Served(base_url, key, model, window if isinstance(window, int) else None)


def _under_another_name(base_url: str, key: str, model: str) -> dict[str, Any] | None:
    """What the server says of a model that it lists under another name, if it has one."""
    try:
        return fetch(base_url, key, f"/v1/models/{quote(model)}")
    except BadConfiguration:
        return None


def start(
    program: str,
    install: str,
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    become: Callable[[str, list[str], Mapping[str, str]], NoReturn] = os.execve,
) -> None:
    """Become the harness. Raises BadConfiguration when it is not installed."""
    path = shutil.which(program, path=environment.get("PATH"))
    if path is None:
        raise BadConfiguration(f"there is no {program} on the PATH; install it with: {install}")
    become(str(Path(path)), [program, *arguments], environment)
