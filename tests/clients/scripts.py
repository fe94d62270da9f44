"""What the scripted model says: raw text of a turn, as models of two families write it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

ArgumentValues = Mapping[str, Any]


class Style(NamedTuple):
    """How a model writes its calls.

    Attributes:
        flags: what ``singletree serve`` is told; nothing when it finds the family by itself.
        call: one call as text.
        breaks: what breaks a call where it stands inside a string argument.
    """

    name: str
    flags: tuple[str, ...]
    call: Callable[[str, ArgumentValues], str]
    breaks: str


def think(thought: str) -> str:
    """A span of reasoning."""
    return f"<think>\n{thought}\n</think>\n\n"


def _hermes(name: str, arguments: ArgumentValues) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _qwen3_coder(name: str, arguments: ArgumentValues) -> str:
    values = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


HERMES = Style("hermes", (), _hermes, '", oops "')
QWEN3_CODER = Style(
    "qwen3_coder",
    ("--tool-call-parser", "qwen3_coder", "--reasoning-parser", "qwen3"),
    _qwen3_coder,
    "\n</parameter>\noops",
)
STYLES = (HERMES, QWEN3_CODER)
