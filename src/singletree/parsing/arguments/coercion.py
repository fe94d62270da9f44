"""Converts a parameter written as text to JSON, by the tool's schema (house rule H11).

A declared string is never decoded. A parameter without a declared type is a string. Text that does not fit its declared
type stays a string, so that the harness sees what the model wrote. Numbers keep the model's own digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

UNLIKE_JSON = r'"\\\x00-\x1f\udc80-\udcff'
"""The characters that are not themselves in a JSON string, and the codes of special tokens; as a set of a pattern."""

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.0+)?\Z")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?\Z")
_LOOSE_NUMBER = re.compile(r"[-+]?[0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?\Z")
_BOOLEANS = {"true": "true", "false": "false", "1": "true", "0": "false"}
_OF_VALUE = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}
ANY = frozenset({"null", "integer", "number", "boolean", "object", "array"})
"""The types of a value that the model marked as not a string, when the schema declares no type."""

_WORDS = {
    "string": "str string text char varchar bytes enum",
    "integer": "int integer long short bigint int8 int16 int32 int64 uint uint8 uint16 uint32 uint64",
    "number": "number num float double decimal real float16 float32 float64",
    "boolean": "bool boolean",
    "object": "object dict dictionary map mapping",
    "array": "array arr list tuple set frozenset sequence iterable",
    "null": "null none nonetype",
    "": "any",
}
_TYPES_BY_WORD = {word: frozenset({name} - {""}) for name, words in _WORDS.items() for word in words.split()}
"""JSON types by the type names in tools that were made from annotations of Python or of another language."""
_COMBINING = frozenset({"union", "optional", "annotated", "literal"})

_DEPTH = 16
"""Maximum depth to which references and combinations are followed; anything deeper is ignored."""


def parameter_types(parameters: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """Return the JSON types that ``key`` may have in a tool's ``parameters`` schema; empty when it declares none.

    ``anyOf``, ``oneOf``, ``allOf``, local ``$ref``, ``nullable``, type lists, ``enum`` and ``const`` are understood.
    """
    if not isinstance(parameters, Mapping):
        return frozenset()
    schemas = property_schemas(parameters, parameters, key)
    return frozenset(name for schema in schemas for name in _types(schema, parameters))


def property_schemas(schema: Any, root: Any, key: str) -> list[Any]:
    """Return the schemas that ``schema`` declares for its member ``key``; ``root`` is what ``$ref`` refers to."""
    found = (part.get("properties") for part in _parts(schema, root))
    return [own[key] for own in found if isinstance(own, Mapping) and key in own]


def property_names(schema: Any) -> frozenset[str]:
    """Return the names of the members that ``schema``, which is also the root of its references, declares."""
    found = (part.get("properties") for part in _parts(schema, schema))
    return frozenset(name for own in found if isinstance(own, Mapping) for name in own)


def item_schemas(schema: Any, root: Any) -> list[Any]:
    """Return the schemas that ``schema`` declares for its items; ``root`` is what ``$ref`` refers to."""
    found = (part.get("items") for part in _parts(schema, root))
    return [items for items in found if isinstance(items, Mapping)]


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """Return the JSON types that ``schema`` allows; empty when it declares none."""
    return frozenset(_types(schema, root))


def _types(schema: Any, root: Any) -> Iterator[str]:
    for part in _parts(schema, root):
        declared = part.get("type")
        if isinstance(declared, str):
            yield from named_types(declared)
        elif isinstance(declared, list):
            yield from (t for each in declared if isinstance(each, str) for t in named_types(each))
        else:
            values = part.get("enum")
            values = [
                *(values if isinstance(values, list) else ()),
                *([part["const"]] if "const" in part else ()),
            ]
            yield from (_OF_VALUE.get(type(value), "string") for value in values)
            if "properties" in part:
                yield "object"
            elif "items" in part:
                yield "array"
        if part.get("nullable") is True:
            yield "null"


@lru_cache(maxsize=512)
def named_types(word: str) -> frozenset[str]:
    """Return the JSON types that a type's name stands for: ``float``, ``list[str]``, ``Optional[int]``, ``int | None``.

    The result is empty for a name that stands for any type; an unknown name stands for itself.
    """
    return _named_types(word[:_LONGEST_TYPE], 0)


_LONGEST_TYPE = 512


def _named_types(word: str, depth: int) -> frozenset[str]:
    alternatives = _split_outside(word, "|")
    head, bracket, inner = word.partition("[")
    name = head.strip().rpartition(".")[2].lower()
    if len(alternatives) > 1:
        return frozenset(t for each in alternatives for t in _deeper(each, depth))
    if not bracket or name not in _COMBINING:
        return _TYPES_BY_WORD.get(name, frozenset({word.strip()} - {""}))
    each = _split_outside(inner.rpartition("]")[0], ",")
    if name == "literal":
        return frozenset(map(_type_of_literal, each))
    if name == "annotated":
        return _deeper(each[0], depth)
    found = frozenset(t for inside in each for t in _deeper(inside, depth))
    return found | {"null"} if name == "optional" else found


def _deeper(word: str, depth: int) -> frozenset[str]:
    return _named_types(word.strip(), depth + 1) if depth < _DEPTH else frozenset()


def _split_outside(text: str, mark: str) -> list[str]:
    pieces, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == mark and not depth:
            pieces.append(text[start:i])
            start = i + 1
    return [*pieces, text[start:]]


def _type_of_literal(word: str) -> str:
    bare = word.strip()
    if bare in ("None", "True", "False"):
        return "null" if bare == "None" else "boolean"
    return "integer" if _INTEGER.match(bare) else "number" if NUMBER.match(bare) else "string"


def _parts(schema: Any, root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield ``schema`` and the schemas that it combines or refers to, each once: a schema may refer to itself."""
    known: set[int] = set()
    open_parts = [(schema, 0)]
    while open_parts:
        part, depth = open_parts.pop()
        if not isinstance(part, Mapping) or depth > _DEPTH or id(part) in known:
            continue
        known.add(id(part))
        yield part
        open_parts += [(inner, depth + 1) for inner in reversed(list(_combined(part, root)))]


