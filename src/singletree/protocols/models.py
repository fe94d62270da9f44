"""Model metadata, in the form that each client expects.

OpenAI (https://platform.openai.com/docs/api-reference/models), with the window under the names that vLLM,
OpenRouter and Dynamo gave it; Anthropic (https://platform.claude.com/docs/en/api/models-list); and Codex's
catalog (``ModelInfo`` in openai/codex, codex-rs/protocol/src/openai_models.rs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from singletree.errors import InvalidRequest
from singletree.protocols.limits import check_values

Style = Literal["openai", "anthropic", "codex"]

_CODEX_INSTRUCTIONS = (
    "You are a coding agent that works in the user's repository through the tools it is given. Read before "
    "you change anything, change files with apply_patch, check what you changed by running it, and go on "
    "until the task is done. Then say briefly what you did."
)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The public metadata of a served model.

    Attributes:
        id: the name that requests use; may contain slashes.
        created: unix seconds.
        context_window: prompt and response together, in tokens.
        max_output_tokens: the longest response in tokens; None if only the window limits it.
        reasoning_efforts: the efforts that a request may name, weakest first; empty for a model without any.
        default_effort: the effort of a request that names none.
        instructions: Codex's base instructions for this model; empty for a short general text.
        tool_output_tokens: how much of a tool's output Codex keeps.
        calls_tools: whether the chat template prints tools; None where that is not known.
        is_loaded: whether it is loaded; the first request loads it otherwise.
        prompt_speed: how many tokens of a prompt are read in a second, as measured; None where that is not known.
        codex: fields of Codex's ``ModelInfo`` that replace those built here.
    """

    id: str
    created: int
    context_window: int
    max_output_tokens: int | None = None
    owned_by: str = "singletree"
    display_name: str = ""
    description: str | None = None
    input_modalities: tuple[str, ...] = ("text",)
    reasoning_efforts: tuple[str, ...] = ()
    default_effort: str | None = None
    instructions: str = ""
    tool_output_tokens: int = 10_000
    calls_tools: bool | None = None
    is_loaded: bool = True
    prompt_speed: float | None = None
    codex: Mapping[str, Any] = field(default_factory=dict)


class _Named(msgspec.Struct):
    model: str = ""


def requested_model(body: bytes) -> str:
    """Return the name of the model in a request body; empty if it has none, or is not valid."""
    try:
        check_values(body)
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidRequest):
        return ""


def style(headers: Mapping[str, str], query: Mapping[str, str]) -> Style:
    """Return the form that a client expects, by what only that client sends; header names in lower case."""
    if "client_version" in query:
        return "codex"
    return "anthropic" if "anthropic-version" in headers else "openai"


def encode_models(models: Sequence[ModelInfo], style: Style, query: Mapping[str, str] = {}) -> bytes:
    """Encode the list of models. ``query`` may page through Anthropic's: ``limit``, ``after_id``, ``before_id``."""
    if style == "anthropic":
        return msgspec.json.encode(_anthropic_page(models, query))
    body: dict[str, Any] = {"object": "list", "data": [_openai(model) for model in models]}
    if style == "codex":
        body["models"] = [_codex(model, priority) for priority, model in enumerate(models, 1)]
    return msgspec.json.encode(body)


def encode_model(model: ModelInfo, style: Style) -> bytes:
    """Encode one model. Codex reads only lists, so its form is OpenAI's here."""
    return msgspec.json.encode(_anthropic(model) if style == "anthropic" else _openai(model))


def _openai(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": model.owned_by,
        "context_window": model.context_window,
        "context_length": model.context_window,
        "max_model_len": model.context_window,
        "max_output_tokens": model.max_output_tokens or model.context_window,
        **({} if model.calls_tools is None else {"calls_tools": model.calls_tools}),
        **({} if model.is_loaded else {"is_loaded": False}),
        **({} if model.prompt_speed is None else {"prompt_tokens_per_second": round(model.prompt_speed, 1)}),
    }


def _anthropic(model: ModelInfo) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.display_name or model.id,
        "created_at": f"{datetime.fromtimestamp(model.created, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "lifecycle": "active",
        "capabilities": None,
        "max_input_tokens": model.context_window,
        "max_tokens": model.max_output_tokens or model.context_window,
    }


def _anthropic_page(models: Sequence[ModelInfo], query: Mapping[str, str]) -> dict[str, Any]:
    """Return all models, or at most ``limit``. An unknown id is ignored: its model may be gone by now."""
    ids = [model.id for model in models]
    after, before = query.get("after_id", ""), query.get("before_id", "")
    first = ids.index(after) + 1 if after in ids else 0
    last = ids.index(before) if before in ids else len(ids)
    window = models[first:last]
    sent = query.get("limit", "")
    limit = max(int(sent), 1) if sent.isascii() and sent.isdigit() and len(sent) < 10 else len(window)
    page = window[-limit:] if before in ids else window[:limit]
    return {
        "data": [_anthropic(model) for model in page],
        "has_more": len(page) < len(window),
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
    }


def _codex(model: ModelInfo, priority: int) -> dict[str, Any]:
    """Return all fields that Codex requires (it drops the whole list if one is missing), and those that matter most."""
    return {
        "slug": model.id,
        "display_name": model.display_name or model.id,
        "description": model.description,
        "supported_reasoning_levels": [{"effort": e, "description": e} for e in model.reasoning_efforts],
        "default_reasoning_level": model.default_effort,
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": priority,
        "base_instructions": model.instructions or _CODEX_INSTRUCTIONS,
        "support_verbosity": False,
        "apply_patch_tool_type": "freeform",
        "supports_parallel_tool_calls": True,
        "truncation_policy": {"mode": "tokens", "limit": model.tool_output_tokens},
        "context_window": model.context_window,
        "max_context_window": model.context_window,
        "effective_context_window_percent": 95,
        "input_modalities": list(model.input_modalities),
        "experimental_supported_tools": [],
        **model.codex,
    }
