"""Decode the tools of a Chat Completions request, and the choice among them.

https://platform.openai.com/docs/api-reference/chat/create (``tools``, ``tool_choice``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import msgspec

from singletree.conversation import Tool, ToolChoice
from singletree.errors import InvalidRequest
from singletree.protocols import wire
from singletree.protocols.limits import check_tools, malformed, quote_value, refused
from singletree.protocols.openai.custom_tools import custom_tool


class SentFunction(msgspec.Struct):
    """One entry of ``functions``, the older form of ``tools``."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Function(SentFunction):
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
    """One entry of ``tools``, as the client sends it."""

    type: str = "function"
    function: _Function | None = None
    custom: _Custom | None = None


class SentName(msgspec.Struct):
    """A reference to a function by its name."""

    name: str


class SentChoice(msgspec.Struct):
    """An object sent as ``tool_choice``, or one entry of ``allowed_tools``."""

    type: str
    function: SentName | None = None
    custom: SentName | None = None
    name: str | None = None
    allowed_tools: _Allowed | None = None

    @property
    def tool(self) -> str | None:
        named = self.function or self.custom
        return named.name if named else self.name


class _Allowed(msgspec.Struct):
    mode: str = "auto"
    tools: list[SentChoice] = []


class GivenTools(NamedTuple):
    """The tools of a field, a warning for each one that is ignored, and whether the client sent any."""

    tools: tuple[Tool, ...] = ()
    warnings: tuple[str, ...] = ()
    are_given: bool = False


_NO_TOOLS = GivenTools()


def decode_tools(given: msgspec.Raw) -> GivenTools:
    """Decode ``tools``; raise InvalidRequest with ``param`` below it for a tool that is not well formed."""
    kind = list[SentTool] | None
    return wire.decode_field(given, kind, read_tools, "tools", has_schemas=True) if given else _NO_TOOLS


def read_tools(given: list[SentTool] | None, at: str) -> GivenTools:
    """Decode the tools of the field ``at``; raise InvalidRequest for one that is not well formed."""
    check_tools(given, at)
    tools: list[Tool] = []
    warnings: list[str] = []
    for i, tool in enumerate(given or ()):
        if tool.type == "function":
            tools.append(_function_tool(tool.function, f"{at}.{i}.function"))
        elif tool.type == "custom":
            tools.append(_custom_tool(tool.custom, f"{at}.{i}.custom"))
        else:
            warnings.append(f"{at}.{i} is ignored: unknown type {quote_value(tool.type)}")
    return GivenTools(tuple(tools), tuple(warnings), bool(given))


def decode_functions(given: msgspec.Raw) -> GivenTools:
    """Decode ``functions``; raise InvalidRequest for one without a name."""
    kind = list[SentFunction] | None
    return (
        wire.decode_field(given, kind, _read_functions, "functions", has_schemas=True) if given else _NO_TOOLS
    )


def _read_functions(given: list[SentFunction] | None, field: str) -> GivenTools:
    check_tools(given, field)
    tools: list[Tool] = []
    for i, function in enumerate(given or ()):
        at = f"{field}.{i}"
        if not function.name:
            raise refused(f"{at}.name", "is empty; send the name of the function")
        tools.append(_tool(function, None, at))
    return GivenTools(tuple(tools), are_given=bool(given))


def decode_function_call(given: str | SentName | None, tools: tuple[Tool, ...]) -> ToolChoice:
    """Decode ``function_call``; raise InvalidRequest if it is not one of ``tools`` or has an unknown value."""
    at = "function_call"
    if isinstance(given, SentName):
        if given.name not in {tool.name for tool in tools}:
            shown = quote_value(given.name)
            raise refused(at, f"names {shown}, which is not in functions; send the name of one of them")
        return ToolChoice("required", given.name)
    if given not in (None, "auto", "none"):
        raise refused(at, f"is {quote_value(given)}; send 'auto', 'none' or an object with a name")
    return ToolChoice(given or "auto")  # type: ignore[arg-type]  # one of the two words


def _function_tool(function: _Function | None, at: str) -> Tool:
    if function is None or not function.name:
        raise malformed(at, "Field required, with a name")
    return _tool(function, function.strict, at)


def _tool(function: SentFunction, strict: bool | None, at: str) -> Tool:
    schema_at = f"{at}.parameters"
    return Tool(function.name, function.description, function.parameters, strict, schema_at=schema_at)


def _custom_tool(custom: _Custom | None, at: str) -> Tool:
    if custom is None or not custom.name:
        raise malformed(at, "Field required, with a name")
    sent = custom.format.grammar if custom.format else None
    grammar = (sent.syntax, sent.definition) if sent else None
    return custom_tool(
        custom.name, custom.description, grammar, at, grammar_at=f"{at}.format.grammar.definition"
    )


_MODES: dict[str, ToolChoice] = {
    "auto": ToolChoice("auto"),
    "none": ToolChoice("none"),
    "required": ToolChoice("required"),
    "any": ToolChoice("required"),
}


def decode_tool_choice(given: str | SentChoice | None, tools: tuple[Tool, ...]) -> ToolChoice:
    """Decode ``tool_choice``; raise InvalidRequest if it names an unknown tool or has an unknown value."""
    if given is None:
        return ToolChoice()
    if isinstance(given, SentChoice) and given.allowed_tools is not None:
        choice = _allowed(given.allowed_tools)
    else:
        choice = _named(given)
    if choice.mode == "required" and not tools:
        raise _refused_choice("requires a call but the request has no tools; send tools")
    offered = {tool.name for tool in tools}
    for name in (*(choice.allowed or ()), *([choice.name] if choice.name is not None else [])):
        if name not in offered:
            shown = quote_value(name)
            raise _refused_choice(f"names {shown}, which is not in tools; send the name of one of them")
    return choice


def _refused_choice(why: str) -> InvalidRequest:
    return refused("tool_choice", why)


def _named(given: str | SentChoice) -> ToolChoice:
    if isinstance(given, SentChoice) and given.tool:
        return ToolChoice("required", given.tool)
    mode = given.type if isinstance(given, SentChoice) else given
    if mode not in _MODES:
        shown = quote_value(mode)
        raise _refused_choice(f"is {shown}; send 'auto', 'none', 'required' or an object that names a tool")
    return _MODES[mode]


def _allowed(allowed: _Allowed) -> ToolChoice:
    """Narrow the choice to ``allowed``. The tools themselves stay in the prompt, so that it does not change."""
    choice = _named(allowed.mode)
    names = tuple(dict.fromkeys(tool.tool for tool in allowed.tools if tool.tool))
    if choice.mode == "required" and not names:
        raise _refused_choice("requires a call but allows no tool; list at least one in allowed_tools")
    if choice.mode == "required" and len(names) == 1:
        return ToolChoice("required", names[0])
    return replace(choice, allowed=names)
