"""The tools of a Chat Completions request, and which of them may or must be called.

https://platform.openai.com/docs/api-reference/chat/create (``tools``, ``tool_choice``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec

from singletree.conversation import Tool, ToolChoice
from singletree.errors import InvalidRequest
from singletree.protocols import custom_tools, limits


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Grammar(msgspec.Struct):
    syntax: Literal["lark", "regex"]
    definition: str


class _CustomFormat(msgspec.Struct):
    type: Literal["text", "grammar"] = "text"
    grammar: _Grammar | None = None


class _Custom(msgspec.Struct):
    name: str
    description: str | None = None
    format: _CustomFormat | None = None


class SentTool(msgspec.Struct):
    """One of ``tools`` as it goes over the wire."""

    type: str = "function"
    function: _Function | None = None
    custom: _Custom | None = None


class _Named(msgspec.Struct):
    name: str


class SentChoice(msgspec.Struct):
    """An object given as ``tool_choice``, or a tool that ``allowed_tools`` names."""

    type: str
    function: _Named | None = None
    custom: _Named | None = None
    name: str | None = None
    allowed_tools: _Allowed | None = None

    @property
    def tool(self) -> str | None:
        """The name of the tool that it names."""
        named = self.function or self.custom
        return named.name if named else self.name


class _Allowed(msgspec.Struct):
    mode: str = "auto"
    tools: list[SentChoice] = []


def tools_of(given: list[SentTool], warnings: list[str]) -> tuple[Tool, ...]:
    """The tools that ``given`` offers; ``warnings`` gets what is ignored.

    Raises:
        InvalidRequest: with ``param`` below ``tools``.
    """
    tools: list[Tool] = []
    for i, tool in enumerate(given):
        if tool.type == "function":
            tools.append(_function_tool(tool.function, f"tools.{i}.function"))
        elif tool.type == "custom":
            tools.append(_custom_tool(tool.custom, f"tools.{i}.custom"))
        else:
            warnings.append(f"tools.{i} is ignored: type {limits.shown(tool.type)} is not known here")
    return tuple(tools)


def _function_tool(function: _Function | None, at: str) -> Tool:
    if function is None or not function.name:
        raise InvalidRequest(f"{at}: Field required, with a name", param=at)
    return Tool(
        function.name,
        function.description,
        function.parameters,
        function.strict,
        schema_at=f"{at}.parameters",
    )


def _custom_tool(custom: _Custom | None, at: str) -> Tool:
    if custom is None or not custom.name:
        raise InvalidRequest(f"{at}: Field required, with a name", param=at)
    grammar = custom.format.grammar if custom.format else None
    syntax, definition = (grammar.syntax, grammar.definition) if grammar else (None, "")
    return Tool(
        custom.name,
        custom_tools.description(custom.description, syntax, definition),
        custom_tools.PARAMETERS,
        kind="custom",
        extra={"grammar": {"syntax": syntax, "definition": definition}} if grammar else None,
        grammar=(syntax, definition) if syntax else None,
        schema_at=f"{at}.parameters",
    )


_MODES: dict[str, ToolChoice] = {
    "auto": ToolChoice("auto"),
    "none": ToolChoice("none"),
    "required": ToolChoice("required"),
    "any": ToolChoice("required"),
}


def tool_choice_of(given: str | SentChoice | None, tools: tuple[Tool, ...]) -> ToolChoice:
    """What ``given`` asks for; raises InvalidRequest for what cannot be had."""
    if given is None:
        return ToolChoice()
    if isinstance(given, SentChoice) and given.allowed_tools is not None:
        choice = _allowed(given.allowed_tools)
    else:
        choice = _named(given)
    if choice.mode == "required" and not tools:
        raise _refused_choice("asks for a call but no tools are given; send tools")
    offered = {tool.name for tool in tools}
    for name in (*(choice.allowed or ()), *([choice.name] if choice.name is not None else [])):
        if name not in offered:
            shown = limits.shown(name)
            raise _refused_choice(f"names {shown}, which is not in tools; send the name of one of them")
    return choice


def _refused_choice(why: str) -> InvalidRequest:
    return InvalidRequest(f"tool_choice {why}", param="tool_choice")


def _named(given: str | SentChoice) -> ToolChoice:
    if isinstance(given, SentChoice) and given.tool:
        return ToolChoice("required", given.tool)
    mode = given.type if isinstance(given, SentChoice) else given
    if mode not in _MODES:
        shown = limits.shown(mode)
        raise _refused_choice(f"is {shown}; send 'auto', 'none', 'required' or an object that names a tool")
    return _MODES[mode]


def _allowed(allowed: _Allowed) -> ToolChoice:
    """Narrowed where one tool is left; the tools themselves stay, since the prompt may not change."""
    choice = _named(allowed.mode)
    names = tuple(dict.fromkeys(tool.tool for tool in allowed.tools if tool.tool))
    if choice.mode == "required" and not names:
        raise _refused_choice("asks for a call and allows no tool; list at least one in allowed_tools")
    if choice.mode == "required" and len(names) == 1:
        return ToolChoice("required", names[0])
    return replace(choice, allowed=names)
