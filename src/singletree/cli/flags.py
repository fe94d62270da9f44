"""Reads the configuration: flags, environment and file become one ``Config``, here and nowhere else.

A flag wins over the environment (``SINGLETREE_`` and the flag's name in capitals), the environment over the file
(TOML, with the flags' names as keys), and the file over the default. Values that are more than one word or number are
read in the same way wherever they are given.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import App, ArgumentCollection, Group, Parameter, Token
from cyclopts.config import Dict, Env

from singletree.errors import BadConfiguration
from singletree.server.settings.config import Config, Flag, FlagForm, Separator

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ "
_FILE_MARK = "@"
_LARGEST_FILE = 64 * 1024


def byte_count(kind: Any, tokens: Sequence[Token]) -> int:
    """Return a number of bytes that is written like ``256MiB``. Raises ValueError for other texts.

    cyclopts puts the flag, variable or key before the message of a ValueError.
    """
    given = tokens[0].value.strip()
    number = given.rstrip(_LETTERS)
    unit = _UNITS.get(given[len(number) :].strip().upper())
    if unit is None or not number.isdecimal():
        raise ValueError(f"{given!r} is not a number of bytes; give one such as 256MiB.")
    return int(number) * unit


def split_urls(kind: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    """Split each value at commas: no URL of a server has one."""
    return tuple(dict.fromkeys(url for token in tokens for url in by_commas(kind, token.value)))


def split_entries(kind: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    """Split each value at commas, and keep empty entries: each is the one of an engine."""
    return tuple(each.strip() for token in tokens for each in token.value.split(","))


def by_commas(kind: Any, value: str, *, delimiter: str | None = None) -> list[str]:
    """Split the value of an environment variable at commas; values may contain white space."""
    return [each.strip() for each in value.split(",") if each.strip()]


def unsplit(kind: Any, value: str, *, delimiter: str | None = None) -> list[str]:
    """Return the value of an environment variable as one: a path may contain white space and commas."""
    return [value] if value else []


def read_secrets(kind: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    """Return secrets, those in the lines of a file for ``@FILE``: all users of a machine see the arguments of programs.

    Raises:
        BadConfiguration: the file cannot be read, or has no secret.
    """
    return tuple(secret for token in tokens for secret in _secrets(token))


def read_secret(kind: Any, tokens: Sequence[Token]) -> str:
    """Return a secret, that in a file for ``@FILE``.

    Raises:
        BadConfiguration: the file cannot be read, or has not one line.
    """
    token = tokens[-1]
    found = _secrets(token)
    if len(found) != 1:
        raise BadConfiguration(
            f"{_place(token)}: the file has {len(found)} lines; give one with a single line"
        )
    return found[0]


def _read_first_secret(kind: Any, tokens: Sequence[Token]) -> str:
    return _secrets(tokens[-1])[0]


Secret = Annotated[str, Parameter(converter=_read_first_secret, env_var="SINGLETREE_API_KEY")]
"""The type of a command's ``--api-key`` for a running server: the first of the server's own keys will do."""

Arguments = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""The type of arguments of another program, after ``--``."""


def _secrets(token: Token) -> list[str]:
    if not token.value.startswith(_FILE_MARK):
        return [token.value]
    path = Path(token.value.removeprefix(_FILE_MARK)).expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
        text = data.decode()
    except OSError as error:
        raise BadConfiguration(f"{_place(token)}: {os.strerror(error.errno or 0)}") from None
    except UnicodeDecodeError:
        raise BadConfiguration(f"{_place(token)}: the file is not text in UTF-8") from None
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if not found or len(data) > _LARGEST_FILE:
        raise BadConfiguration(
            f"{_place(token)}: the file has no secret, or more than {_LARGEST_FILE:,} bytes; put the secret on a line "
            "of its own"
        )
    return found


def _place(token: Token) -> str:
    """Return where a file is named, and the file: never the value of a secret."""
    return f"{token.keyword or token.source} {token.value}"


