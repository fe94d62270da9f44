"""``context_management`` of the Messages API: the requested edits, and the applied ones.

https://platform.claude.com/docs/en/build-with-claude/context-editing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from singletree.conversation import ClearThinking, ClearToolUses, ContextEdit, Request
from singletree.errors import InvalidRequest
from singletree.protocols import wire
from singletree.protocols.limits import quote_value
from singletree.protocols.messages.tools import RequestNotes

_TRIGGER_TOKENS = 100_000
_KEEP_USES = 3
_KEEP_THINKING = 1

_THINKING, _TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"
_REPORTED = {
    "thinking": (_THINKING, "cleared_thinking_turns"),
    "tool_uses": (_TOOL_USES, "cleared_tool_uses"),
}


class _Amount(msgspec.Struct, frozen=True):
    """A number of what ``type`` names."""

    type: str
    value: int = 0


class _Edit(msgspec.Struct, frozen=True):
    """An edit of any type, with the fields of all types."""

    type: str
    keep: _Amount | str | None = None
    trigger: _Amount | None = None
    clear_at_least: _Amount | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class _Management(msgspec.Struct, frozen=True):
    edits: list[_Edit] | None = None


def context_edits(sent: Any, notes: RequestNotes) -> tuple[ContextEdit, ...]:
    """Decode the edits in ``context_management``; an edit of an unknown type is left out with a warning.

    Raises:
        InvalidRequest: an edit is invalid; ``param`` is the field's path.
    """
    if sent is None:
        return ()
    edits = wire.convert(sent, _Management, "context_management").edits or []
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
        raise InvalidRequest(f"{at}: {quote_value(got)} is not known; send an object of type {of}", param=at)
    return max(sent.value, least)


def applied_edits(request: Request) -> dict[str, Any]:
    """Return ``context_management`` of the response as a field to add; empty if the request does not ask for it."""
    if not request.options.reports_context_edits:
        return {}
    reported = [
        {"type": type_, counted: edit.count, "cleared_input_tokens": edit.tokens}
        for edit in request.prompt_report.applied_edits
        for type_, counted in (_REPORTED[edit.kind],)
    ]
    return {"context_management": {"applied_edits": reported}}
