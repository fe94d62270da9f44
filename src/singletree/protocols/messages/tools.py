"""Tools of the Messages API, the input of their calls, and the notes that are collected while a request is decoded;
what the API reports of a prompt: the edits of its context, and how it compares with an earlier one.

https://platform.claude.com/docs/en/api/messages and .../agents-and-tools/tool-use. ``context_management`` has the
requested edits, and the applied ones (https://platform.claude.com/docs/en/build-with-claude/context-editing). The
comparison is asked for by ``diagnostics.previous_message_id``
(https://platform.claude.com/docs/en/build-with-claude/cache-diagnostics).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from msgspec.structs import replace as replace_fields

from singletree import request_limits
from singletree.conversation import Request, Tool
from singletree.protocols import wire
from singletree.protocols.client_tools import anthropic_tool
from singletree.protocols.limits import malformed, quote_value
from singletree.request_options import CacheMiss, Change, ClearThinking, ClearToolUses, ContextEdit


class RequestNotes:
    """Notes on a request while it is decoded: each warning once, and the tools that messages define."""

    def __init__(self) -> None:
        self._warnings: dict[str, None] = {}
        self.tools: list[Tool] = []

    def warn(self, text: str) -> None:
        self._warnings[text] = None

    def merge(self, other: RequestNotes) -> None:
        self._warnings |= other._warnings
        self.tools += other.tools

    @property
    def or_none(self) -> RequestNotes | None:
        return self if self._warnings or self.tools else None

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings)


def required(value: str | None, at: str) -> str:
    """Return ``value``; raise InvalidRequest for the field ``at`` if it is absent or empty."""
    if not value:
        raise malformed(at)
    return value


class ToolDefinition(msgspec.Struct, frozen=True):
    """An entry of ``tools``. Without a ``type``, or with ``custom``, it is the client's own tool."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: Any = None
    input_examples: Any = None
    eager_input_streaming: Any = None
    allowed_callers: Any = None
    display_width_px: int | None = None
    display_height_px: int | None = None
    enable_zoom: bool | None = None
    max_characters: int | None = None


def decode_tool(definition: ToolDefinition, at: str, notes: RequestNotes) -> Tool | None:
    """Decode the client's own tool, or a tool of Anthropic's that the client runs.

    For a tool that only Anthropic's servers run, return None and add a warning to ``notes``.
    """
    if known := anthropic_tool(definition.type or ""):
        return _client_tool(definition, known, at)
    if definition.type not in (None, "custom"):
        notes.warn(
            f"tools of type {quote_value(definition.type or '')} are ignored: they run only on "
            "Anthropic's servers; declare a tool with an input_schema instead"
        )
        return None
    return Tool(
        name=required(definition.name, f"{at}.name"),
        description=_described(definition),
        parameters=definition.input_schema,
        strict=definition.strict,
        deferred=bool(definition.defer_loading),
        extra={k: v for k in _TOOL_EXTRA if (v := getattr(definition, k)) is not None} or None,
        schema_at=f"{at}.input_schema",
    )


def _client_tool(definition: ToolDefinition, known: Tool, at: str) -> Tool:
    named = replace_fields(definition, type=None, name=definition.name or known.name)
    own = decode_tool(named, at, RequestNotes())
    assert own is not None
    parameters = own.parameters or _offered(definition, known.parameters or {})
    paragraphs = (known.description, *_limits(definition), own.description)
    return replace(own, description="\n\n".join(filter(None, paragraphs)), parameters=parameters)


