"""What the Messages API reports of a prompt: the edits of its context, and how it compares with an earlier one.

``context_management`` has the requested edits, and the applied ones
(https://platform.claude.com/docs/en/build-with-claude/context-editing). The comparison is asked for by
``diagnostics.previous_message_id`` (https://platform.claude.com/docs/en/build-with-claude/cache-diagnostics).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from singletree import request_limits
from singletree.conversation import Request
from singletree.protocols import wire
from singletree.protocols.limits import malformed, quote_value
from singletree.protocols.messages.tools import RequestNotes
from singletree.request_options import CacheMiss, Change, ClearThinking, ClearToolUses, ContextEdit

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
