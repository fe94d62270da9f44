"""Tools of the Messages API, and what is gathered on the way through a request.

https://platform.claude.com/docs/en/api/messages and .../agents-and-tools/tool-use.
"""

from __future__ import annotations

from typing import Any

import msgspec

from singletree.conversation import Tool
from singletree.errors import InvalidRequest
from singletree.protocols.limits import shown


class Reading:
    """What is gathered on the way through a body: each warning once, and tools defined inside messages."""

    def __init__(self) -> None:
        self._warnings: dict[str, None] = {}
        self.tools: list[Tool] = []

    def warn(self, text: str) -> None:
        """Remember that something was accepted and ignored."""
        self._warnings[text] = None

    def take(self, other: Reading) -> None:
        """What ``other`` gathered was gathered here."""
        self._warnings |= other._warnings
        self.tools += other.tools

    @property
    def warnings(self) -> tuple[str, ...]:
        """Every warning once, in the order in which it was first given."""
        return tuple(self._warnings)


def required(value: str | None, at: str) -> str:
    """``value``, which the field ``at`` has to have. Raises InvalidRequest when it is absent or empty."""
    if not value:
        raise InvalidRequest(f"{at}: Field required", param=at)
    return value


class ToolDefinition(msgspec.Struct, frozen=True):
    """An entry of ``tools``. Without a ``type`` it is the client's own tool, as with ``custom``."""

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


def tool(definition: ToolDefinition, at: str, reading: Reading) -> Tool | None:
    """The client's own tool; None, with a warning, for one that only Anthropic's servers or models have."""
    if definition.type not in (None, "custom"):
        reading.warn(
            f"tools of type {shown(definition.type or '')} are ignored: they are built into Anthropic's "
            "models and servers; declare a tool with an input_schema instead"
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


def _described(definition: ToolDefinition) -> str | None:
    """The description; ``input_examples``, for which no chat template has a place, are a part of it."""
    examples = definition.input_examples
    if not isinstance(examples, list) or not examples:
        return definition.description
    lines = b"\n".join(msgspec.json.encode(example) for example in examples).decode()
    return "\n\n".join(filter(None, (definition.description, f"Examples of the input:\n{lines}")))


_TOOL_EXTRA = ("cache_control", "input_examples", "eager_input_streaming", "allowed_callers")
