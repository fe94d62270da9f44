"""The fields of a Responses request, and those that the response object repeats.

https://platform.openai.com/docs/api-reference/responses/create and
https://platform.openai.com/docs/api-reference/responses/object, with the sampling fields that open-model servers add.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from singletree.errors import InvalidRequest
from singletree.protocols import limits
from singletree.protocols.openai.engine_fields import EngineFields
from singletree.protocols.responses.native_tools import WireObject

_ABSENT = msgspec.Raw()


class ResponsesBody(EngineFields, kw_only=True):
    """The request body of Responses, as the client sends it. Unknown fields are accepted."""

    model: str
    input: str | list[msgspec.Raw] | None = None
    instructions: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
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
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: list[dict[str, Any]] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None
    user: str | None = None


class ReasoningOptions(Struct):
    """The field ``reasoning``."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(Struct):
    """The field ``text.format``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextField(Struct):
    """The field ``text``."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


def check_body(body: ResponsesBody) -> None:
    """Check what can be checked field by field.

    Raises:
        InvalidRequest: a field is invalid; ``param`` names it.
    """
    if not body.model:
        raise InvalidRequest("model is empty; send the name of a served model", param="model")
    if body.prompt is not None:
        raise InvalidRequest(
            "prompt refers to a template that is not stored here; send its text as instructions and input",
            param="prompt",
        )
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise InvalidRequest(
            f"max_tool_calls is {body.max_tool_calls}; send at least 1, or tool_choice 'none'",
            param="max_tool_calls",
        )
    limits.check_limits(body)
    limits.check_metadata(body.metadata)


def echo(body: ResponsesBody, *, instructions: msgspec.Raw, tools: msgspec.Raw, stores: bool) -> bytes:
    """Return the fields of the response object that repeat the request, as JSON: they are sent three times or more.

    Defaults are OpenAI's. ``service_tier`` is the tier that was used: ``auto`` becomes ``default``.

    Args:
        instructions, tools: these two fields as the response object has them.
        stores: whether the server stores a response on request.
    """
    tier = body.service_tier or "default"
    repeated = {
        "background": bool(body.background),
        "conversation": {"id": body.conversation}
        if isinstance(body.conversation, str)
        else body.conversation,
        "instructions": instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default" if tier == "auto" else tier,
        "store": stores and body.store is not False,
        "text": _text(body.text or {}),
        "tool_choice": "required" if body.tool_choice == "any" else body.tool_choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    if body.prompt_cache_options is not None:
        repeated["prompt_cache_options"] = {"mode": "implicit", "ttl": "30m", **body.prompt_cache_options}
    return msgspec.json.encode(repeated)


_FORMAT: WireObject = {"name": "response", "description": None, "schema": {}, "strict": False}


def _text(text: WireObject) -> WireObject:
    form = text.get("format") or {"type": "text"}
    if form.get("type") == "json_schema":
        form = {"type": "json_schema", **_FORMAT, **_set_fields(form)}
    return {"verbosity": "medium", **_set_fields(text), "format": {"type": "text", **form}}


def _set_fields(fields: WireObject) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
