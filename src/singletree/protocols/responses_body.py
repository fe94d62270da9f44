"""The fields of a Responses request, and their echo in the response object.

https://platform.openai.com/docs/api-reference/responses/create and
https://platform.openai.com/docs/api-reference/responses/object, with the sampling fields that open-model servers add.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from singletree.errors import InvalidRequest
from singletree.protocols import limits

Wire = Mapping[str, Any]


class Body(Struct):
    """The request. Unknown fields are accepted."""

    model: str
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    top_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: list[dict[str, Any]] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None
    user: str | None = None


class Reasoning(Struct):
    """Its field ``reasoning``."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class Format(Struct):
    """Of its field ``text``, the field ``format``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextField(Struct):
    """Its field ``text``."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


def check(said: Body) -> None:
    """Refuse what can be told to be wrong by one field alone.

    Raises:
        InvalidRequest: naming the field.
    """
    if not said.model:
        raise InvalidRequest("model is empty; send the name of a served model", param="model")
    if said.prompt is not None:
        raise InvalidRequest(
            "prompt refers to a template that is not stored here; send its text as instructions and input",
            param="prompt",
        )
    if said.max_tool_calls is not None and said.max_tool_calls < 1:
        raise InvalidRequest(
            f"max_tool_calls is {said.max_tool_calls}; send at least 1, or tool_choice 'none'",
            param="max_tool_calls",
        )
    limits.check(said)
    limits.check_metadata(said.metadata)


def echo(said: Body, *, stores: bool) -> bytes:
    """The fields of the response object that repeat the request, as JSON: they are sent three times or more.

    Defaults are OpenAI's. ``service_tier`` is the one that was used: ``auto`` is no tier.
    """
    tier = said.service_tier or "default"
    repeated = {
        "background": bool(said.background),
        "conversation": {"id": said.conversation}
        if isinstance(said.conversation, str)
        else said.conversation,
        "instructions": said.instructions,
        "max_output_tokens": said.max_output_tokens,
        "max_tool_calls": said.max_tool_calls,
        "metadata": said.metadata or {},
        "parallel_tool_calls": said.parallel_tool_calls is not False,
        "previous_response_id": said.previous_response_id,
        "prompt_cache_key": said.prompt_cache_key,
        "prompt_cache_retention": said.prompt_cache_retention,
        "reasoning": {"effort": None, "summary": None, **(said.reasoning or {})},
        "safety_identifier": said.safety_identifier,
        "service_tier": "default" if tier == "auto" else tier,
        "store": stores and said.store is not False,
        "text": _text(said.text or {}),
        "tool_choice": "required" if said.tool_choice == "any" else said.tool_choice or "auto",
        "tools": [_tool(tool) for tool in said.tools or ()],
        "top_logprobs": said.top_logprobs or 0,
        "truncation": said.truncation or "disabled",
        "user": said.user,
    }
    if said.prompt_cache_options is not None:
        repeated["prompt_cache_options"] = {"mode": "implicit", "ttl": "30m", **said.prompt_cache_options}
    return msgspec.json.encode(repeated)


_FORMAT: Wire = {"name": "response", "description": None, "schema": {}, "strict": False}


def _text(said: Wire) -> Wire:
    form = said.get("format") or {"type": "text"}
    if form.get("type") == "json_schema":
        form = {"type": "json_schema", **_FORMAT, **_said(form)}
    return {"verbosity": "medium", **_said(said), "format": {"type": "text", **form}}


def _tool(said: Wire) -> Wire:
    """A function with all of its fields; there is no default for what a client leaves open."""
    if said.get("type", "function") != "function":
        return said
    return {"type": "function", "description": None, "parameters": None, "strict": None, **said}


def _said(fields: Wire) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
