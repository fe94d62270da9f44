"""Anthropic's cache diagnostics: how a prompt compares with that of an earlier message.

``diagnostics.previous_message_id`` asks for them; ``diagnostics`` of the message has them.
https://platform.claude.com/docs/en/build-with-claude/cache-diagnostics
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from singletree.cache_diagnosis import CacheMiss, Change
from singletree.conversation import Request

_TYPES: Mapping[Change, str] = {
    "model": "model_changed",
    "system": "system_changed",
    "tools": "tools_changed",
    "messages": "messages_changed",
    "compacted": "messages_changed",
}
"""The API's type for a change; it has none for other settings, which it calls ``unavailable``."""


def message_diagnostics(request: Request) -> dict[str, Any]:
    """Return the field of the message; empty if the request does not ask for it."""
    if request.options.compared_answer is None:
        return {}
    found = request.prompt_report.cache_diagnosis
    if found is None or found == "hit":
        return {"diagnostics": None}
    if isinstance(found, CacheMiss):
        reason: dict[str, Any] = {"type": _TYPES.get(found.change, "unavailable"), "singletree": found.report}
        if found.change in _TYPES:
            reason["cache_missed_input_tokens"] = found.missed_tokens
    else:
        reason = {"type": "previous_message_not_found" if found == "not_found" else found}
    return {"diagnostics": {"cache_miss_reason": reason}}
