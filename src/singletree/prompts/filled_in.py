"""Arguments that a harness fills in: Claude Code sends each call back with the defaults of its tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from singletree.conversation import Tool


def without_defaults(returned: Any, said: Any, schema: Any) -> Any:
    """``returned`` without what ``said`` has not and what is but a default of ``schema``.

    Args:
        returned, said: JSON values.
        schema: the JSON schema of both (``properties``, ``items`` and ``default`` are read).
    """
    if not isinstance(schema, Mapping):
        return returned
    if isinstance(returned, dict) and isinstance(said, dict):
        properties = schema.get("properties")
        of = properties if isinstance(properties, Mapping) else {}
        return {
            key: without_defaults(value, said.get(key), of.get(key))
            for key, value in returned.items()
            if key in said or not _is_default(value, of.get(key))
        }
    if isinstance(returned, list) and isinstance(said, list) and len(returned) == len(said):
        items = schema.get("items")
        return [without_defaults(*pair, items) for pair in zip(returned, said, strict=True)]
    return returned


def _is_default(value: Any, schema: Any) -> bool:
    if not isinstance(schema, Mapping) or "default" not in schema:
        return False
    # Python takes false for 0 as well; to JavaScript 3 and 3.0 are one number.
    default = json.loads(json.dumps(schema["default"]), parse_int=float)
    return json.dumps(value, sort_keys=True) == json.dumps(default, sort_keys=True)


def schema_of(name: str, tools: Sequence[Tool]) -> Mapping[str, Any] | None:
    """The schema of the tool of that name; None when there is none."""
    return next((tool.parameters for tool in tools if tool.name == name), None)