def _combined(schema: Mapping[str, Any], root: Any) -> Iterator[Any]:
    for word in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(word)
        if isinstance(parts, list):
            yield from parts
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        yield resolve_reference(reference, root)


def resolve_reference(reference: str, root: Any) -> Any:
    """Return the value that the local ``$ref`` ``reference`` points to in ``root``; None when there is none."""
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
    """Return whether a value of these types is its text unchanged, so that it can be sent character by character."""
    return not types or types == {"string"}


def to_json(text: str, types: Iterable[str]) -> str:
    """Return ``text`` as JSON text of one of ``types``; a JSON string when it fits none of them."""
    kinds = frozenset(types)
    bare = text.strip()
    if "null" in kinds and bare in ("null", "None"):
        return "null"
    if ("integer" in kinds and _INTEGER.match(bare)) or ("number" in kinds and NUMBER.match(bare)):
        return bare
    if "boolean" in kinds and bare.lower() in _BOOLEANS:
        return _BOOLEANS[bare.lower()]
    for kind, opener in (("object", "{"), ("array", "[")):
        if kind in kinds and bare.startswith(opener) and is_json(bare):
            return bare
    # Where a string is allowed too, or no type is known, the exact digits may matter (007).
    number = None if "string" in kinds or kinds >= ANY else loose_number(bare)
    if number and ("number" in kinds or ("integer" in kinds and _INTEGER.match(number))):
        return number
    return quoted(text)


def loose_number(word: str) -> str | None:
    """Return a number that Python accepts and JSON does not (``007``, ``+5``, ``.5``, ``1_000``) as JSON text.

    Its digits are kept. None when ``word`` is not such a number.
    """
    if not _LOOSE_NUMBER.match(word) or not any(map(str.isdigit, word)):
        return None
    bare = word.replace("_", "").lstrip("+")
    sign, digits = ("-", bare[1:]) if bare.startswith("-") else ("", bare)
    whole, point, rest = digits.partition(".")
    if point:
        rest = rest if rest[:1].isdigit() else "0" + rest
    number = f"{sign}{whole.lstrip('0') or '0'}{point}{rest}"
    return number if NUMBER.match(number) else None


def quoted(text: str) -> str:
    """Return ``text`` as a JSON string."""
    return json.encoder.encode_basestring(text)


def is_json(text: str) -> bool:
    """Return whether ``text`` is one valid JSON value (RFC 8259: no NaN, no Infinity)."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
