"""The names of OpenTelemetry's conventions for generative AI, and where their values are in the records of requests.

https://opentelemetry.io/docs/specs/semconv/gen-ai/, schema gen-ai/1.42.0. They are not stable yet, so they are here and
nowhere else. What they have no name for begins with ``singletree.``
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from singletree.server.answers.record_queue import RequestRecord

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
