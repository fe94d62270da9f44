"""Removes schema defaults from arguments: Claude Code sends each call back with the defaults of its tool filled in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from singletree.conversation import Tool
from singletree.prompts.replay.json_values import after_javascript


def without_defaults(returned: Any, generated: Any, schema: Any) -> Any:
    """Return ``returned`` without the properties that ``generated`` lacks and that equal a default of ``schema``.

    Args:
        returned: the arguments as the client sent them back, a JSON value.
        generated: the arguments as the model wrote them, a JSON value.
        schema: the JSON schema of both (``properties``, ``items`` and ``default`` are read).
    """
    if not isinstance(schema, Mapping):
        return returned
    if isinstance(returned, dict) and isinstance(generated, dict):
        properties = schema.get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        return {
            key: without_defaults(value, generated.get(key), schemas.get(key))
            for key, value in returned.items()
            if key in generated or not _is_default(value, schemas.get(key))
        }
    if isinstance(returned, list) and isinstance(generated, list) and len(returned) == len(generated):
        items = schema.get("items")
        return [without_defaults(*pair, items) for pair in zip(returned, generated, strict=True)]
    return returned


def lacks_defaults(generated: Any, schema: Any) -> bool:
    """Return whether ``schema`` has a default for a property that ``generated`` leaves out, at any depth."""
    if not isinstance(schema, Mapping):
        return False
    if isinstance(generated, list):
        return any(lacks_defaults(item, schema.get("items")) for item in generated)
    properties = schema.get("properties")
    if not isinstance(generated, dict) or not isinstance(properties, Mapping):
        return False
    return any(
        lacks_defaults(generated[key], inner)
        if key in generated
        else isinstance(inner, Mapping) and "default" in inner
        for key, inner in properties.items()
    )


def _is_default(value: Any, schema: Any) -> bool:
    if not isinstance(schema, Mapping) or "default" not in schema:
        return False
    # Compared as text, because in Python ``False == 0``.
    one, other = (json.dumps(after_javascript(v), sort_keys=True) for v in (value, schema["default"]))
    return one == other


def schema_of(name: str, tools: Sequence[Tool]) -> Mapping[str, Any] | None:
    """Return the schema of the tool called ``name``; None where no such tool exists."""
    return next((tool.parameters for tool in tools if tool.name == name), None)
