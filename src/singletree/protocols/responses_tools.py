"""The tools of a Responses request, under the names the model knows them by, and the choice among them.

A model knows functions only. Custom tools, namespaces and native tools become functions here. ``Tool.extra``
is the tool as the client sent it, with ``namespace`` added for one that stands in a namespace and ``grammar``
(``syntax``, ``definition``) for a custom tool that has one. Hosted tools, which only OpenAI can run, are left
out with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct

from singletree.conversation import Tool, ToolChoice
from singletree.errors import InvalidRequest
from singletree.protocols import custom_tools, limits, wire
from singletree.protocols.responses_native import NATIVE, Wire

_Name = Annotated[str, Meta(min_length=1)]

# Stands for the namespace of tools that the client knows by type only; no JSON string can be equal to it.
_NATIVES = "\ud800"


class _Function(Struct):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    def tool(self) -> Tool:
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

    def tool(self) -> Tool:
        form = self.format or _Format()
        syntax = form.syntax if form.type == "grammar" else None
        told = custom_tools.description(self.description, syntax, form.definition)
        extra = {"grammar": {"syntax": syntax, "definition": form.definition}} if syntax else None
        grammar = (syntax, form.definition) if syntax else None
        return Tool(self.name, told, custom_tools.PARAMETERS, kind="custom", extra=extra, grammar=grammar)


class _Namespace(Struct):
    name: _Name
    tools: list[dict[str, Any]]
    description: str | None = None


class _Native(Struct):
    description: str | None = None
    parameters: dict[str, Any] | None = None


_DECLARED: dict[str, type[_Function] | type[_Custom]] = {"function": _Function, "custom": _Custom}


class _Place(NamedTuple):
    """Where a tool stands: its path, its namespace, what is said before it, whether a search found it."""

    at: str
    namespace: str = ""
    intro: str | None = None
    found: bool = False


class Toolbox:
    """Collects the tools of a request. Names are given in the order of the request, so they are stable.

    ``warnings`` tells what was left out.
    """

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._tools: dict[str, Tool] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._own: set[str] = set()
        self._searchable = False

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools so far, in the client's order."""
        return tuple(self._tools.values())

    def add(self, tools: Sequence[Wire], at: str, *, found: bool = False) -> tuple[str, ...]:
        """Adds what ``tools`` declares; ``at`` is its path, ``found`` marks tools that a search found.

        Returns the names the model knows them by. Raises InvalidRequest for a tool that is not well formed.
        """
        # A client's own name never gives way to one that we made, wherever it stands in the list.
        self._own.update(t["name"] for t in tools if _is_declared(t) and isinstance(t.get("name"), str))
        self._searchable |= any(_is_client_search(t) for t in tools)
        names = [n for i, tool in enumerate(tools) for n in self._add(tool, _Place(f"{at}.{i}", found=found))]
        return tuple(dict.fromkeys(names))

    def name(self, name: str, namespace: str = "") -> str:
        """The model's name for a tool that the client calls ``name``, declared or not."""
        meant = self.meant(name, namespace)
        return meant[0] if len(meant) == 1 else _joined(namespace, name)

    def meant(self, name: str, namespace: str = "") -> list[str]:
        """The model's names for the tools that ``name`` can mean; without ``namespace``, one in any of them."""
        if (namespace, name) in self._names:
            return [self._names[namespace, name]]
        if namespace:
            return []
        return [own for (space, said), own in self._names.items() if said == name and space != _NATIVES]

    def within(self, namespace: str) -> list[str]:
        """The model's names for the tools of ``namespace``."""
        return [name for (space, _), name in self._names.items() if space == namespace]

    def native(self, kind: str) -> str:
        """The model's name for the native tool of the type ``kind``, declared or not."""
        return self._names.get((_NATIVES, kind)) or NATIVE[kind].tool.name

    def has(self, name: str) -> bool:
        """Whether the model has a tool of this name."""
        return name in self._tools

    def _add(self, said: Wire, place: _Place) -> list[str]:
        kind = said.get("type", "function")
        if _is_declared(said):
            return [self._add_declared(wire.convert(said, _DECLARED[kind], place.at), said, place)]
        if kind == "namespace" and not place.namespace:
            return self._add_namespace(wire.convert(said, _Namespace, place.at), place)
        if _is_native(said):
            return [self._add_native(kind, said, place.at)]
        self.warnings.append(f"{place.at}: type {limits.shown(str(kind))} does not run here; ignored")
        return []

    def _add_declared(self, declared: _Function | _Custom, said: Wire, place: _Place) -> str:
        space, own = place.namespace, declared.tool()
        tool = replace(
            own,
            name=self._assign(space, own.name, _joined(space, own.name)),
            description=_paragraphs(place.intro, own.description) if place.intro else own.description,
            # Where the model cannot search, a deferred tool must be seen at once.
            deferred=place.found or (bool(declared.defer_loading) and self._searchable),
            extra={**said, **(own.extra or {}), **({"namespace": space} if space else {})},
            schema_at=f"{place.at}.parameters",
        )
        return self._tools.setdefault(tool.name, tool).name

    def _add_namespace(self, said: _Namespace, place: _Place) -> list[str]:
        """The description of the whole has no place of its own, so the first tool brings it along."""
        names: list[str] = []
        for i, tool in enumerate(said.tools):
            intro = said.description if not names else None
            names += self._add(tool, _Place(f"{place.at}.tools.{i}", said.name, intro, place.found))
        return names

    def _add_native(self, kind: str, said: Wire, at: str) -> str:
        own, tool = wire.convert(said, _Native, at), NATIVE[kind].tool
        tool = replace(
            tool,
            name=self._assign(_NATIVES, kind, tool.name),
            description=own.description or tool.description,
            parameters=own.parameters or tool.parameters,
            extra=said,
            schema_at=f"{at}.parameters",
        )
        return self._tools.setdefault(tool.name, tool).name

    def _assign(self, namespace: str, name: str, wanted: str) -> str:
        """One name for each tool, kept for good; a second tool that wants the same gets a number."""
        key = (namespace, name)
        if key not in self._names:
            taken = {*self._names.values(), *(self._own if namespace else ())}
            numbered = (wanted if n == 1 else f"{wanted}_{n}" for n in count(1))
            self._names[key] = next(candidate for candidate in numbered if candidate not in taken)
        return self._names[key]


