"""Which JSON schemas an engine can hold a model to: the keywords that LLGuidance and XGrammar read.

https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from singletree.errors import InvalidRequest
from singletree.parsing.schema import resolve

_UNREAD = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
        "$dynamicRef",
    }
)
_HARMLESS: tuple[Any, ...] = (None, False, {}, [])
"""Values with which a keyword asks for nothing."""

_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_NAMES_TO_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LENGTH = (int, "a number of characters or items, 0 or more")
_LIST = (list, "a list")
_SHAPES: dict[str, tuple[type, str]] = {
    **dict.fromkeys(_NAMES_TO_SCHEMAS, (Mapping, "an object")),
    **dict.fromkeys(("enum", "required", "anyOf", "oneOf", "allOf", "prefixItems"), _LIST),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _LENGTH),
}
_SCHEMAS = frozenset(
    {"items", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems"}
)
"""Keywords whose value is a schema or a list of them."""

_NOT_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\\k<|\\b|\\B")
_DEPTH = 64


def check(schema: Any, path: str) -> None:
    """Refuse a schema that no engine here can hold a model to, before anything is generated.

    Raises:
        InvalidRequest: ``param`` and the message name the first keyword, below ``path``.
    """
    for at, why in _faults(schema, path, schema, 0):
        raise InvalidRequest(f"{at}: {why}", param=at)


def relaxed(schema: Any) -> Any:
    """``schema`` without what cannot be enforced: every value that fits it fits this.

    The native APIs take any schema for a tool that is not strict, so an odd keyword must not cost the call.
    """
    return _relaxed(schema, schema, 0)


def subschemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """``schema`` and every schema in it; it is one that ``check`` lets through, or ``relaxed``."""
    if isinstance(schema, list):
        for each in schema:
            yield from subschemas(each)
    elif isinstance(schema, Mapping):
        yield schema
        for key, value in schema.items():
            if key in _NAMES_TO_SCHEMAS:
                yield from subschemas(list(value.values()))
            elif key in _SCHEMAS:
                yield from subschemas(value)


def _relaxed(schema: Any, root: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping):
        return schema if isinstance(schema, bool) else {}
    if depth > _DEPTH:
        return {}
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if _fault(key, value, root):
            continue
        if key in _NAMES_TO_SCHEMAS:
            kept[key] = {name: _relaxed(each, root, depth + 1) for name, each in value.items()}
        elif key in _SCHEMAS and isinstance(value, list):
            kept[key] = [_relaxed(each, root, depth + 1) for each in value]
        elif key in _SCHEMAS:
            kept[key] = _relaxed(value, root, depth + 1)
        else:
            kept[key] = value
    return kept


def _faults(schema: Any, path: str, root: Any, depth: int) -> Iterator[tuple[str, str]]:
    if depth > _DEPTH:
        yield path, f"the schema is nested deeper than {_DEPTH} levels; flatten it"
        return
    if isinstance(schema, list):
        for i, each in enumerate(schema):
            yield from _faults(each, f"{path}.{i}", root, depth + 1)
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        at = f"{path}.{key}"
        if fault := _fault(key, value, root):
            yield at, fault
        elif key in _NAMES_TO_SCHEMAS:
            for name, each in value.items():
                yield from _faults(each, f"{at}.{name}", root, depth + 1)
        elif key in _SCHEMAS:
            yield from _faults(value, at, root, depth + 1)


def _fault(key: str, value: Any, root: Any) -> str:
    """Why this keyword cannot be enforced; empty when it can."""
    if key in _UNREAD and value not in _HARMLESS:
        return "this keyword cannot be enforced; leave it out"
    if key == "$ref" and not _resolves(value, root):
        return f"{value!r} is not in the schema; only references inside it are followed"
    if key == "format" and not (isinstance(value, str) and value in _FORMATS):
        return f"the format {value!r} cannot be enforced; leave it out or write a pattern"
    if key == "pattern" and (not isinstance(value, str) or _NOT_REGULAR.search(value)):
        return "look-around, back-references and word boundaries cannot be enforced; leave the pattern out"
    if key == "type" and not _are_types(value):
        return f"{value!r} is no JSON type; write one of {', '.join(sorted(_TYPES))}"
    shape, called = _SHAPES.get(key, (object, ""))
    fits = isinstance(value, shape) and not (isinstance(value, int) and value < 0)
    return "" if fits or not called else f"this must be {called}"


def _are_types(value: Any) -> bool:
    each = value if isinstance(value, list) else [value]
    return bool(each) and all(isinstance(t, str) and t in _TYPES for t in each)


def _resolves(reference: Any, root: Any) -> bool:
    return isinstance(reference, str) and reference.startswith("#") and resolve(reference, root) is not None


def is_regular(pattern: str) -> bool:
    """Whether an engine can hold a model to the pattern."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return not _NOT_REGULAR.search(pattern)


def pattern_of_text(declared: Any, path: str, *, strict: bool) -> str:
    """What a string that stands without quotes must match as a whole, by its schema; empty for anything.

    ``format`` is an annotation there. Raises InvalidRequest for what a ``strict`` schema asks and cannot be said.
    """
    if not isinstance(declared, Mapping):
        return ""
    pattern, lengths = declared.get("pattern"), [declared.get(word) for word in ("minLength", "maxLength")]
    if pattern is None and lengths == [None, None]:
        return ""
    if pattern is None:
        least, most = lengths
        return rf"(.|\n){{{least or 0},{'' if most is None else most}}}"
    whole = _whole(pattern) if lengths == [None, None] else None
    if whole is None and strict:
        at = f"{path}.pattern"
        why = "anchors inside a pattern, and lengths beside one, cannot be enforced in this model's format"
        raise InvalidRequest(f"{at}: {why}; write it as one ^pattern$", param=at)
    return whole or ""


def _whole(pattern: str) -> str | None:
    """A pattern that is searched for, as one that matches the whole; None where its anchors stand elsewhere."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern[begins : len(pattern) - ends]
    outside = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", body)
    if re.search(r"[$^]", outside):
        return None
    while "(" in outside and (less := re.sub(r"\([^()]*\)", "", outside)) != outside:
        outside = less
    if "|" in outside and (begins or ends):
        return None
    anything = r"(.|\n)*"
    return f"{'' if begins else anything}(?:{body}){'' if ends else anything}"
