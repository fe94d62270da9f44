"""Which harness sent a request, for people to read: nothing is decided by it."""

from __future__ import annotations

import re
from collections.abc import Mapping

HARNESSES: tuple[tuple[str, str, str], ...] = (
    ("user-agent", r"^claude-(?:cli|code)/", "Claude Code"),
    ("x-claude-code-session-id", r".", "Claude Code"),
    ("originator", r"^codex", "Codex"),
    ("user-agent", r"^codex", "Codex"),
    ("user-agent", r"opencode", "OpenCode"),
    ("user-agent", r"openclaw", "OpenClaw"),
    ("user-agent", r"qwen-?code", "qwen-code"),
    ("user-agent", r"^pi(?:-coding-agent)?[/ ]", "pi"),
    ("x-grok-session-id", r".", "Grok Build"),
    ("user-agent", r"^goose", "goose"),
    ("session_id", r".", "pi"),
    ("x-session-affinity", r".", "OpenCode"),
    ("user-agent", r"^(?:async)?anthropic/", "Anthropic SDK"),
    ("user-agent", r"^(?:async)?openai/", "OpenAI SDK"),
    ("user-agent", r"^curl/", "curl"),
)
"""(header in lower case, pattern of its value, name of the harness): the first that matches counts."""

_PATTERNS = [(header, re.compile(pattern, re.I), name) for header, pattern, name in HARNESSES]
_LONGEST = 200


def harness_of(headers: Mapping[str, str]) -> str | None:
    """Return the name of the harness; None where it is not known. Names of ``headers`` are in lower case."""
    for header, pattern, name in _PATTERNS:
        if pattern.search(headers.get(header, "")):
            return name
    return None


def client_of(headers: Mapping[str, str]) -> str | None:
    """Return what the client calls itself; None where it does not."""
    return headers.get("user-agent", "")[:_LONGEST] or None
