"""Chat Completions bodies, and the short way to write one."""

from __future__ import annotations

import json
from typing import Any

from singletree.conversation import Request
from singletree.protocols import chat

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
READ = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}}
LIST = {"type": "function", "function": {"name": "list"}}
PATCH = {"type": "custom", "custom": {"name": "apply_patch", "description": "Edits."}}


def decode(**fields: Any) -> Request:
    body = {"model": "m", "messages": [USER], **fields}
    return chat.decode(json.dumps({k: v for k, v in body.items() if v is not ...}).encode(), {})


def function(name: str, arguments: Any, id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


# The bodies of OpenClaw, OpenCode, pi and qwen-code, cut down to their shape.
CLIENTS: dict[str, dict[str, Any]] = {
    "openclaw": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "You are."},
            {"role": "user", "content": [{"type": "text", "text": "[Sat] read it"}]},
            assistant(
                content="I read.",
                reasoning_content="Hm.",
                tool_calls=[function("read", '{"p":1}', "call2670")],
            ),
            {"role": "tool", "content": "word", "tool_call_id": "call2670"},
            {"role": "user", "content": "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>> x"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [READ],
        "tool_choice": "auto",
        "max_completion_tokens": 8192,
    },
    "opencode": {
        "model": "m",
        "max_tokens": 32000,
        "messages": [
            {"role": "system", "content": "You are."},
            {"role": "user", "content": "read it"},
            assistant(content="", reasoning_content="Hm.", tool_calls=[function("read", '{"p":1}')]),
            {"role": "tool", "tool_call_id": "c1", "content": "word"},
        ],
        "tools": [READ, LIST],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "pi": {
        "model": "m",
        "messages": [
            {"role": "developer", "content": "You are."},
            {"role": "user", "content": [{"type": "text", "text": "read it"}]},
            assistant(content=None, reasoning="Hm.", tool_calls=[function("read", '{"p":1}')]),
            {"role": "tool", "content": "word", "tool_call_id": "c1"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "store": False,
        "max_completion_tokens": 4096,
        "tools": [READ | {"function": READ["function"] | {"strict": False}}],  # type: ignore[operator]
        "reasoning_effort": "medium",
    },
    "qwen-code": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "You are."}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            assistant(content="", reasoning_content="Hm.", tool_calls=[function("read", '{"p": 1}')]),
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "word"}]},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 32000,
        "tools": [READ],
        "metadata": {"sessionId": "s", "promptId": "p"},
    },
}


FULL: dict[str, Any] = CLIENTS["pi"] | {
    "tools": [READ, PATCH],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [READ]}},
    "stop": ["a"],
    "logit_bias": {"1": 2},
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    "reasoning": {"effort": "low", "max_tokens": 1},
    "thinking": {"type": "enabled", "budget_tokens": 1},
    "chat_template_kwargs": {"thinking": True},
    "messages": [
        *CLIENTS["qwen-code"]["messages"],
        assistant(reasoning_details=[{"text": "x"}], tool_calls=[{"custom": {"name": "p", "input": "y"}}]),
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
        },
        {"role": "user", "content": [{"type": "file", "file": {"file_data": "data:a/b;base64,AA=="}}]},
    ],
}
