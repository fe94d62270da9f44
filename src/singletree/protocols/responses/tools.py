"""Decode the tools of a Responses request, with the names that the model sees, and the choice among them.

A model sees only functions. Custom tools, namespaces and native tools become functions here. ``Tool.extra`` is the
tool as the client sent it, with ``namespace`` added for a tool in a namespace and ``grammar`` (``syntax``,
``definition``) for a custom tool with a grammar. Hosted tools, which run at OpenAI, are left out with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from singletree.conversation import Tool, ToolChoice
from singletree.protocols import wire
from singletree.protocols.limits import check_tools, quote_value, refused
from singletree.protocols.openai.custom_tools import custom_tool
from singletree.protocols.responses.native_tools import NATIVE, WireObject

_Name = Annotated[str, Meta(min_length=1)]

# The namespace of tools that the client knows by type only; no JSON string can be equal to it.
_NATIVES = "\ud800"


class _Function(Struct):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    def tool(self, at: str) -> Tool:
        return Tool(self.name, self.description, self.parameters, self.strict)


class _Format(Struct):
    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] = "lark"
    definition: str = ""


class _Custom(Struct):
    name: _Name
    description: str | None = None
    format: _Format | None = None
    defer_loading: bool | None = None

    def tool(self, at: str) -> Tool:
        form = self.format or _Format()
        grammar = (form.syntax, form.definition) if form.type == "grammar" else None
        grammar_at = f"{at}.format.definition"
        return custom_tool(self.name, self.description, grammar, at, grammar_at=grammar_at)


class _Namespace(Struct):
    name: _Name
    tools: list[dict[str, Any]]
    description: str | None = None


class _Native(Struct):
    description: str | None = None
    parameters: dict[str, Any] | None = None


_DECLARED: dict[str, type[_Function] | type[_Custom]] = {"function": _Function, "custom": _Custom}


class _Place(NamedTuple):
    """The place of a tool: its path, its namespace, the text before its description, whether a search found it."""

    at: str
    namespace: str = ""
    intro: str | None = None
    found: bool = False


class Toolbox:
    """Collect the tools of a request. Names are assigned in the order of the request, so they are stable.

    Attributes:
        warnings: one text for each tool or item that was left out.
        has_plain_names: whether ``name`` returns ``joined_name`` for any name: no tool is in a namespace or renamed.
    """

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.has_plain_names = True
        self._tools: dict[str, Tool] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._numbers: dict[tuple[str, bool], int] = {}
        self._by_sent: dict[str, list[str]] | None = None
        self._own: set[str] = set()
        self._searchable = False
        self._listed: tuple[Tool, ...] | None = ()

    def copy(self) -> Toolbox:
        copied = Toolbox()
        copied.warnings, copied.has_plain_names = self.warnings.copy(), self.has_plain_names
        copied._tools, copied._names, copied._own = self._tools.copy(), self._names.copy(), self._own.copy()
        copied._searchable, copied._listed = self._searchable, self.tools
        return copied

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Return the tools so far, in the client's order; the same object until one is added."""
        if self._listed is None:
            self._listed = tuple(self._tools.values())
        return self._listed

    def add(self, tools: Sequence[WireObject], at: str, *, found: bool = False) -> tuple[str, ...]:
        """Add the tools that the client sent, and return the names that the model sees. Raises InvalidRequest.

        ``at`` is their path; ``found`` says whether a tool search found them.
        """
        check_tools(tools, at)
        self._listed = None
        # A client's own name never yields to a name assigned here, wherever it is in the list.
        self._own.update(t["name"] for t in tools if _is_declared(t) and isinstance(t.get("name"), str))
        self._searchable |= any(_is_client_search(t) for t in tools)
        names = [n for i, tool in enumerate(tools) for n in self._add(tool, _Place(f"{at}.{i}", found=found))]
        check_tools(self._tools, at)
        return tuple(dict.fromkeys(names))

    def name(self, name: str, namespace: str = "") -> str:
        """Return the model's name for a tool that the client calls ``name``, declared or not."""
        own = self._names.get((namespace, name))
        if own is not None:
            return own
        candidates = self.model_names(name, namespace)
        return candidates[0] if len(candidates) == 1 else joined_name(name, namespace)

    def model_names(self, name: str, namespace: str = "") -> list[str]:
        """Return the model's names for the tools that ``name`` can refer to, in any namespace if none is given."""
        if (namespace, name) in self._names:
            return [self._names[namespace, name]]
        if namespace:
            return []
        if self._by_sent is None:
            self._by_sent = {}
            for (space, sent), own in self._names.items():
                if space != _NATIVES:
                    self._by_sent.setdefault(sent, []).append(own)
        return self._by_sent.get(name, [])

    def names_in_namespace(self, namespace: str) -> list[str]:
        return [name for (space, _), name in self._names.items() if space == namespace]

    def native(self, kind: str) -> str:
        """Return the model's name for the native tool of the type ``kind``, declared or not."""
        return self._names.get((_NATIVES, kind)) or NATIVE[kind].tool.name

    def has(self, name: str) -> bool:
        return name in self._tools

    def is_deferred(self, name: str) -> bool:
        return self._tools[name].deferred

    def _add(self, tool: WireObject, place: _Place) -> list[str]:
        kind = tool.get("type", "function")
        if _is_declared(tool):
            return [self._add_declared(wire.convert(tool, _DECLARED[kind], place.at), tool, place)]
        if kind == "namespace" and not place.namespace:
            return self._add_namespace(wire.convert(tool, _Namespace, place.at), place)
        if _is_native(tool):
            return [self._add_native(kind, tool, place.at)]
        self.warnings.append(f"{place.at}: type {quote_value(str(kind))} does not run here; ignored")
        return []

    def _add_declared(self, declared: _Function | _Custom, sent: WireObject, place: _Place) -> str:
        space, own = place.namespace, declared.tool(place.at)
        tool = replace(
            own,
            name=self._assign(space, own.name, joined_name(own.name, space)),
            description="\n\n".join(filter(None, (place.intro, own.description)))
            if place.intro
            else own.description,
            # If the model cannot search, it must see a deferred tool at once.
            deferred=place.found or (bool(declared.defer_loading) and self._searchable),
            extra={**sent, **(own.extra or {}), **({"namespace": space} if space else {})},
            schema_at=f"{place.at}.parameters",
            client_name=own.name,
            namespace=space,
        )
        known = self._tools.get(tool.name)
        if known is None or place.found:  # The last definition of a tool counts, in the place of the first.
            self._tools[tool.name] = tool if known is None else replace(tool, deferred=known.deferred)
        return tool.name

    def _add_namespace(self, sent: _Namespace, place: _Place) -> list[str]:
        """Add the tools of a namespace. Its description has no place of its own, so the first tool gets it."""
        names: list[str] = []
        for i, tool in enumerate(sent.tools):
            intro = sent.description if not names else None
            names += self._add(tool, _Place(f"{place.at}.tools.{i}", sent.name, intro, place.found))
        return names

    def _add_native(self, kind: str, sent: WireObject, at: str) -> str:
        own, tool = wire.convert(sent, _Native, at), NATIVE[kind].tool
        tool = replace(
            tool,
            name=self._assign(_NATIVES, kind, tool.name),
            description=own.description or tool.description,
            parameters=own.parameters or tool.parameters,
            extra=sent,
            schema_at=f"{at}.parameters",
        )
        return self._tools.setdefault(tool.name, tool).name

    def _assign(self, namespace: str, name: str, wanted: str) -> str:
        """Return a fixed name for each tool; a second tool that wants the same name gets a number."""
        key = (namespace, name)
        if key not in self._names:
            yields = bool(namespace)
            for n in count(self._numbers.get((wanted, yields), 1)):
                candidate = wanted if n == 1 else f"{wanted}_{n}"
                if candidate not in self._tools and not (yields and candidate in self._own):
                    break
            # Names only become more: what is taken stays taken.
            self._numbers[wanted, yields] = n
            self._names[key], self._by_sent = candidate, None
            is_plain = namespace == _NATIVES or (not namespace and self._names[key] == name)
            self.has_plain_names = self.has_plain_names and is_plain
        return self._names[key]