def _offered(definition: ToolDefinition, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``schema`` without the actions and fields that the client has to enable and did not."""
    if definition.enable_zoom or "region" not in schema["properties"]:
        return schema
    properties = {name: value for name, value in schema["properties"].items() if name != "region"}
    action = properties["action"]
    properties["action"] = {**action, "enum": [each for each in action["enum"] if each != "zoom"]}
    return {**schema, "properties": properties}


def _limits(definition: ToolDefinition) -> Iterator[str]:
    if definition.display_width_px and definition.display_height_px:
        yield f"The screen is {definition.display_width_px} x {definition.display_height_px} pixels."
    if definition.max_characters:
        yield f"view shows at most {definition.max_characters} characters."


def _described(definition: ToolDefinition) -> str | None:
    # Chat templates have no place for examples, so the description gets them.
    examples = definition.input_examples
    if not isinstance(examples, list) or not examples:
        return definition.description
    lines = b"\n".join(msgspec.json.encode(example) for example in examples).decode()
    return "\n\n".join(filter(None, (definition.description, f"Examples of the input:\n{lines}")))


_TOOL_EXTRA = ("cache_control", "input_examples", "eager_input_streaming", "allowed_callers")

# One token of JSON: an opening, a closing, a string, a complete number or literal, a separator.
_TOKEN = re.compile(
    r"""[ \t\r\n]*(?:([\[{])|([\]}])|("(?>(?:[^"\\]++|\\.)*)")"""
    r"""|((?:-?(?:0|[1-9][0-9]*+)(?>(?:\.[0-9]+)?)(?>(?:[eE][+-]?[0-9]+)?)|true|false|null)"""
    r"""(?=[ \t\r\n,\]}]|\Z))|([:,]))""",
    re.DOTALL,
)
_CLOSES = {"{": "}", "[": "]"}


def tool_input(arguments: str, *, complete: bool) -> msgspec.Raw:
    """Return ``arguments`` unchanged if they are complete JSON, else their complete values; ``{}`` if empty.

    ``input`` has to be an object, while a stream may end in the middle of one. A cut call keeps every value that was
    complete; the official SDKs do the same with the deltas of a stream, so a body and a stream give the same result.
    """
    text = wire.encodable(arguments).strip(wire.JSON_SPACE) or "{}"
    return msgspec.Raw((text if complete and _is_json(text) else complete_values(text)).encode())


def complete_values(text: str) -> str:
    """Return the complete values in ``text``, the beginning of a JSON text: ``{"a": 1, "b": "x`` gives ``{"a": 1}``.

    Kept values are unchanged. Text that does not begin an object or an array gives ``{}``.
    """
    if not text.startswith(("{", "[")):
        return "{}"
    kept, at, key = 0, 0, False
    unclosed: list[str] = []
    while token := _TOKEN.match(text, at):
        opening, shut, string, atom, separator = token.groups()
        at = token.end()
        if opening:
            unclosed.append(_CLOSES[opening])
            key = opening == "{"
        elif shut:
            unclosed.pop()
        elif separator:
            key = separator == "," and unclosed[-1] == "}"
        if opening or shut or atom or (string and not key):
            kept = at
        if not unclosed:
            break
    whole = text[:kept] + "".join(reversed(unclosed))
    return whole if _is_json(whole) else "{}"


def _is_json(text: str) -> bool:
    try:  # msgspec refuses 1e400 and half a surrogate pair. ``int`` refuses NaN, which is no JSON.
        json.loads(text, parse_int=str, parse_constant=int)
    except (ValueError, RecursionError):
        return False
    return True


_TRIGGER_TOKENS = 100_000
_KEEP_USES = 3
_KEEP_THINKING = 1

_THINKING, _TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"
_REPORTED = {
    "thinking": (_THINKING, "cleared_thinking_turns"),
    "tool_uses": (_TOOL_USES, "cleared_tool_uses"),
}


class _Amount(msgspec.Struct, frozen=True):
    type: str
    value: int = 0


class _Edit(msgspec.Struct, frozen=True):
    type: str
    keep: _Amount | str | None = None
    trigger: _Amount | None = None
    clear_at_least: _Amount | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class _Management(msgspec.Struct, frozen=True):
    edits: list[_Edit] | None = None


