"""All that can be set: flags, environment and file are read into one value, here and nowhere else.

A flag wins over the environment (``SINGLETREE_`` and the flag's name in capitals), that over the file
(TOML, keys as the flags are spelled), and that over the default.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, ArgumentCollection, Parameter, Token
from cyclopts.config import Dict, Env

from singletree.errors import BadConfiguration

ENVIRONMENT_PREFIX = "SINGLETREE_"

EngineName = Literal["llamacpp", "vllm", "scripted"]
ReasoningField = Literal["reasoning_content", "reasoning", "both"]
LogLevel = Literal["debug", "info", "warning", "error"]

REASONING_FIELDS: dict[ReasoningField, tuple[str, ...]] = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}


def _flag(*names: str, **more: Any) -> Parameter:
    return Parameter(name=names, **more)


_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _bytes(kind: Any, tokens: Sequence[Token]) -> int:
    """A number of bytes such as ``256MiB``. Raises BadConfiguration for what is none."""
    given = tokens[0].value.strip()
    number = given.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = _UNITS.get(given[len(number) :].strip().upper())
    if unit is None or not number.isdecimal():
        raise BadConfiguration(f"{given!r} is no number of bytes; give one such as 256MiB")
    return int(number) * unit


def _by_commas(kind: Any, value: str, *, delimiter: str | None = None) -> list[str]:
    """Several values of one variable that may hold white space."""
    return [each.strip() for each in value.split(",") if each.strip()]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Config:
    """How one server is run."""

    config: Path | None = None
    """TOML file with settings."""

    host: Annotated[str, _flag("--host", "--http-host")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""

    port: Annotated[int, _flag("--port", "--http-port")] = 8000
    """Port to listen on; 0 for any that is free."""

    api_key: Annotated[tuple[str, ...], _flag("--api-key", negative="")] = ()
    """Key that requests must bring, as x-api-key or Bearer. May be given several times."""

    model: Annotated[str | None, _flag("--model", "--model-path")] = None
    """A name that comes with singletree, a GGUF file, a folder, or a Hugging Face id."""

    model_name: Annotated[
        tuple[str, ...], _flag("--model-name", "--served-model-name", consume_multiple=True, negative="")
    ] = ()
    """Names that clients may use instead of the model's own; the first is the one that is shown."""

    engine: EngineName = "llamacpp"
    """What generates: llama.cpp in this process, a running vLLM server, or scripts."""

    engine_url: str | None = None
    """Where the vLLM server is, such as http://127.0.0.1:8001."""

    engine_api_key: str | None = None
    """The vLLM server's own key."""

    slots: Annotated[int | None, _flag("--slots", "--max-num-seqs")] = None
    """How many generations run at once."""

    threads: int | None = None
    """Threads of llama.cpp; the machine's cores by default."""

    context_window: Annotated[
        int | None, _flag("--context-window", "--context-length", "--max-model-len")
    ] = None
    """Longest prompt and answer together, in tokens."""

    max_output_tokens: int | None = None
    """Longest answer, in tokens."""

    tool_call_parser: Annotated[str | None, _flag("--tool-call-parser", "--dyn-tool-call-parser")] = None
    """Family of the model's tool calls; found from the chat template by default."""

    reasoning_parser: Annotated[str | None, _flag("--reasoning-parser", "--dyn-reasoning-parser")] = None
    """Family of the model's reasoning; found from the chat template by default."""

    reasoning_field: ReasoningField = "reasoning_content"
    """Field for reasoning on Chat Completions, for clients that show no other: reasoning_content, reasoning, both."""

    model_card: Path | None = None
    """TOML file with what clients are told of the model: description, efforts, base instructions and more."""

    codex_catalog: Path | None = None
    """File in the form of Codex's catalog, for --codex-profile; `singletree catalog --bundled` writes Codex's own."""

    codex_profile: Annotated[
        tuple[str, ...], _flag("--codex-profile", consume_multiple=True, negative="")
    ] = ()
    """Entry of --codex-catalog whose policy Codex follows with this model; NAME=ENTRY for one of its other names."""

    chat_template: Annotated[Path | None, _flag("--chat-template", "--custom-jinja-template")] = None
    """Jinja file to use instead of the model's own chat template."""

    default_thinking: str | None = None
    """Reasoning of requests that say nothing of it: on, off, or an effort such as low; else the template decides."""

    default_chat_template_kwargs: Annotated[
        str | None, _flag("--default-chat-template-kwargs", "--chat-template-kwargs")
    ] = None
    """JSON object of chat template variables for requests that do not set them."""

    enable_anthropic_api: bool = True
    """Offer Anthropic Messages."""

    strip_anthropic_preamble: bool = True
    """Keep Claude Code's changing billing header out of the prompt."""

    enable_streaming_tool_dispatch: bool = False
    """Tell each complete tool call in an event of its own as well; by request: x-singletree-tool-dispatch: 1 or 0."""

    enable_streaming_reasoning_dispatch: bool = False
    """Tell each span of reasoning in an event of its own when it ends; by request: x-singletree-reasoning-dispatch."""

    stability_off: Annotated[
        tuple[str, ...], _flag("--stability-off", consume_multiple=True, negative="")
    ] = ()
    """Names of prompt stability rules to switch off."""

    turn_memory: Annotated[int, _flag("--turn-memory", converter=_bytes)] = 256 * 2**20
    """Room for generated turns that come back by their own tokens, such as 256MiB; 0 keeps none."""

    session_memory: Annotated[int, _flag("--session-memory", converter=_bytes)] = 64 * 2**20
    """Room for the last prompts of sessions, by which a break of the prefix is told, such as 64MiB; 0 keeps none."""

    explain: bool = False
    """Tell in the headers of every answer how its prompt goes on; by request: x-singletree-explain: 1."""

    restore_reasoning: bool = True
    """Give a harness that carries no reasoning that of its current tool loop back."""

    turn_memory_path: Path | None = None
    """File that keeps the turn memory over a restart, sealed with --capsule-key; none by default."""

    capsule_key: Annotated[
        tuple[str, ...], _flag("--capsule-key", negative="", env_var_split=_by_commas)
    ] = ()
    """Key under which clients carry reasoning in signature and encrypted_content, so that it comes back by its tokens
    after a restart and on other replicas: 32 bytes in base64 or hex, or a passphrase. The first of several seals, all
    open; commas part them in the environment. A random one by default, which ends with the process."""

    strict_capsules: bool = False
    """Refuse a request whose signature or encrypted_content was changed; by default such a one is ignored."""

    websockets: bool = True
    """Offer Responses over a WebSocket."""

    store: bool = True
    """Keep responses for previous_response_id, unless a request says store: false."""

    store_path: Path | None = None
    """File (SQLite) in which they are kept; by default responses.sqlite in the cache."""

    store_limit: Annotated[int, _flag("--store-limit", converter=_bytes)] = 2**30
    """Room for them, such as 1GiB; the oldest go first."""

    body_limit: int = 64 * 2**20
    """Largest request body, in bytes, compressed or not."""

    keep_alive_seconds: float = 10.0
    """Longest silence in a stream before a sign of life."""

    hold_seconds: float = 120.0
    """How long a request waits for an engine that is full before it is refused; 0 refuses at once."""

    shutdown_seconds: float = 5.0
    """How long running generations may go on after the first signal to stop."""

    script_dir: Path | None = None
    """Folder of scripts for the scripted engine."""

    script_delay: float = 0.0
    """Seconds between the scripted engine's chunks."""

    script_log: Path | None = None
    """File to which the scripted engine writes each generation with its prompt, a line of JSON each."""

    log_level: LogLevel = "info"
    """Least serious log lines to print."""

    def __post_init__(self) -> None:
        """Raises BadConfiguration for a value that cannot be, by itself or beside the others."""
        limits: dict[str, tuple[float, float]] = {
            "port": (0, 65535),
            "slots": (1, 4096),
            "threads": (1, 1024),
            "context_window": (2, 2**31),
            "max_output_tokens": (1, 2**31),
            "turn_memory": (0, 2**40),
            "session_memory": (0, 2**40),
            "store_limit": (1, 2**50),
            "body_limit": (1, 2**31),
            "keep_alive_seconds": (0.01, 3600),
            "hold_seconds": (0, 3600),
            "shutdown_seconds": (0, 3600),
            "script_delay": (0, 3600),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise BadConfiguration(f"{_spelled(name)} is {value}; give a number from {low:g} to {high:g}")
        if self.engine == "vllm" and not self.engine_url:
            raise BadConfiguration("--engine vllm needs --engine-url, such as http://127.0.0.1:8001")
        if any(not key.strip() for key in self.api_key):
            raise BadConfiguration("--api-key is empty; give a key, or leave the flag out")
        if self.turn_memory_path and not self.capsule_key:
            raise BadConfiguration(
                "--turn-memory-path needs --capsule-key, with which the turns in it are sealed"
            )


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fills in what no flag gave, from the environment and then from the file: a ``config`` of cyclopts.

    Raises BadConfiguration for a file that cannot be read.
    """
    Env(ENVIRONMENT_PREFIX, command=False)(app, commands, arguments)
    chosen = next((a.tokens[0].value for a in arguments if a.name == "--config" and a.tokens), None)
    if chosen is not None:
        Dict(read_file(Path(chosen)), use_commands_as_keys=False, source=chosen)(app, commands, arguments)


def read_file(path: Path) -> dict[str, Any]:
    """The settings of a TOML file, keys as the flags are spelled, with ``-`` or ``_``.

    Raises BadConfiguration.
    """
    try:
        with path.open("rb") as file:
            settings = tomllib.load(file)
    except OSError as error:
        raise BadConfiguration(f"--config {path}: {os.strerror(error.errno or 0)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfiguration(f"--config {path}: not TOML: {error}") from None
    return {key.replace("_", "-"): value for key, value in settings.items()}
