"""Make ``docs/engines.md`` from the table that the engines themselves read."""

from __future__ import annotations

from collections.abc import Callable

from singletree.engines.abilities import ABILITIES, EngineAbilities
from singletree.remote.detection import KINDS, TEXT_SERVERS
from singletree.server.doors import open_door

PAGE = """\
# Engines

What each engine can do through the interface that singletree uses. The table is generated from
`src/singletree/engines/abilities.py`, which the engines read themselves.

{table}

*token ids*: "all" where each generated id is streamed; "recovered" where some ids are found by tokenizing their text.
*salts*: whether the prefix cache keeps prompts apart that have different salts (`cache_salt`), and so those of several
API keys; the embedded llama.cpp does so for models without pictures.
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

The tokenizer is that of `--model`, else of the model that the server reports. No server gives its files away (vLLM's
`/tokenizer_info` and llama-server's `/props` have the chat template and no vocabulary), so they come from this machine
or, without the weights, from the Hugging Face Hub ([where models come from](serving.md#where-models-come-from)).

Before `ready`, vLLM, SGLang and llama.cpp are asked at `/tokenize` for the tokens of a short text in many scripts. A
server that has another vocabulary than the tokenizer is refused with the names of both models; one that has the same
tokens and cuts the text in other places starts with a warning. Vocabularies that differ in their special tokens alone
pass, as those of two versions of one model. TensorRT-LLM is not asked, and a gateway may hide the endpoint: the server
then starts, and logs that the vocabulary was not checked.

singletree parses reasoning itself, so that vLLM and SGLang need no `--reasoning-parser`. With one they apply a
constraint only after they consider the reasoning complete, while the constraint that they are sent covers the
reasoning, too: under a strict tool or a grammar, such as that of Codex's `apply_patch`, they end the turn with an error
or let the model write something else. A vLLM that needs the parser for other clients is started with
`--structured-outputs-config '{{"enable_in_reasoning": true}}'` beside it.

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
    "salts": lambda row: _yes(row.salts),
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
        servers=", ".join(open_door(f"server {kind}").title for kind in KINDS),
        refused="\n".join(f"- {server.title}: {server.cure}." for server in TEXT_SERVERS.values()),
    )
