"""Texts of a request as OpenTelemetry's conventions for generative AI write them; exported only where asked for."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from singletree.conversation import Reasoning, Text, Tool, ToolCall, ToolResult, Turn
from singletree.records.record_queue import RequestRecord

SCHEMA_URL = "https://opentelemetry.io/schemas/gen-ai/1.42.0"
CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The variable of the conventions by which texts are exported."""
CONTENT_IN_SPANS = frozenset({"true", "span_only", "span_and_event"})
"""Its values, in lower case, with which texts are attributes of spans."""

CHAT, INVOKE_AGENT, EXECUTE_TOOL = "chat", "invoke_agent", "execute_tool"
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
PROVIDER_NAME = "singletree"

INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
SUMMED = (INPUT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS, REASONING_TOKENS)
"""Attributes of ``chat`` spans whose sums ``invoke_agent`` spans have."""

FINISH_REASONS = "gen_ai.response.finish_reasons"
ERROR_TYPE = "error.type"
REQUEST_MODEL = "gen_ai.request.model"
TOOL_NAME = "gen_ai.tool.name"

SYSTEM_INSTRUCTIONS = "gen_ai.system_instructions"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOOL_DEFINITIONS = "gen_ai.tool.definitions"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"

_AGENT = {
    "gen_ai.conversation.id": ("agent_context", "session_id"),
    "gen_ai.agent.id": ("agent_context", "trajectory_id"),
    "gen_ai.agent.name": ("agent_context", "session_type_id"),
}
_ATTRIBUTES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    CHAT: {
        **_AGENT,
        REQUEST_MODEL: ("request", "singletree", "requested_model"),
        "gen_ai.request.stream": ("request", "singletree", "stream"),
        "gen_ai.request.max_tokens": ("request", "singletree", "sampling", "max_tokens"),
        "gen_ai.request.temperature": ("request", "singletree", "sampling", "temperature"),
        "gen_ai.request.top_p": ("request", "singletree", "sampling", "top_p"),
        "gen_ai.request.top_k": ("request", "singletree", "sampling", "top_k"),
        "gen_ai.request.presence_penalty": ("request", "singletree", "sampling", "presence_penalty"),
        "gen_ai.request.frequency_penalty": ("request", "singletree", "sampling", "frequency_penalty"),
        "gen_ai.request.seed": ("request", "singletree", "sampling", "seed"),
        "gen_ai.response.id": ("request", "singletree", "answer_id"),
        "gen_ai.response.model": ("request", "model"),
        INPUT_TOKENS: ("request", "input_tokens"),
        OUTPUT_TOKENS: ("request", "output_tokens"),
        CACHED_TOKENS: ("request", "cached_tokens"),
        REASONING_TOKENS: ("request", "singletree", "reasoning_tokens"),
        ERROR_TYPE: ("request", "singletree", "error"),
        "singletree.request.id": ("request", "request_id"),
        "singletree.prefix.course": ("request", "singletree", "course"),
        "singletree.prefix.matched_tokens": ("request", "singletree", "matched_tokens"),
        "singletree.prefix.lost_tokens": ("request", "singletree", "lost_tokens"),
        "singletree.prefix.break": ("request", "singletree", "break"),
        "singletree.replayed_turns": ("request", "singletree", "replayed_turns"),
        "singletree.worker": ("request", "singletree", "worker"),
        "singletree.failovers": ("request", "singletree", "failovers"),
    },
    EXECUTE_TOOL: {
        **_AGENT,
        TOOL_NAME: ("tool", "tool_class"),
        "gen_ai.tool.call.id": ("tool", "tool_call_id"),
    },
    INVOKE_AGENT: {**_AGENT, REQUEST_MODEL: ("request", "singletree", "requested_model")},
}
"""For each operation the attributes of its span, and where in a record their values are."""

_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
_CHOICES = "gen_ai.request.choice.count"