def read_choice(value: str | Wire | None, tools: Toolbox) -> tuple[ToolChoice, tuple[str, ...] | None]:
    """``tool_choice`` as it was sent; with it the names of ``allowed_tools``, None where all are allowed.

    Raises InvalidRequest for a choice that the model cannot make.
    """
    if value is None or isinstance(value, str):
        return _mode(value or "auto", tools), None
    if value.get("type") == "allowed_tools":
        return _allowed(value, tools)
    return _narrowed(ToolChoice("required"), _chosen(value, "tool_choice", tools)), None


def _narrowed(choice: ToolChoice, names: Sequence[str]) -> ToolChoice:
    """``choice`` among ``names``. Where all that were named do not run here, it is as if nothing had been said."""
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
        raise InvalidRequest(
            f"tool_choice is {limits.shown(value)}; send 'auto', 'none', 'required' or an object with a type",
            param="tool_choice",
        )
    if _MODES[value].mode == "required" and not tools.tools:
        raise InvalidRequest(
            "tool_choice asks for a call but there is no tool that can be called; send one in tools",
            param="tool_choice",
        )
    return _MODES[value]


class _Allowed(Struct):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


def _allowed(value: Wire, tools: Toolbox) -> tuple[ToolChoice, tuple[str, ...]]:
    """Narrowed where one tool is left; the tools themselves stay, since the prompt may not change."""
    said = wire.convert(value, _Allowed, "tool_choice")
    choice = _mode(said.mode, tools)
    if choice.mode == "required" and not said.tools:
        at = "tool_choice.tools"
        raise InvalidRequest(f"{at} names no tool that can be called; send at least one", param=at)
    chosen = [name for i, t in enumerate(said.tools) for name in _chosen(t, f"tool_choice.tools.{i}", tools)]
    names = tuple(dict.fromkeys(chosen))
    # Tools that are all run elsewhere leave none to call here.
    return (_narrowed(choice, names) if names else ToolChoice("none")), names


class _Named(Struct):
    name: _Name
    namespace: str | None = None


def _chosen(value: Wire, at: str, tools: Toolbox) -> list[str]:
    """The model's names for the tools of a choice; none, with a warning, for one that does not run here."""
    kind = value.get("type")
    if _is_declared(value):
        said = wire.convert(value, _Named, at)
        names = tools.meant(said.name, said.namespace or "") or [tools.name(said.name, said.namespace or "")]
    elif kind == "namespace":
        names = tools.within(wire.convert(value, _Named, at).name)
    elif isinstance(kind, str) and kind in NATIVE:
        names = [tools.native(kind)]
    else:
        tools.warnings.append(f"{at}: type {limits.shown(str(kind))} does not run here; ignored")
        return []
    unknown = [name for name in names if not tools.has(name)]
    if unknown or not names:
        named = limits.shown(str(unknown[0] if unknown else value.get("name")))
        raise InvalidRequest(f"{at} names {named}, which is not in tools; send one of them", param=at)
    return names


def _joined(namespace: str, name: str) -> str:
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _paragraphs(first: str | None, second: str | None) -> str:
    return "\n\n".join(p for p in (first, second) if p)


def _is_declared(tool: Wire) -> bool:
    kind = tool.get("type", "function")
    return isinstance(kind, str) and kind in _DECLARED


def _is_native(tool: Wire) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and kind in NATIVE and (kind != "tool_search" or _is_client_search(tool))


def _is_client_search(tool: Wire) -> bool:
    return tool.get("type") == "tool_search" and tool.get("execution") == "client"