_FIELDS: Mapping[str, str] = {
    "Server": "config host port workers keep_alive_seconds hold_seconds drain_seconds log_level",
    "Model": "models model_name model_alias load package_weights context_window max_output_tokens chat_template "
    "tool_call_parser reasoning_parser default_thinking default_chat_template_kwargs model_card "
    "codex_catalog codex_profile",
    "Engine": "engine engine_arguments slots threads idle_unload prefix_cache_path prefix_cache_limit "
    "prefix_cache_key foresight mmproj",
    "Engines at --engine-url": "engine_url engine_api_key router_mode kv_events kv_replay kv_cache_tokens "
    "migration_limit",
    "Access and limits": "api_key admin_key key_file share_between_keys allowed_origins allowed_hosts body_limit limit "
    "session_budget subagent_budget key_budget",
    "Answers": "reasoning_field raw_reasoning enable_anthropic_api websockets live_arguments "
    "enable_streaming_tool_dispatch enable_streaming_reasoning_dispatch",
    "Pictures and documents": "picture_limit allow_image_urls pdf",
    "Prompts and remembered turns": "turn_memory turn_memory_path turn_memory_url capsule_key strict_capsules "
    "restore_reasoning session_memory request_memory stability_off strip_anthropic_preamble",
    "Stored responses": "store store_path store_url store_limit",
    "What the server shows of itself": "explain trace_path trace_limit otel inspect inspect_content inspect_size "
    "capture capture_content capture_logprobs capture_key capture_redact",
    "Scripted engine": "script_dir script_delay script_log",
}
"""The fields of the configuration, by the title of their section; sections and fields in the order of the help."""

SECTIONS: Mapping[str, Group] = {
    name: group
    for group, names in ((Group.create_ordered(title), names) for title, names in _FIELDS.items())
    for name in names.split()
}
"""The section of a field, by its name."""


ENVIRONMENT_PREFIX = "SINGLETREE_"
MODEL_TABLES = "models"
"""Key of the tables in the file that have the settings of one model each."""

_CONVERTERS: Mapping[FlagForm, Callable[..., Any]] = {
    "bytes": byte_count,
    "secret": read_secret,
    "secrets": read_secrets,
    "urls": split_urls,
    "entries": split_entries,
}
_SPLITTERS: Mapping[Separator, Callable[..., Any]] = {
    "commas": by_commas,
    "none": unsplit,
}


def _parameter(name: str, flag: Flag, *, is_list: bool) -> Parameter:
    """Return the field ``name`` for cyclopts. A list has no ``--no-`` form that empties it."""
    if not flag.is_set:
        return Parameter(parse=False)
    given: dict[str, Any] = {
        "name": flag.names or None,
        "converter": _CONVERTERS.get(flag.form),
        "env_var_split": _SPLITTERS.get(flag.separator),
        "consume_multiple": flag.takes_several or None,
        "allow_leading_hyphen": flag.takes_flags or None,
        "group": SECTIONS.get(name),
        "negative": "" if is_list else None,
    }
    return Parameter(**{key: value for key, value in given.items() if value is not None})


def _describe() -> None:
    """Tell cyclopts how each field of ``Config`` is set. It reads annotations, and that of the class."""
    for name, hint in get_type_hints(Config, include_extras=True).items():
        kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        flag = next((each for each in extras if isinstance(each, Flag)), Flag())
        Config.__annotations__[name] = Annotated[
            kind, _parameter(name, flag, is_list=get_origin(kind) is tuple)
        ]
    Parameter(name="*")(Config)


_describe()


def read_settings(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill in what no flag set, from the environment and then from the file: a ``config`` function of cyclopts.

    Raises:
        BadConfiguration: the file cannot be read.
    """
    Env(ENVIRONMENT_PREFIX, command=False)(app, commands, arguments)
    chosen = next((a.tokens[0].value for a in arguments if a.name == "--config" and a.tokens), None)
    if chosen is not None:
        settings = read_file(Path(chosen))
        settings.pop(MODEL_TABLES, None)  # Read by ``cli.model_tables``, with their own checks.
        Dict(settings, use_commands_as_keys=False, source=chosen)(app, commands, arguments)


def read_file(path: Path) -> dict[str, Any]:
    """Read the settings of a TOML file, whose keys are the names of flags, with ``-`` or ``_``.

    Raises:
        BadConfiguration: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            settings = tomllib.load(file)
    except OSError as error:
        raise BadConfiguration(f"--config {path}: {os.strerror(error.errno or 0)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfiguration(f"--config {path}: not TOML: {error}") from None
    return {key.replace("_", "-"): value for key, value in settings.items()}
