"""Reads the configuration: flags, environment and file become one ``Config``, here and nowhere else.

A flag wins over the environment (``SINGLETREE_`` and the flag's name in capitals), the environment over the file
(TOML, with the flags' names as keys), and the file over the default.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import App, ArgumentCollection, Group, Parameter
from cyclopts.config import Dict, Env

from singletree.cli import flag_values
from singletree.errors import BadConfiguration
from singletree.server.settings.config import Config, Flag, FlagForm, Separator

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
    "bytes": flag_values.byte_count,
    "secret": flag_values.read_secret,
    "secrets": flag_values.read_secrets,
    "urls": flag_values.split_urls,
    "entries": flag_values.split_entries,
}
_SPLITTERS: Mapping[Separator, Callable[..., Any]] = {
    "commas": flag_values.by_commas,
    "none": flag_values.unsplit,
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
