"""Reads the configuration: flags, environment and file become one ``Config``, here and nowhere else.

A flag wins over the environment (``SINGLETREE_`` and the flag's name in capitals), the environment over the file
(TOML, with the flags' names as keys), and the file over the default.

Several models in one server are tables ``[[models]]`` of the file, or several ``--model``. A table has the flags that
are a model's, as keys. What stands outside the tables holds for every model that does not set it in its own table.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import App, Argument, ArgumentCollection, Group, Parameter
from cyclopts.config import Dict, Env
from cyclopts.exceptions import CycloptsError

from singletree.cli import flag_values
from singletree.engines.checkpoint import DEFAULT_AGENT_MODEL, DEFAULT_MODEL
from singletree.errors import BadConfiguration
from singletree.server.settings.config import Config, Flag, FlagForm, Separator

_FIELDS: Mapping[str, str] = {
    "Server": "config host port workers keep_alive_seconds hold_seconds* drain_seconds log_level",
    "Model": "models* model_name* model_alias* load* package_weights context_window* max_output_tokens* "
    "chat_template* tool_call_parser* reasoning_parser* default_thinking* default_chat_template_kwargs* model_card* "
    "codex_catalog* codex_profile*",
    "Engine": "engine* engine_arguments* slots* threads* idle_unload* prefix_cache_path prefix_cache_limit "
    "prefix_cache_key foresight mmproj",
    "Engines at --engine-url": "engine_url* engine_api_key* router_mode* kv_events* kv_replay* kv_cache_tokens* "
    "migration_limit*",
    "Access and limits": "api_key admin_key key_file share_between_keys allowed_origins allowed_hosts body_limit "
    "limit session_budget subagent_budget key_budget",
    "Answers": "reasoning_field raw_reasoning enable_anthropic_api websockets live_arguments "
    "enable_streaming_tool_dispatch enable_streaming_reasoning_dispatch",
    "Pictures and documents": "picture_limit allow_image_urls pdf",
    "Prompts and remembered turns": "turn_memory* turn_memory_path* turn_memory_url capsule_key strict_capsules "
    "restore_reasoning* session_memory request_memory stability_off* strip_anthropic_preamble*",
    "Stored responses": "store store_path store_url store_limit",
    "What the server shows of itself": "explain trace_path trace_limit otel inspect inspect_content inspect_size "
    "capture capture_content capture_logprobs capture_key capture_redact",
    "Scripted engine": "script_dir* script_delay* script_log*",
}
"""The fields of the configuration, by the title of their section; sections and fields in the order of the help.

