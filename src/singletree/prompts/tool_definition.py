"""A tool as templates take it: the object that OpenAI's API made common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from singletree.conversation import Tool

Level = Literal["none", "tool", "parameter"]

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_FREE_FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""A custom tool takes one string; a model that knows only functions writes it as this one argument."""


def tool_definition(tool: Tool, *, described: Level = "none") -> dict[str, Any]:
    """The definition of ``tool``, keys in the client's order, without what says nothing to a model.

    A description that the client did not give is absent, unless ``described`` asks for an empty one: for the
    ``tool``, or for the tool and each ``parameter``.
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
