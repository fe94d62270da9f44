"""Checks what an engine can enforce of what a client sends: JSON schemas and regular expressions.

Of schemas, these are the keywords that LLGuidance and XGrammar support
(https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from singletree import request_limits
from singletree.errors import InvalidRequest
from singletree.parsing.arguments.coercion import named_types, resolve_reference

_UNREAD = {"not", "if", "then", "else", "contains", "minContains", "maxContains", "dependencies", "dependentRequired",
           "dependentSchemas", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
           "$dynamicRef"}  # fmt: skip
_HARMLESS: tuple[Any, ...] = (None, False, {}, [])
"""Values with which a keyword has no effect."""

FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
           "unknown"}  # fmt: skip
"""Formats of strings that LLGuidance knows; XGrammar knows all but the last."""
_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_NAMES_TO_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LENGTH = (int, "a number of characters or items, 0 or more")
_LIST = (list, "a list")
_SHAPES: dict[str, tuple[type, str]] = {
    **dict.fromkeys(_NAMES_TO_SCHEMAS, (Mapping, "an object")),
    **dict.fromkeys(("enum", "required", "anyOf", "oneOf", "allOf", "prefixItems"), _LIST),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _LENGTH),
}
_SCHEMAS = {"items", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems"}
"""Keywords whose value is a schema or a list of them."""

_NOT_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\\k<|\\b|\\B")
_DEPTH = 64

_Place: TypeAlias = tuple[str, ...]
"""A place in a request: the names and numbers of its path."""


def check_schema(schema: Any, path: str) -> None:
    """Refuse a schema, at ``path`` of the request, that no engine here can enforce.

    Raises:
        InvalidRequest: ``param`` and the message name the first such keyword, below ``path``.
    """
    for place, why in _faults(schema, (path,), schema, 0):
        at = ".".join(place)
        raise InvalidRequest(f"{at}: {why}", param=at)


def first_fault(schema: Any, path: str) -> str:
    """Return the path of the first keyword that no engine here can enforce, below ``path``; empty if there is none."""
    return next((".".join(place) for place, _ in _faults(schema, (path,), schema, 0)), "")


def relaxed(schema: Any) -> Any:
    """Return ``schema`` without keywords that cannot be enforced; every value that fits ``schema`` fits the result.

    The native APIs accept any schema for a tool that is not strict, so an unusual keyword must not fail the request.
    """
    return _relaxed(schema, schema, 0)


def subschemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield ``schema`` and every schema in it. It must have passed ``check_schema``, or come from ``relaxed``."""
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
            if key == "type" and (names := _json_types(value)):
                kept[key] = names
        elif key in _NAMES_TO_SCHEMAS:
            kept[key] = {name: _relaxed(each, root, depth + 1) for name, each in value.items()}
        elif key in _SCHEMAS and isinstance(value, list):
            kept[key] = [_relaxed(each, root, depth + 1) for each in value]
        else:
            kept[key] = _relaxed(value, root, depth + 1) if key in _SCHEMAS else value
    return kept


def _faults(schema: Any, place: _Place, root: Any, depth: int) -> Iterator[tuple[_Place, str]]:
    # Places are joined by the caller: names may be long, and many.
    if depth > _DEPTH:
        yield place, f"the schema is nested deeper than {_DEPTH} levels; flatten it"
        return
    if isinstance(schema, list):
        for i, each in enumerate(schema):
            yield from _faults(each, (*place, str(i)), root, depth + 1)
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        at = (*place, key)
        if fault := _fault(key, value, root):
            yield at, fault
        elif key in _NAMES_TO_SCHEMAS:
            for name, each in value.items():
                yield from _faults(each, (*at, name), root, depth + 1)
        elif key in _SCHEMAS:
            yield from _faults(value, at, root, depth + 1)


