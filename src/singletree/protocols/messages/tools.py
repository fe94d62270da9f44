"""Tools of the Messages API, and the notes that are collected while a request is decoded.

https://platform.claude.com/docs/en/api/messages and .../agents-and-tools/tool-use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from msgspec.structs import replace as replace_fields

from singletree.conversation import Tool
from singletree.errors import InvalidRequest
from singletree.protocols.client_tools import anthropic_tool
from singletree.protocols.limits import quote_value


class RequestNotes:
    """Notes on a request while it is decoded: each warning once, and the tools that messages define."""

    def __init__(self) -> None:
        self._warnings: dict[str, None] = {}
        self.tools: list[Tool] = []

    def warn(self, text: str) -> None:
        """Add a warning that something was accepted and ignored."""
        self._warnings[text] = None

    def merge(self, other: RequestNotes) -> None:
        """Add the notes of ``other``."""
        self._warnings |= other._warnings
        self.tools += other.tools

    @property
    def or_none(self) -> RequestNotes | None:
        """Return the notes; None where there are none."""
        return self if self._warnings or self.tools else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return every warning once, in the order in which they were first added."""
        return tuple(self._warnings)


def required(value: str | None, at: str) -> str:
    """Return ``value``; raise InvalidRequest for the field ``at`` if it is absent or empty."""
    if not value:
        raise InvalidRequest(f"{at}: Field required", param=at)
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

    Returns:
        None, with a warning in ``notes``, for a tool that only Anthropic's servers run.
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
    """Return the tool ``known`` with the changes that the client's definition makes."""
    own = decode_tool(
        replace_fields(definition, type=None, name=definition.name or known.name), at, RequestNotes()
    )
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
    """Return the description with ``input_examples`` added: chat templates have no place for examples."""
    examples = definition.input_examples
    if not isinstance(examples, list) or not examples:
        return definition.description
    lines = b"\n".join(msgspec.json.encode(example) for example in examples).decode()
    return "\n\n".join(filter(None, (definition.description, f"Examples of the input:\n{lines}")))


_TOOL_EXTRA = ("cache_control", "input_examples", "eager_input_streaming", "allowed_callers")
