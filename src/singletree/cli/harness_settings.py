"""What each harness is told to work with a server of ours: its environment and its own configuration file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Api = Literal["messages", "chat", "responses"]
QwenApi = Literal["messages", "chat"]

PROVIDER = "singletree"
"""What we are called in their configurations."""

_OUTPUT_TOKENS = 32_000
"""Most tokens of one answer where a harness wants a number; the server clamps it to what fits."""
_UNKNOWN_WINDOW = 131_072


@dataclass(frozen=True, slots=True)
class Served:
    """What a harness must know of a server and one of its models. ``window`` is in tokens."""

    base_url: str
    key: str
    model: str
    window: int | None

    def url(self, api: Api) -> str:
        """Where ``api`` is, as the harnesses want it: those of OpenAI's APIs with the version."""
        return self.base_url if api == "messages" else f"{self.base_url}/v1"

    @property
    def context_window(self) -> int:
        """In tokens; a guess where the server does not say."""
        return self.window or _UNKNOWN_WINDOW

    @property
    def output_tokens(self) -> int:
        """How many tokens of the window a harness leaves for the answer."""
        return min(_OUTPUT_TOKENS, self.context_window // 4)


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


_OPENCODE_PACKAGES: Mapping[Api, str] = {
    "messages": "@ai-sdk/anthropic",
    "chat": "@ai-sdk/openai-compatible",
    "responses": "@ai-sdk/openai",
}


def opencode_configuration(served: Served, api: Api) -> dict[str, Any]:
    """OpenCode's ``opencode.json``; https://opencode.ai/config.json. All three SDKs want the version in the URL."""
    model = {
        "name": served.model,
        "reasoning": True,
        "tool_call": True,
        "limit": {"context": served.context_window, "output": served.output_tokens},
    }
    provider = {
        "npm": _OPENCODE_PACKAGES[api],
        "name": PROVIDER,
        "options": {"baseURL": f"{served.base_url}/v1", "apiKey": served.key},
        "models": {served.model: model},
    }
    name = f"{PROVIDER}/{served.model}"
    return {
        "$schema": "https://opencode.ai/config.json",
        "model": name,
        "small_model": name,
        "enabled_providers": [PROVIDER],
        "provider": {PROVIDER: provider},
    }


_PI_APIS: Mapping[Api, str] = {
    "messages": "anthropic-messages",
    "chat": "openai-completions",
    "responses": "openai-responses",
}
"""OpenClaw, which is built on pi, has the same names."""


def pi_models(served: Served, api: Api) -> dict[str, Any]:
    """pi's ``models.json``."""
    return {"providers": {PROVIDER: _pi_provider(served, api)}}


def openclaw_configuration(served: Served, api: Api) -> dict[str, Any]:
    """OpenClaw's ``openclaw.json``: no other provider, and no price."""
    provider = _pi_provider(served, api)
    provider["models"][0]["cost"] = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)
    return {
        "models": {"mode": "replace", "providers": {PROVIDER: provider}},
        "agents": {"defaults": {"model": {"primary": f"{PROVIDER}/{served.model}"}}},
    }


def _pi_provider(served: Served, api: Api) -> dict[str, Any]:
    model = {
        "id": served.model,
        "name": served.model,
        "reasoning": True,
        "input": ["text"],
        "contextWindow": served.context_window,
        "maxTokens": served.output_tokens,
    }
    return {"baseUrl": served.url(api), "apiKey": served.key, "api": _PI_APIS[api], "models": [model]}


_QWEN_NAMES: Mapping[QwenApi, tuple[str, str]] = {
    "messages": ("anthropic", "ANTHROPIC"),
    "chat": ("openai", "OPENAI"),
}
"""Its name of an API, and what the API's variables begin with."""


def qwen_environment(served: Served, api: QwenApi) -> dict[str, str]:
    """qwen-code's environment."""
    _, prefix = _QWEN_NAMES[api]
    told = {"BASE_URL": served.url(api), "API_KEY": served.key, "MODEL": served.model}
    return {**os.environ, **{f"{prefix}_{name}": value for name, value in told.items()}}


def qwen_arguments(served: Served, api: QwenApi) -> tuple[str, ...]:
    """What qwen-code takes from its command line alone."""
    return ("--auth-type", _QWEN_NAMES[api][0], "-m", served.model)
