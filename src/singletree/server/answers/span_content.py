"""Texts of a request as OpenTelemetry's conventions for generative AI write them; exported only where asked for."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from singletree.conversation import Reasoning, Text, Tool, ToolCall, ToolResult, Turn
from singletree.events import Event, Fold
from singletree.server.answers.span_names import (
    INPUT_MESSAGES,
    OUTPUT_MESSAGES,
    SYSTEM_INSTRUCTIONS,
    TOOL_DEFINITIONS,
)

_SYSTEM_ROLES = ("system", "developer")


def content_attributes(
    turns: Sequence[Turn], tools: Sequence[Tool], answer: Turn, ended: str
) -> dict[str, str]:
    """Return the attributes with the texts of a request and its answer, as JSON.

    Args:
        turns, tools: the conversation.
        answer: the generated turn.
        ended: why it ended, by the name of the conventions.
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


def generated_turn(events: Iterable[Event]) -> Turn:
    """Return the turn that ``events`` make."""
    fold = Fold()
    fold.feed_all(events)
    return fold.turn()


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
