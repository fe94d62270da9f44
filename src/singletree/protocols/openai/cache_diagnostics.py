"""OpenAI's prompt cache diagnostics: how a prompt compares with that of an earlier response.

``prompt_cache_options.comparison_response_id`` asks for them, ``prompt_cache_diagnostics`` of the response has them.
The field is part of the Responses API; on Chat Completions it is an extension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from singletree.cache_diagnosis import CacheMiss, Change
from singletree.conversation import PromptReport
from singletree.errors import InvalidRequest

FIELD = "prompt_cache_diagnostics"

_REASONS: Mapping[Change, str] = {
    "model": "model_changed",
    "tools": "tools_changed",
    "settings": "reasoning_effort_changed",
    "compacted": "context_compacted",
    "system": "input_changed",
    "messages": "input_changed",
}
_TYPES = {"hit": "cache_hit", "not_found": "comparison_response_not_found"}


def compared_answer(options: Mapping[str, Any] | None) -> str | None:
    """Return the id of the answer with which ``prompt_cache_options`` asks for a comparison; None for none.

    Raises:
        InvalidRequest: it is not a string.
    """
    id = (options or {}).get("comparison_response_id")
    if id is not None and not isinstance(id, str):
        param = "prompt_cache_options.comparison_response_id"
        raise InvalidRequest(f"{param} is {id!r}; send the id of a response", param=param)
    return id or None


def response_diagnostics(report: PromptReport) -> dict[str, Any]:
    """Return the field of the response; empty if the request does not ask for it."""
    found = report.cache_diagnosis
    if found is None:
        return {}
    if not isinstance(found, CacheMiss):
        return {FIELD: {"type": _TYPES.get(found, found)}}
    miss = {
        "type": "cache_miss",
        "reason": _REASONS[found.change],
        "cache_missed_tokens": found.missed_tokens,
        "comparison_reusable_tokens": found.reusable_tokens,
        "singletree": found.report,
    }
    return {FIELD: miss}
