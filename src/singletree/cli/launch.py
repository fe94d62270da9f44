"""``singletree launch``: a harness, told where the server is."""

from __future__ import annotations

import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import urlsplit

from cyclopts import App, Parameter

from singletree.engines.weights import cache_folder
from singletree.errors import BadConfiguration

app = App(name="launch", help="Start a harness against a running server.")

_SECONDS = 5
_NO_KEY = "singletree"
"""What a harness sends where the server asks for no key: none of them goes without one."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Target:
    """A running server."""

    base_url: Annotated[str, Parameter(env_var="SINGLETREE_BASE_URL")] = "http://127.0.0.1:8000"
    """Where it is."""

    model: str | None = None
    """Which of its models; the first by default."""

    api_key: Annotated[str | None, Parameter(env_var="SINGLETREE_API_KEY")] = None
    """A key that it takes."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a harness must know of a server and one of its models. ``window`` is in tokens."""

    base_url: str
    key: str
    model: str
    window: int | None


Arguments = Annotated[str, Parameter(allow_leading_hyphen=True)]


@app.command
def claude(*arguments: Arguments, target: Target = Target()) -> None:
    """Start Claude Code.

    Parameters
    ----------
    arguments
        After --, for Claude Code itself.
    """
    served = ask(target)
    start("claude", "npm install -g @anthropic-ai/claude-code", arguments, claude_environment(served))


@app.command
def codex(*arguments: Arguments, target: Target = Target()) -> None:
    """Start Codex, with a configuration of its own.

    Parameters
    ----------
    arguments
        After --, for Codex itself.
    """
    served = ask(target)
    home = cache_folder() / "codex"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(codex_configuration(served), encoding="utf-8")
    environment = {**os.environ, "CODEX_HOME": str(home), "SINGLETREE_API_KEY": served.key}
    start("codex", "npm install -g @openai/codex", arguments, environment)


def ask(target: Target) -> Served:
    """What the server says of the model. Raises BadConfiguration when it does not answer or has none such."""
    base_url = target.base_url.rstrip("/").removesuffix("/v1")
    key = target.api_key or _NO_KEY
    if not _is_url(base_url):
        raise BadConfiguration(f"--base-url {base_url!r} is no URL; give one such as {Target.base_url}")
    request = urllib.request.Request(f"{base_url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            models = {str(model["id"]): model for model in json.load(answer)["data"]}
    except urllib.error.HTTPError as error:
        cure = "give --api-key" if error.code == 401 else "is it singletree?"
        raise BadConfiguration(f"{base_url} answers with {error.code}; {cure}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        raise BadConfiguration(
            f"no server at {base_url} ({reason}); start one with `singletree serve`"
        ) from None
    except (HTTPException, ValueError, KeyError, TypeError):
        raise BadConfiguration(f"{base_url} does not list its models; is it singletree?") from None
    model = target.model or next(iter(models), "")
    if not models:
        raise BadConfiguration(f"{base_url} serves no model")
    known = models.get(model)
    if known is None and target.model is not None:
        raise BadConfiguration(f"{base_url} serves no {model!r}; it serves {', '.join(models)}")
    window = known.get("context_window") if known else None
    return Served(base_url, key, model, window if isinstance(window, int) else None)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def claude_environment(served: Served) -> dict[str, str]:
    """The environment of Claude Code: every model that it may ask for is the served one, and it calls
    nobody else.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_CLAUDE}
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")))
    quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY")
    environment |= {
        "ANTHROPIC_BASE_URL": served.base_url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        "CLAUDE_CODE_SUBAGENT_MODEL": served.model,
        **dict.fromkeys(models, served.model),
        **dict.fromkeys(quiet, "1"),
    }
    if served.window is not None:
        # It gives a model that it does not know a window of a million tokens, and would never compact.
        environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(served.window)
    return environment


_NOT_FOR_CLAUDE = {"ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"}
"""They would send it elsewhere, or make it ask which of two keys to use."""


def codex_configuration(served: Served) -> str:
    """Codex's ``config.toml``. The catalog tells it the window, the tools and how to truncate."""
    model, url = json.dumps(served.model), json.dumps(f"{served.base_url}/v1")
    catalog = json.dumps(f"{served.base_url}/v1/models")
    return f"""\
model = {model}
model_provider = "singletree"
check_for_update_on_startup = false
features.plugins = false
features.remote_plugin = false
features.apps = false

[model_providers.singletree]
name = "singletree"
base_url = {url}
model_catalog_url = {catalog}
env_key = "SINGLETREE_API_KEY"
wire_api = "responses"

[analytics]
enabled = false

[feedback]
enabled = false

[otel]
exporter = "none"
"""


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
