"""How a prompt compares with that of an earlier answer: what the vendors' cache diagnostics report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__: list[str] = []

Change = Literal["model", "tools", "system", "messages", "compacted", "settings"]
"""What differs first. ``compacted``: earlier messages were removed. ``settings``: reasoning settings that the chat
template prints.
"""


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """The prompt does not continue that of the earlier answer.

    Attributes:
        change: what differs first.
        missed_tokens: tokens of the earlier prompt and answer behind the difference.
        reusable_tokens: tokens before it.
        report: more facts: the cause, its reason and cure, and the index of the first message that differs.
    """

    change: Change
    missed_tokens: int
    reusable_tokens: int
    report: dict[str, Any]


CacheDiagnosis = CacheMiss | Literal["hit", "not_found", "unavailable"]
"""``hit``: the prompt contains the earlier prompt and answer. ``not_found``: no answer of that id is known.
``unavailable``: it is known, and its prompt is no longer in memory.
"""