Those with a star are a model's: each table of models may set its own. The others are the server's."""

SECTIONS: Mapping[str, Group] = {
    name.rstrip("*"): group
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
        settings.pop(MODEL_TABLES, None)  # Read by ``with_each_model``, with their own checks.
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


MODEL_FIELDS = frozenset(
    name[:-1] for names in _FIELDS.values() for name in names.split() if name.endswith("*")
)
"""Fields of Config that a table may set."""

_SHARED_FIELDS = frozenset({"engine", "threads", "slots", "max_output_tokens", "turn_memory", "hold_seconds"})
"""Fields of a model whose values suit any model."""

_ONE_MODEL_ONLY = ("model_name", "model_alias", "turn_memory_path", "codex_profile")
"""Fields that two models cannot share, so that they have no place outside the tables."""


def with_each_model(config: Config) -> Config:
    """Return ``config`` with the settings of each model in ``each_model``; unchanged if it has one model and no table.

    Raises:
        BadConfiguration: a table is wrong, or two models claim the same name or file.
    """
    places = [f"--model {model}" for model in config.models]
    if config.config is not None and (tables := _tables(config.config)):
        if config.models:
            raise BadConfiguration(
                f"{places[0]} is given besides the tables [[{MODEL_TABLES}]] of {config.config}; put the model into a "
                "table of its own, with `model` as its key"
            )
        places = [f"{config.config}: [[{MODEL_TABLES}]] {number}" for number in range(1, len(tables) + 1)]
        given = [_read_table(table, place) for table, place in zip(tables, places, strict=True)]
    elif len(config.models) > 1:
        given = [{"models": (model,)} for model in config.models]
    elif _names_nothing(config):
        given = [{"models": (DEFAULT_MODEL,)}, _AGENT_TABLE]
        places = [f"--model {model}" for model in (DEFAULT_MODEL, DEFAULT_AGENT_MODEL)]
    else:
        return config
    if len(given) > 1:
        _refuse_shared(config)
    each = tuple(_one(config, fields, place) for fields, place in zip(given, places, strict=True))
    _refuse_duplicates(each, places)
    return replace(config, each_model=each, built_in=given[-1] is _AGENT_TABLE)


_AGENT_TABLE = {"models": (DEFAULT_AGENT_MODEL,), "load": "lazy", "context_window": 32_768}


def _names_nothing(config: Config) -> bool:
    """Return whether no setting of a model is made, so that the server has the models that come with it."""
    fresh = Config()
    return all(
        getattr(config, name) == getattr(fresh, name) for name in MODEL_FIELDS - _SHARED_FIELDS
    ) and config.engine in ("auto", "llamacpp")


def _tables(path: Path) -> Sequence[Mapping[str, Any]]:
    found = read_file(path).get(MODEL_TABLES, [])
    if not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
        raise BadConfiguration(
            f"{path}: {MODEL_TABLES} is not a list of tables; write [[{MODEL_TABLES}]] above the settings of each model"
        )
    return found


def _read_table(table: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the fields of Config that ``table`` sets. Raises BadConfiguration for an unknown key or a wrong value."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        flag = "--" + key.replace("_", "-")
        argument = _arguments().get(flag)
        if argument is None:
            known = {name: each for name, each in _arguments().items() if each.keys[0] in MODEL_FIELDS}
            near = get_close_matches(flag, known, 1)
            keys = ", ".join(sorted({each.name[2:] for each in known.values()}))
            cure = f"; is {near[0][2:]} meant?" if near else f"; the keys are {keys}"
            raise BadConfiguration(f"{place}: there is no setting {key!r}{cure}")
        if argument.keys[0] not in MODEL_FIELDS:
            raise BadConfiguration(
                f"{place}: {key} holds for the whole server; put it at the top of the file, above the tables"
            )
        if argument.keys[0] in found:
            raise BadConfiguration(f"{place}: {key} is set twice, under two of its names; leave one out")
        found[argument.keys[0]] = _value(argument, flag, value, f"{place}: {key} is {value!r}")
    return found


def _value(argument: Argument, flag: str, value: Any, wrong: str) -> Any:
    """Return ``value`` of a TOML file in the type of the flag, by the same conversion as at the top of the file.

    Args:
        wrong: the beginning of the error message: where it stands, and what.

    Raises:
        BadConfiguration: it has another type.
    """
    app = _reader()
    found = app.assemble_argument_collection()
    try:
        Dict({flag[2:]: value}, use_commands_as_keys=False)(app, (), found)
        [given] = [each for each in found if each.parse and each.keys == argument.keys]
        return given.convert_and_validate()
    except (CycloptsError, BadConfiguration) as error:
        raise BadConfiguration(f"{wrong}: {str(error).strip().splitlines()[-1]}") from None


def _one(config: Config, fields: Mapping[str, Any], place: str) -> Config:
    """Return the settings of one model. Raises BadConfiguration for values that are invalid."""
    models = fields.get("models", ())
    if len(models) > 1:
        raise BadConfiguration(f"{place}: model has {len(models)} values; write one table for each model")
    try:
        return replace(config, **{**fields, "models": models, "model": models[0] if models else None})
    except BadConfiguration as error:
        raise BadConfiguration(f"{place}: {error.message}") from None


def _refuse_shared(config: Config) -> None:
    for name in _ONE_MODEL_ONLY:
        if getattr(config, name):
            flag = name.replace("_", "-")
            raise BadConfiguration(
                f"--{flag} holds for one model, and there are several; set {flag} in the table [[{MODEL_TABLES}]] "
                "of its model, in the file given with --config"
            )


def _refuse_duplicates(each: Sequence[Config], places: Sequence[str]) -> None:
    """Raise BadConfiguration if two models claim the same name or file."""
    owners: dict[tuple[str, str], str] = {}
    for config, place in zip(each, places, strict=True):
        claims = {("model-name", name.casefold()) for name in (*config.model_name, *config.model_alias)}
        if config.turn_memory_path is not None:
            claims.add(("turn-memory-path", str(config.turn_memory_path)))
        for claim in sorted(claims):
            if claim in owners:
                raise BadConfiguration(
                    f"{place}: {claim[0]} {claim[1]!r} is that of {owners[claim]}, too; give each model its own"
                )
            owners[claim] = place


def _reader() -> App:
    app = App()

    @app.default
    def read(config: Config = Config()) -> None:  # noqa: B008 (frozen)
        """Read nothing: only the flags of the signature are needed."""

    return app


def _arguments() -> dict[str, Argument]:
    collection = _reader().assemble_argument_collection()
    return {name: each for each in collection if each.parse and each.keys for name in each.names}
