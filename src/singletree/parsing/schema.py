"""Which JSON a parameter written as text stands for, by the tool's schema (FORMATS.md, H11).

A declared string is never decoded; what has no declared type is a string; a declared type that the text does not
fit leaves it a string, so that the harness sees what the model wrote. Numbers keep the model's own digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.0+)?\Z")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?\Z")
_BOOLEANS = {"true": "true", "false": "false", "1": "true", "0": "false"}
_OF_VALUE = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)
ANY = frozenset({"null", "integer", "number", "boolean", "object", "array"})
"""The types of a value that the wire says is no string, where the schema says nothing."""

_DEPTH = 16
"""How deep references and combinations are followed; deeper is taken to say nothing."""


def parameter_types(parameters: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """The JSON types that ``key`` may have in a tool's ``parameters`` schema; empty when it says nothing.

    ``anyOf``, ``oneOf``, ``allOf``, local ``$ref``, ``nullable``, type lists, ``enum`` and ``const`` are understood.
    """
    if not isinstance(parameters, Mapping):
        return frozenset()
    return frozenset(
        t for schema in _properties(parameters, parameters, key, 0) for t in _types(schema, parameters, 0)
    )


def property_schemas(schema: Any, root: Any, key: str) -> list[Any]:
    """What ``schema`` says of its member ``key``."""
    return list(_properties(schema, root if isinstance(root, Mapping) else {}, key, 0))


def item_schemas(schema: Any, root: Any, depth: int = 0) -> list[Any]:
    """What ``schema`` says of its items."""
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return []
    own = [schema["items"]] if isinstance(schema.get("items"), Mapping) else []
    parts = _combined(schema, root if isinstance(root, Mapping) else {})
    return [*own, *(i for part in parts for i in item_schemas(part, root, depth + 1))]


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """The JSON types that ``schema`` allows; empty when it says nothing."""
    return frozenset(_types(schema, root if isinstance(root, Mapping) else {}, 0))


def _properties(schema: Any, root: Mapping[str, Any], key: str, depth: int) -> Iterator[Any]:
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        yield properties[key]
    for part in _combined(schema, root):
        yield from _properties(part, root, key, depth + 1)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (t for t in declared if isinstance(t, str))
    else:
        yield from _types_of_values(schema)
        if "properties" in schema:
            yield "object"
        elif "items" in schema:
            yield "array"
    if schema.get("nullable") is True:
        yield "null"
    for part in _combined(schema, root):
        yield from _types(part, root, depth + 1)


def _types_of_values(schema: Mapping[str, Any]) -> Iterator[str]:
    values = schema.get("enum")
    for value in [
        *(values if isinstance(values, list) else ()),
        *([schema["const"]] if "const" in schema else ()),
    ]:
        yield (
            "null"
            if value is None
            else next((name for kind, name in _OF_VALUE if isinstance(value, kind)), "string")
        )


def _combined(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Any]:
    for word in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(word)
        if isinstance(parts, list):
            yield from parts
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        yield resolve(reference, root)


def resolve(reference: str, root: Any) -> Any:
    """What a local ``$ref`` points to in ``root``; None when nothing is there."""
    node = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        if not step:
            continue
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(step)
        elif isinstance(node, list) and step.isdigit() and int(step) < len(node):
            node = node[int(step)]
        else:
            return None
    return node


def is_string(types: frozenset[str]) -> bool:
    """Whether a value of these types is text as it stands, so that it can leave character by character."""
    return not types or types == {"string"}


def typed(text: str, types: Iterable[str]) -> str:
    """``text`` as JSON text of one of ``types``; a JSON string when it fits none of them."""
    kinds = frozenset(types)
    bare = text.strip()
    if "null" in kinds and bare in ("null", "None"):
        return "null"
    if ("integer" in kinds and _INTEGER.match(bare)) or ("number" in kinds and _NUMBER.match(bare)):
        return bare
    if "boolean" in kinds and bare.lower() in _BOOLEANS:
        return _BOOLEANS[bare.lower()]
    for kind, opener in (("object", "{"), ("array", "[")):
        if kind in kinds and bare.startswith(opener) and is_json(bare):
            return bare
    return quoted(text)


def quoted(text: str) -> str:
    """``text`` as a JSON string."""
    return json.encoder.encode_basestring(text)


def is_json(text: str) -> bool:
    """Whether ``text`` is one valid JSON value (RFC 8259: no NaN, no Infinity)."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