def context_edits(sent: Any, notes: RequestNotes) -> tuple[ContextEdit, ...]:
    """Decode the edits in ``context_management``; an edit of an unknown type is left out with a warning."""
    if sent is None:
        return ()
    edits = wire.convert(sent, _Management, "context_management").edits or []
    request_limits.check("context_edits", len(edits), what="edits", param="context_management.edits")
    found: list[ContextEdit] = []
    for i, edit in enumerate(edits):
        at = f"context_management.edits.{i}"
        if edit.type == _THINKING:
            found.append(ClearThinking(_kept_thinking(edit, at)))
        elif edit.type == _TOOL_USES:
            found.append(_tool_uses(edit, at))
        else:
            notes.warn(f"context_management edits of type {quote_value(edit.type)} are ignored")
    return tuple(found)


def _kept_thinking(edit: _Edit, at: str) -> int | None:
    keep = edit.keep
    if keep == "all" or (isinstance(keep, _Amount) and keep.type == "all"):
        return None
    return _amount(keep, "thinking_turns", _KEEP_THINKING, f"{at}.keep", least=1)


def _tool_uses(edit: _Edit, at: str) -> ClearToolUses:
    trigger = edit.trigger or _Amount("input_tokens", _TRIGGER_TOKENS)
    by_uses = trigger.type == "tool_uses"
    value = _amount(trigger, "tool_uses" if by_uses else "input_tokens", 0, f"{at}.trigger")
    inputs = edit.clear_tool_inputs or False
    return ClearToolUses(
        trigger_tokens=None if by_uses else value,
        trigger_uses=value if by_uses else None,
        keep=_amount(edit.keep, "tool_uses", _KEEP_USES, f"{at}.keep"),
        at_least=_amount(edit.clear_at_least, "input_tokens", 0, f"{at}.clear_at_least"),
        exclude_tools=frozenset(edit.exclude_tools or ()),
        inputs=inputs if isinstance(inputs, bool) else frozenset(inputs),
    )


def _amount(sent: _Amount | str | None, of: str, default: int, at: str, *, least: int = 0) -> int:
    if sent is None:
        return default
    if isinstance(sent, str) or sent.type != of:
        got = sent if isinstance(sent, str) else sent.type
        raise malformed(at, f"{quote_value(got)} is not known; send an object of type {of}")
    return max(sent.value, least)


def applied_edits(request: Request) -> dict[str, Any]:
    """Return ``context_management`` of the response as a field to add; empty if the request does not ask for it."""
    if not request.options.reports_context_edits:
        return {}
    reported = []
    for edit in request.prompt_report.applied_edits:
        type_, counted = _REPORTED[edit.kind]
        reported.append({"type": type_, counted: edit.count, "cleared_input_tokens": edit.tokens})
    return {"context_management": {"applied_edits": reported}}


_ANTHROPIC_TYPES: Mapping[Change, str] = {
    "model": "model_changed",
    "system": "system_changed",
    "tools": "tools_changed",
    "messages": "messages_changed",
    "compacted": "messages_changed",
}
"""Anthropic's type for a change; it has none for other settings, which it calls ``unavailable``."""


def message_diagnostics(request: Request) -> dict[str, Any]:
    """Return the field of a message; empty if the request does not ask for it."""
    if request.options.compared_answer is None:
        return {}
    found = request.prompt_report.cache_diagnosis
    if found is None or found == "hit":
        return {"diagnostics": None}
    if isinstance(found, CacheMiss):
        type_ = _ANTHROPIC_TYPES.get(found.change, "unavailable")
        reason: dict[str, Any] = {"type": type_, "singletree": found.report}
        if found.change in _ANTHROPIC_TYPES:
            reason["cache_missed_input_tokens"] = found.missed_tokens
    else:
        reason = {"type": "previous_message_not_found" if found == "not_found" else found}
    return {"diagnostics": {"cache_miss_reason": reason}}
