"""Values nested as elements inside a parameter's element: objects as named elements, arrays as repeated ones.

A ``picture`` here is the picture of a parameter, with ``{key}`` and ``{value}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from singletree.parsing.arguments import coercion

_ITEM = "item"
_SPACE = re.compile(r"\s*")
_DEPTH = 64


@lru_cache(maxsize=64)
def _opening(picture: str) -> re.Pattern[str]:
    head, _, tail = picture.partition("{value}")[0].partition("{key}")
    return re.compile(rf"{re.escape(head)}([^<>/\s]+){re.escape(tail)}")


def depth(picture: str, key: str, text: str) -> int:
    """Return the number of elements ``key`` that ``text`` opens, minus the number that it closes."""
    head, _, tail = (p.replace("{key}", key) for p in picture.partition("{value}"))
    return text.count(head) - text.count(tail)


def nested_to_json(picture: str, text: str, declared: list[Any], root: Any, depth: int = 0) -> str:
    """Return the content of an element as JSON text.

    Args:
        picture: picture of an element.
        text: the content.
        declared: schemas of the value.
        root: the schema that ``$ref`` refers to.
        depth: number of elements around this one.
    """
    types = frozenset(t for d in declared for t in coercion.types_of(d, root))
    children = None if coercion.is_string(types) and types else _children(picture, text)
    if not children or depth > _DEPTH:
        return _leaf(text, types)
    if ("array" in types and "object" not in types) or all(name == _ITEM for name, _ in children):
        items = [s for d in declared for s in coercion.item_schemas(d, root)]
        return (
            "["
            + ", ".join(nested_to_json(picture, inner, items, root, depth + 1) for _, inner in children)
            + "]"
        )
    members: dict[str, list[str]] = {}
    for name, inner in children:
        below = [s for d in declared for s in coercion.property_schemas(d, root, name)]
        members.setdefault(name, []).append(nested_to_json(picture, inner, below, root, depth + 1))
    written = (
        f"{coercion.quoted(k)}: {v[0] if len(v) == 1 else '[' + ', '.join(v) + ']'}"
        for k, v in members.items()
    )
    return "{" + ", ".join(written) + "}"


def _leaf(text: str, types: frozenset[str]) -> str:
    if not text.strip() and "string" not in types:
        for kind, empty in (("object", "{}"), ("array", "[]")):
            if kind in types:
                return empty
    return coercion.to_json(text, types)


def _children(picture: str, text: str) -> list[tuple[str, str]] | None:
    """Return the elements that ``text`` consists of; None when there is anything else in it."""
    found = list(_elements(picture, text))
    return None if not found or found[-1] is None else [f for f in found if f is not None]


def _elements(picture: str, text: str) -> Iterator[tuple[str, str] | None]:
    opening, close = _opening(picture), picture.partition("{value}")[2]
    position = _SPACE.match(text).end()  # type: ignore[union-attr]
    while position < len(text):
        found = opening.match(text, position)
        end = _closing(text, found, close.replace("{key}", found[1])) if found else -1
        if found is None or end < 0:
            yield None
            return
        yield found[1], text[found.end() : end]
        position = _SPACE.match(text, end + len(close.replace("{key}", found[1]))).end()  # type: ignore[union-attr]


def _closing(text: str, found: re.Match[str], closer: str) -> int:
    """Return the position of the closer of the element that ``found`` opens; elements of its name may be inside."""
    opener, position, inside = found.group(), found.end(), 1
    while True:
        end = text.find(closer, position)
        if end < 0:
            return end
        inside += text.count(opener, position, end) - 1
        if not inside:
            return end
        position = end + len(closer)


def render_nested(picture: str, value: Any, text_of: Callable[[Any], str]) -> str:
    """Return the content of an element for ``value``; ``text_of`` writes scalars, and empty objects and arrays."""
    if isinstance(value, dict) and value:
        return "".join(_element(picture, k, v, text_of) for k, v in value.items())
    if isinstance(value, list) and value:
        return "".join(_element(picture, _ITEM, v, text_of) for v in value)
    return text_of(value)


def _element(picture: str, key: str, value: Any, text_of: Callable[[Any], str]) -> str:
    head, _, tail = (p.replace("{key}", key) for p in picture.partition("{value}"))
    return head + render_nested(picture, value, text_of) + tail
