"""Nested values written as elements inside a parameter's own: objects by their names, arrays by repetition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from singletree.parsing import schema

_ITEM = "item"
_SPACE = re.compile(r"\s*")
_DEPTH = 64


@lru_cache(maxsize=64)
def _opening(picture: str) -> re.Pattern[str]:
    head, _, tail = picture.partition("{value}")[0].partition("{key}")
    return re.compile(rf"{re.escape(head)}([^<>/\s]+){re.escape(tail)}")


def depth(picture: str, key: str, text: str) -> int:
    """How many more elements ``key`` are opened in ``text`` than closed."""
    head, _, tail = (p.replace("{key}", key) for p in picture.partition("{value}"))
    return text.count(head) - text.count(tail)


def typed(picture: str, text: str, declared: list[Any], root: Any, depth: int = 0) -> str:
    """``text``, what stands inside an element, as JSON of a schema of ``declared``."""
    types = frozenset(t for d in declared for t in schema.types_of(d, root))
    children = None if schema.is_string(types) and types else _children(picture, text)
    if not children or depth > _DEPTH:
        return _leaf(text, types)
    if ("array" in types and "object" not in types) or all(name == _ITEM for name, _ in children):
        items = [s for d in declared for s in schema.item_schemas(d, root)]
        return "[" + ", ".join(typed(picture, inner, items, root, depth + 1) for _, inner in children) + "]"
    members: dict[str, list[str]] = {}
    for name, inner in children:
        below = [s for d in declared for s in schema.property_schemas(d, root, name)]
        members.setdefault(name, []).append(typed(picture, inner, below, root, depth + 1))
    spelled = (
        f"{schema.quoted(k)}: {v[0] if len(v) == 1 else '[' + ', '.join(v) + ']'}" for k, v in members.items()
    )
    return "{" + ", ".join(spelled) + "}"


def _leaf(text: str, types: frozenset[str]) -> str:
    if not text.strip() and "string" not in types:
        for kind, empty in (("object", "{}"), ("array", "[]")):
            if kind in types:
                return empty
    return schema.typed(text, types)


def _children(picture: str, text: str) -> list[tuple[str, str]] | None:
    """The elements that ``text`` consists of; None when it is anything else."""
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
    """Where the element that ``found`` opens closes, elements of its own name inside it counted."""
    opener, position, inside = found.group(), found.end(), 1
    while True:
        end = text.find(closer, position)
        if end < 0:
            return end
        inside += text.count(opener, position, end) - 1
        if not inside:
            return end
        position = end + len(closer)


def draw(picture: str, value: Any, spell: Callable[[Any], str]) -> str:
    """What stands inside an element for ``value``; ``spell`` spells what is neither a full object nor array."""
    if isinstance(value, dict) and value:
        return "".join(_element(picture, k, v, spell) for k, v in value.items())
    if isinstance(value, list) and value:
        return "".join(_element(picture, _ITEM, v, spell) for v in value)
    return spell(value)


def _element(picture: str, key: str, value: Any, spell: Callable[[Any], str]) -> str:
    head, _, tail = (p.replace("{key}", key) for p in picture.partition("{value}"))
    return head + draw(picture, value, spell) + tail
