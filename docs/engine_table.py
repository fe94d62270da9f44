"""Make ``docs/engines.md`` from the table that the engines themselves read."""

from __future__ import annotations

from collections.abc import Callable

from singletree.engines.abilities import ABILITIES, EngineAbilities
from singletree.engines.detection import SERVERS, TEXT_SERVERS

PAGE = """\
# Engines

What each engine can do through the interface that singletree uses. The table is generated from
`src/singletree/engines/abilities.py`, which the engines read themselves.

{table}

*token ids*: "all" where each generated id is streamed; "recovered" where some ids are found by tokenizing their text.
*sampling of the model*: who applies the checkpoint's `generation_config.json` to fields that a request leaves out.

## Constraints

Kinds of constraint and the field of the engine's request that takes each, the preferred kind first.

{constraints}

## Options of the servers

{options}

## Running servers

`--engine-url URL` finds out what answers there: {servers}.
`--engine` names the kind if a gateway hides it. One token is generated at start-up, so that a server that cannot return
token ids is refused before the first request. vLLM is asked at `/inference/v1/generate` first, then at
`/v1/completions`; start-up says what the second one costs.

These take only text and are refused, because they render and tokenize prompts themselves:

{refused}

TensorRT-LLM's wire is written from its source; it has not been run against a server.
"""

Cell = Callable[[EngineAbilities], str]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


COLUMNS: dict[str, Cell] = {
    "engine": lambda row: row.title,
    "token ids": lambda row: "all" if row.streams_every_id else "recovered",
    "log-probabilities": lambda row: _yes(row.logprobs),
    "of the prompt": lambda row: _yes(row.prompt_logprobs),
    "constraints": lambda row: ", ".join(row.constraints) or "none",
    "cached tokens": lambda row: _yes(row.cached_tokens),
    "priorities": lambda row: _yes(row.priorities),
    "pictures": lambda row: _yes(row.pictures is not None),
    "abort": lambda row: row.abort,
    "KV events": lambda row: _yes(row.kv_events),
    "sampling of the model": lambda row: "the engine" if row.model_defaults else "singletree",
    "tested on": lambda row: row.tested,
}


def page() -> str:
    """Return the page of all engines."""
    lines = [
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(cell(row) for cell in COLUMNS.values()) + " |" for row in ABILITIES.values()),
    ]
    constraints = [
        f"- {row.title}: " + ", ".join(f"`{kind}` in `{field}`" for kind, field in row.constraints.items())
        for name, row in ABILITIES.items()
        if row.constraints and name != "scripted"
    ]
    options = [
        f"- {row.title}: " + "; ".join(f"`{flag}` for {use}" for flag, use in row.options.items())
        for row in ABILITIES.values()
        if row.options
    ]
    return PAGE.format(
        table="\n".join(lines),
        constraints="\n".join(constraints),
        options="\n".join(options),
        servers=", ".join(make().title for make in SERVERS.values()),
        refused="\n".join(f"- {server.title}: {server.cure}." for server in TEXT_SERVERS.values()),
    )
