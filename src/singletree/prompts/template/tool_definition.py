"""Tool definitions in the form that chat templates accept: the object of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from singletree.conversation import Tool

RequiredDescriptions = Literal["none", "tool", "parameter"]

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_FREE_FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Parameters of a custom tool, which takes one string; a model that knows only functions writes this argument."""


def tool_definition(tool: Tool, *, described: RequiredDescriptions = "none") -> dict[str, Any]:
    """Return the definition of ``tool``, with keys in the client's order and without fields that no model needs.

    Args:
        described: where the client gave no description, add an empty one: ``none`` nowhere, ``tool`` to the tool,
            ``parameter`` to the tool and each parameter.
    """
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None or described != "none":
        function["description"] = tool.description or ""
    absent = _FREE_FORM if tool.kind == "custom" else _NO_PARAMETERS
    parameters = absent if tool.parameters is None else tool.parameters
    function["parameters"] = _described(parameters) if described == "parameter" else parameters
    return {"type": "function", "function": function}


def _described(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return parameters
    described = {
        name: {**schema, "description": schema.get("description", "")}
        if isinstance(schema, Mapping)
        else schema
        for name, schema in properties.items()
    }
    return {**parameters, "properties": described}