class DeclaredTools(NamedTuple):
    """The decoded field ``tools``: a toolbox to copy from, and the tools as the response object has them, as JSON."""

    toolbox: Toolbox
    repeated: msgspec.Raw


def declared_tools(sent: msgspec.Raw) -> DeclaredTools:
    """Return the decoded field ``tools``; raise InvalidRequest, with ``param`` below it, for a wrong tool."""
    return wire.decode_field(sent, list[dict[str, Any]] | None, _read_tools, "tools", has_schemas=True)


def _read_tools(sent: Sequence[WireObject] | None, at: str) -> DeclaredTools:
    toolbox = Toolbox()
    toolbox.add(sent or (), at)
    return DeclaredTools(toolbox, msgspec.Raw(msgspec.json.encode([_repeated(tool) for tool in sent or ()])))


def _repeated(tool: WireObject) -> WireObject:
    """Return a function tool with all of its fields; those that the client left out are null."""
    if tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "description": None, "parameters": None, "strict": None, **tool}


def decode_choice(value: str | WireObject | None, tools: Toolbox) -> ToolChoice:
    """Decode ``tool_choice``; raise InvalidRequest if it is unknown, or names no tool that can be called."""
    if value is None or isinstance(value, str):
        return _mode(value or "auto", tools)
    value = _flat(value)
    if value.get("type") == "allowed_tools":
        return _allowed(value, tools)
    return _narrowed(ToolChoice("required"), _chosen(value, "tool_choice", tools))


