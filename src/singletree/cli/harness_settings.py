"""The settings by which each harness uses a singletree server: environment variables and configuration files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from singletree.server.turn import complete_calls

Api = Literal["messages", "chat", "responses"]
QwenApi = Literal["messages", "chat"]

PROVIDER = "singletree"
"""Our name as a provider in the harnesses' configurations."""

RUNS_ONLY_COMPLETE_CALLS: frozenset[tuple[str, Api]] = frozenset(
    {
        ("claude", "messages"),
        ("codex", "responses"),
        ("opencode", "messages"),
        ("opencode", "chat"),
        ("opencode", "responses"),
    }
)
"""Harnesses that get live arguments, with the API: with them they ran no call that was cut or broken
(``tests/clients``). Most report the arguments that they could not read to the model, and the model makes the call
again. Of the other harnesses, pi and qwen-code run the part of the call that they have, and OpenClaw ends the turn."""

_OUTPUT_TOKENS = 32_000
"""Limit of one answer in tokens, for harnesses that need a number; the server lowers it to what fits."""
_UNKNOWN_WINDOW = 131_072


@dataclass(frozen=True, slots=True)
class Served:
    """A server and one of its models, as the harnesses' settings need them.

    Attributes:
        base_url: URL of the server, without the version.
        key: API key.
        model: name of the model.
        window: its context window in tokens; None when the server does not report it.
        calls_tools: whether its chat template prints tools; None when the server does not report it.
        is_loaded: whether the server has loaded it.
        prompt_speed: how many tokens of a prompt it reads in a second, or an estimate; None when there is none.
    """

    base_url: str
    key: str
    model: str
    window: int | None
    calls_tools: bool | None = None
    is_loaded: bool = True
    prompt_speed: float | None = None

    def url(self, api: Api) -> str:
        """Return the base URL of ``api`` as the harnesses expect it: with the version for OpenAI's APIs."""
        return self.base_url if api == "messages" else f"{self.base_url}/v1"

    @property
    def context_window(self) -> int:
        """Return the context window in tokens; a guess where the server does not report it."""
        return self.window or _UNKNOWN_WINDOW

    @property
    def output_tokens(self) -> int:
        """Return how many tokens of the window a harness reserves for the answer."""
        return min(_OUTPUT_TOKENS, self.context_window // 4)


def live_arguments(harness: str, api: Api) -> dict[str, str]:
    """Return the headers that request live arguments; none for a harness that is not known to be safe with them."""
    return {complete_calls.HEADER: "1"} if (harness, api) in RUNS_ONLY_COMPLETE_CALLS else {}


def claude_environment(served: Served) -> dict[str, str]:
    """Return the environment of Claude Code: every model that it may request is the served one, and it connects
    to no other server.
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
    own = environment.get(_CLAUDE_HEADERS, "").splitlines()
    named = {line.partition(":")[0].strip().lower() for line in own}
    live = live_arguments("claude", "messages").items()
    environment[_CLAUDE_HEADERS] = "\n".join(
        [*own, *(f"{name}: {value}" for name, value in live if name not in named)]
    )
    if (window := served.window) is not None:
        # Claude Code assumes a window of a million tokens for a model that it does not know, and would never compact.
        # It compacts when less than the answer and 13,000 tokens are left, which is before the first step in a small
        # window: there an eighth of the window is left.
        spare = max(0, _CLAUDE_SPARE - window // 8)
        environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(window + spare)
        environment.setdefault("CLAUDE_CODE_MAX_OUTPUT_TOKENS", str(served.output_tokens))
    return environment


_CLAUDE_HEADERS = "ANTHROPIC_CUSTOM_HEADERS"
_CLAUDE_SPARE = 13_000
_NOT_FOR_CLAUDE = {"ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"}
"""Variables that would send Claude Code to another server, or make it ask which of two keys to use."""


def codex_configuration(served: Served) -> str:
    """Return Codex's ``config.toml``. The model catalog holds the window, the tools and the truncation policy."""
    model, url = json.dumps(served.model), json.dumps(f"{served.base_url}/v1")
    catalog = json.dumps(f"{served.base_url}/v1/models")
    headers = "".join(
        f"{json.dumps(name)} = {json.dumps(value)}\n"
        for name, value in live_arguments("codex", "responses").items()
    )
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

[model_providers.singletree.http_headers]
{headers}
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
    """Return OpenCode's ``opencode.json`` (https://opencode.ai/config.json). Its SDKs need the version in the URL."""
    model = {
        "name": served.model,
        "reasoning": True,
        "tool_call": True,
        "limit": {"context": served.context_window, "output": served.output_tokens},
    }
    provider = {
        "npm": _OPENCODE_PACKAGES[api],
        "name": PROVIDER,
        "options": {
            "baseURL": f"{served.base_url}/v1",
            "apiKey": served.key,
            "headers": live_arguments("opencode", api),
        },
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
"""pi's names of the APIs. OpenClaw, which is built on pi, has the same names."""


_PI_ABILITIES: Mapping[Api, tuple[str, ...]] = {
    "messages": ("sendSessionAffinityHeaders", "supportsMidConvoToolChanges"),
    "chat": ("sendSessionAffinityHeaders", "supportsMidConvoToolAdditions"),
    "responses": ("supportsAdditionalTools",),
}
"""What pi supposes of no server that it does not know, beside system messages in the middle: without them, a tool that
comes later changes the beginning of the prompt. On two of the APIs the first one names the session."""


def pi_models(served: Served, api: Api) -> dict[str, Any]:
    """Return pi's ``models.json``."""
    abilities = dict.fromkeys(("supportsMidConvoSystemMessages", *_PI_ABILITIES[api]), True)
    return {"providers": {PROVIDER: _pi_provider(served, api) | {"compat": abilities}}}


def pi_settings(served: Served) -> dict[str, Any]:
    """Return what pi's ``settings.json`` needs for the window of the model.

    By default pi compacts a session when fewer than 16,384 tokens of the window are left, and keeps the last 20,000: in
    a small window it would compact in every turn.
    """
    reserve, kept = (min(most, served.context_window // 4) for most in (16_384, 20_000))
    return {
        "compaction": {"reserveTokens": reserve, "keepRecentTokens": kept},
        "branchSummary": {"reserveTokens": reserve},
    }


def openclaw_configuration(served: Served, api: Api) -> dict[str, Any]:
    """Return OpenClaw's ``openclaw.json``, with no other provider and with prices of zero."""
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


_COPILOT_NAMES: Mapping[Api, tuple[str, str]] = {
    "messages": ("anthropic", "completions"),
    "chat": ("openai", "completions"),
    "responses": ("openai", "responses"),
}
"""Copilot's type of provider for each API, and its wire API."""


def copilot_environment(served: Served, api: Api) -> dict[str, str]:
    """Return the variables of GitHub Copilot CLI (``copilot help providers``)."""
    (kind, wire), answer = _COPILOT_NAMES[api], served.output_tokens
    limits = {"MAX_PROMPT_TOKENS": str(served.context_window - answer), "MAX_OUTPUT_TOKENS": str(answer)}
    settings = {"TYPE": kind, "WIRE_API": wire, "BASE_URL": served.url(api), "API_KEY": served.key}
    return {"COPILOT_MODEL": served.model} | _prefixed("COPILOT_PROVIDER", settings | limits)


_KIMI_TYPES: Mapping[Api, str] = {"messages": "anthropic", "chat": "openai", "responses": "openai_responses"}

_KIMI_RESERVE = 50_000


def kimi_environment(served: Served, api: Api) -> dict[str, str]:
    """Return the variables that make the served model Kimi Code's only one.

    It summarizes a session once less than ``_KIMI_RESERVE`` tokens of a larger window are left, or once 85 % of a
    smaller one are used: in a window that is little larger it would do nothing else.
    """
    window = served.context_window
    window = _KIMI_RESERVE if _KIMI_RESERVE < window < 1.85 * _KIMI_RESERVE else window
    limits = {"MAX_CONTEXT_SIZE": str(window), "MAX_OUTPUT_SIZE": str(served.output_tokens)}
    limits["PROVIDER_TYPE"] = _KIMI_TYPES[api]
    settings = {"BASE_URL": served.url(api), "API_KEY": served.key, "NAME": served.model}
    return _prefixed("KIMI_MODEL", settings | limits)


_QWEN_NAMES: Mapping[QwenApi, tuple[str, str]] = {
    "messages": ("anthropic", "ANTHROPIC"),
    "chat": ("openai", "OPENAI"),
}
"""qwen-code's name of each API, and the prefix of the API's environment variables."""


def qwen_settings(served: Served, api: QwenApi) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return qwen-code's variables, and the settings that it accepts only on its command line."""
    kind, prefix = _QWEN_NAMES[api]
    settings = {"BASE_URL": served.url(api), "API_KEY": served.key, "MODEL": served.model}
    return _prefixed(prefix, settings), ("--auth-type", kind, "-m", served.model)


def _prefixed(prefix: str, settings: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}_{name}": value for name, value in settings.items()}


_CLINE_PROVIDERS: Mapping[Api, str] = {
    "messages": "anthropic",
    "chat": "openai-compatible",
    "responses": "openai-native",
}


def cline_providers(served: Served, api: Api) -> dict[str, Any]:
    """Return Cline's ``providers.json``. Its SDKs need the version in the URL."""
    provider = _CLINE_PROVIDERS[api]
    chosen = {"provider": provider, "model": served.model}
    settings = {**chosen, "apiKey": served.key, "baseUrl": f"{served.base_url}/v1"}
    entry = {"settings": settings, "updatedAt": "1970-01-01T00:00:00Z", "tokenSource": "manual"}
    return {"version": 1, "lastUsedProvider": provider, "providers": {provider: entry}}