def _fault(key: str, value: Any, root: Any) -> str:
    """Return why this keyword cannot be enforced; empty when it can."""
    if key in _UNREAD and value not in _HARMLESS:
        return "this keyword cannot be enforced; leave it out"
    is_local = isinstance(value, str) and value.startswith("#")
    if key == "$ref" and (not is_local or resolve_reference(value, root) is None):
        return f"{value!r} is not in the schema; only references inside it are followed"
    if key == "format" and not (isinstance(value, str) and value in FORMATS):
        return f"the format {value!r} cannot be enforced; leave it out or write a pattern"
    if key == "pattern" and isinstance(value, str) and len(value) > _longest_pattern():
        return f"the pattern has {len(value)} characters; write one of at most {_longest_pattern()}"
    if key == "pattern" and (not isinstance(value, str) or _NOT_REGULAR.search(value)):
        return "look-around, back-references and word boundaries cannot be enforced; leave the pattern out"
    names = value if isinstance(value, list) else [value]
    if key == "type" and not (names and all(isinstance(name, str) and name in _TYPES for name in names)):
        return f"{value!r} is not a JSON type; use one of {', '.join(sorted(_TYPES))}"
    shape, name = _SHAPES.get(key, (object, ""))
    fits = isinstance(value, shape) and not (isinstance(value, int) and value < 0)
    return "" if fits or not name else f"this must be {name}"


def _json_types(value: Any) -> list[str]:
    """Return the JSON types of Python type names; empty when a name is unknown."""
    each = value if isinstance(value, list) else [value]
    if not all(isinstance(word, str) for word in each):
        return []
    known = [named_types(word) for word in each]
    return sorted(frozenset().union(*known)) if all(k and k <= _TYPES for k in known) else []


def _longest_pattern() -> int:
    return request_limits.current().pattern_characters


def is_regular(pattern: str) -> bool:
    """Return whether an engine can enforce the regular expression."""
    if len(pattern) > _longest_pattern():
        return False
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return not _NOT_REGULAR.search(pattern)


def whole_pattern(pattern: str, path: str) -> str:
    """Return the client's ``pattern``, which a whole text has to match, without its anchors.

    Raises:
        InvalidRequest: it is not a regular expression, or one that no engine can enforce.
    """
    body = pattern.removeprefix("^")
    if body.endswith("$") and not re.search(r"(?<!\\)(?:\\\\)*\\\$$", body):
        body = body[:-1]
    cure = "send one without look-around, back-references, word boundaries, and anchors inside"
    if not is_regular(pattern):
        raise InvalidRequest(f"{path} is not a regular expression that can be enforced; {cure}", param=path)
    if re.search(r"[$^]|\\[AZz]", _outside_classes(body, keep=r"\\[AZz]")):
        raise InvalidRequest(f"{path} has an anchor inside; {cure}", param=path)
    return body


def _outside_classes(pattern: str, keep: str = "(?!)") -> str:
    """Return ``pattern`` without its character classes and escapes, except those that match ``keep``."""
    # Of a class that is not closed all is left out: looking for its end at each bracket would take the square of time.
    return re.sub(rf"(?!{keep})\\.|\[(?:\\.|[^\]\\])*+\]?", "", pattern, flags=re.DOTALL)


def pattern_of_text(declared: Any, path: str, *, strict: bool) -> str:
    """Return the pattern that a string without quotes must match as a whole; empty for any text.

    ``declared`` is the schema of the string; its ``format`` is only an annotation here.

    Raises:
        InvalidRequest: the schema is strict, and a keyword cannot be expressed as a pattern.
    """
    if not isinstance(declared, Mapping):
        return ""
    pattern, lengths = declared.get("pattern"), [declared.get(word) for word in ("minLength", "maxLength")]
    if pattern is None:
        least, most = lengths
        return "" if lengths == [None, None] else rf"(.|\n){{{least or 0},{'' if most is None else most}}}"
    whole = _whole(pattern) if lengths == [None, None] else None
    if whole is None and strict:
        at = f"{path}.pattern"
        why = "anchors inside a pattern, and lengths beside one, cannot be enforced in this model's format"
        raise InvalidRequest(f"{at}: {why}; write it as one ^pattern$", param=at)
    return whole or ""


def _outside_groups(pattern: str) -> str:
    """Return ``pattern``, which has no classes and escapes, without its groups."""
    depth, kept = 0, []
    for piece in re.split(r"([()])", pattern):
        depth += (piece == "(") - (piece == ")")
        if not depth and piece not in "()":
            kept.append(piece)
    return "".join(kept)


def _whole(pattern: str) -> str | None:
    """Return a search pattern as one that matches the whole text; None when it has anchors inside."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern[begins : len(pattern) - ends]
    outside = _outside_classes(body)
    if re.search(r"[$^]", outside) or ("|" in _outside_groups(outside) and (begins or ends)):
        return None
    anything = r"(.|\n)*"
    return f"{'' if begins else anything}(?:{body}){'' if ends else anything}"