def _flat(choice: WireObject) -> WireObject:
    """Return a choice in the form of Chat Completions, with an object under its type, in that of this API."""
    kind = str(choice.get("type", "function"))
    inner = choice.get(kind)
    if not isinstance(inner, dict):
        return choice
    return {"type": kind, **{name: value for name, value in choice.items() if name != kind}, **inner}


def repeated_choice(value: str | WireObject | None) -> str | WireObject:
    """Return ``tool_choice`` as the response object repeats it: in the form of this API, however it was sent."""
    if not isinstance(value, dict):
        return "required" if value == "any" else value or "auto"
    flat = _flat(value)
    if flat.get("type") != "allowed_tools":
        return flat
    return {**flat, "tools": [_flat(tool) for tool in flat["tools"]]}


def _narrowed(choice: ToolChoice, names: Sequence[str]) -> ToolChoice:
    """Restrict ``choice`` to ``names``. If none of the named tools runs here, the choice is ignored."""
    if not names:
        return ToolChoice()
    if choice.mode == "required" and len(names) == 1:
        return ToolChoice("required", names[0])
    return replace(choice, allowed=tuple(names))


_MODES = {
    "auto": ToolChoice("auto"),
    "none": ToolChoice("none"),
    "required": ToolChoice("required"),
    "any": ToolChoice("required"),
}


def _mode(value: str, tools: Toolbox) -> ToolChoice:
    if value not in _MODES:
        cure = "send 'auto', 'none', 'required' or an object with a type"
        raise refused("tool_choice", f"is {quote_value(value)}; {cure}")
    if _MODES[value].mode == "required" and not tools.tools:
        why = "requires a call but the request has no tool that can be called; send one in tools"
        raise refused("tool_choice", why)
    return _MODES[value]


class _Allowed(Struct):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


def _allowed(value: WireObject, tools: Toolbox) -> ToolChoice:
    """Decode ``allowed_tools``. The tools themselves stay in the prompt, so that it does not change."""
    sent = wire.convert(value, _Allowed, "tool_choice")
    check_tools(sent.tools, "tool_choice.tools")
    choice = _mode(sent.mode, tools)
    if choice.mode == "required" and not sent.tools:
        raise refused("tool_choice.tools", "names no tool that can be called; send at least one")
    chosen = [name for i, t in enumerate(sent.tools) for name in _chosen(t, f"tool_choice.tools.{i}", tools)]
    names = tuple(dict.fromkeys(chosen))
    # If all allowed tools run elsewhere, there is none to call here.
    return _narrowed(choice, names) if names else ToolChoice("none")


class _Named(Struct):
    name: _Name
    namespace: str | None = None


def _chosen(value: WireObject, at: str, tools: Toolbox) -> list[str]:
    """Return the model's names for the tools of a choice; empty, with a warning, for a tool that does not run here."""
    value = _flat(value)
    kind = value.get("type")
    if _is_declared(value):
        sent = wire.convert(value, _Named, at)
        called = sent.name, sent.namespace or ""
        names = tools.model_names(*called) or [tools.name(*called)]
    elif kind == "namespace":
        names = tools.names_in_namespace(wire.convert(value, _Named, at).name)
    elif isinstance(kind, str) and kind in NATIVE:
        names = [tools.native(kind)]
    else:
        tools.warnings.append(f"{at}: type {quote_value(str(kind))} does not run here; ignored")
        return []
    unknown = [name for name in names if not tools.has(name)]
    if unknown or not names:
        named = quote_value(str(unknown[0] if unknown else value.get("name")))
        raise refused(at, f"names {named}, which is not in tools; send one of them")
    return names


def joined_name(name: str, namespace: str) -> str:
    """Return the model's name for a tool that no toolbox has."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _is_declared(tool: WireObject) -> bool:
    kind = tool.get("type", "function")
    return isinstance(kind, str) and kind in _DECLARED


def _is_native(tool: WireObject) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and kind in NATIVE and (kind != "tool_search" or _is_client_search(tool))


def _is_client_search(tool: WireObject) -> bool:
    return tool.get("type") == "tool_search" and tool.get("execution") == "client"
