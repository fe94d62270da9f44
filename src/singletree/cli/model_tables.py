"""Several models in one server: the tables ``[[models]]`` of the configuration file, or several ``--model``.

A table has the flags that are a model's, as keys. What stands outside the tables (flags, environment, top of the file)
holds for every model that does not set it in its own table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cyclopts import App, Argument
from cyclopts.config import Dict
from cyclopts.exceptions import CycloptsError

from singletree.cli.flags import MODEL_TABLES, read_file
from singletree.engines.checkpoint import DEFAULT_AGENT_MODEL, DEFAULT_MODEL
from singletree.errors import BadConfiguration
from singletree.server.settings.config import Config

MODEL_FIELDS: frozenset[str] = frozenset(
    {
        "models",
        "model_name",
        "model_alias",
        "load",
        "idle_unload",
        "engine",
        "engine_url",
        "router_mode",
        "kv_events",
        "kv_replay",
        "kv_cache_tokens",
        "migration_limit",
        "engine_arguments",
        "engine_api_key",
        "slots",
        "threads",
        "context_window",
        "max_output_tokens",
        "tool_call_parser",
        "reasoning_parser",
        "model_card",
        "codex_catalog",
        "codex_profile",
        "chat_template",
        "default_thinking",
        "default_chat_template_kwargs",
        "strip_anthropic_preamble",
        "stability_off",
        "turn_memory",
        "turn_memory_path",
        "restore_reasoning",
        "hold_seconds",
        "script_dir",
        "script_delay",
        "script_log",
    }
)
"""Fields of Config that a table may set; the others are the server's."""

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