def span_attributes(operation: str, record: RequestRecord) -> dict[str, Any]:
    """Return the attributes of the span of ``operation`` for ``record``. What the record does not have is left out."""
    found: dict[str, Any] = {OPERATION: operation, PROVIDER: PROVIDER_NAME}
    for name, path in _ATTRIBUTES[operation].items():
        value: Any = record
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    if operation == EXECUTE_TOOL:
        found["gen_ai.tool.type"] = "function"
        if record["tool"]["status"] == "failed":
            found[ERROR_TYPE] = "tool_error"
    if operation == CHAT:
        request = record["request"]
        found[FINISH_REASONS] = (finish_reason(record),)
        if (first := request.get("ttft_ms")) is not None:
            found[_FIRST_CHUNK] = first / 1000
        if (choices := request["singletree"]["choices"]) > 1:
            found[_CHOICES] = choices
    return found


def finish_reason(record: RequestRecord) -> str:
    """Return why a turn ended, by the names of the conventions where they have one."""
    ended = record["request"]["finish_reason_metadata"]
    if ended["tool_calls"] and ended["finish_reason"] in ("stop", "stop_sequence"):
        return "tool_call"
    names = {"stop_sequence": "stop", "context_overflow": "length", "refusal": "content_filter"}
    reason: str = ended["finish_reason"]
    return names.get(reason, reason)


_SYSTEM_ROLES = ("system", "developer")


def content_attributes(
    turns: Sequence[Turn], tools: Sequence[Tool], answer: Turn, ended: str
) -> dict[str, str]:
    """Return the attributes with the texts of a conversation and its answer, as JSON.

    Args:
        ended: why the answer ended, by the name of the conventions.
    """
    first = next((i for i, turn in enumerate(turns) if turn.role not in _SYSTEM_ROLES), len(turns))
    values = {
        SYSTEM_INSTRUCTIONS: [part for turn in turns[:first] for part in _parts(turn)],
        INPUT_MESSAGES: [{"role": turn.role, "parts": _parts(turn)} for turn in turns[first:]],
        OUTPUT_MESSAGES: [{"role": "assistant", "parts": _parts(answer), "finish_reason": ended}],
        TOOL_DEFINITIONS: [_definition(tool) for tool in tools],
    }
    return {name: content_json(value) for name, value in values.items() if value}


def invocation_attributes(turns: Sequence[Turn], answer: Turn, ended: str) -> dict[str, str]:
    """Return the attributes with the question of an invocation, and its last answer so far. Arguments as above."""
    asked = next((turn for turn in reversed(turns) if turn.role == "user"), None)
    values = {
        INPUT_MESSAGES: [] if asked is None else [{"role": "user", "parts": _parts(asked)}],
        OUTPUT_MESSAGES: [{"role": "assistant", "parts": _parts(answer), "finish_reason": ended}],
    }
    return {name: content_json(value) for name, value in values.items() if value}


def result_text(result: ToolResult) -> str:
    """Return the result of a tool: its text, or its parts as JSON where it has others."""
    if all(isinstance(part, Text) for part in result.parts):
        return whole_characters("".join(part.text for part in result.parts if isinstance(part, Text)))
    return content_json([_part(part) for part in result.parts])


def content_json(value: Any) -> str:
    """Return ``value`` as JSON text that UTF-8 has."""
    return whole_characters(json.dumps(value, ensure_ascii=False, default=_plain))


def whole_characters(text: str) -> str:
    """Return ``text`` with question marks in the place of half surrogate pairs, which UTF-8 does not have."""
    return text.encode("utf-8", "replace").decode()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return msgspec.to_builtins(value)


def _parts(turn: Turn) -> list[dict[str, Any]]:
    return [_part(part) for part in turn.parts]


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "content": part.text}
    if isinstance(part, Reasoning):
        return {"type": "reasoning", "content": part.text}
    if isinstance(part, ToolCall):
        return {
            "type": "tool_call",
            "id": part.id,
            "name": part.name,
            "arguments": arguments_value(part.arguments),
        }
    if isinstance(part, ToolResult):
        return {"type": "tool_call_response", "id": part.call_id, "response": result_text(part)}
    # Pictures, documents and references: their data is not copied.
    return {"type": type(part).__name__.lower(), "mime_type": getattr(part, "media_type", "")}


def arguments_value(arguments: str) -> Any:
    """Return the arguments of a call as a JSON value; as they are where they are not JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _definition(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.parameters or {},
    }
