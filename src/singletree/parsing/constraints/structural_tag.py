"""Converts expressions to XGrammar's structural tags, for vLLM and SGLang.

https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html; checked with XGrammar 0.2.8. Markers are written as text;
XGrammar lets the model write them with its special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from singletree.parsing.constraints.expression import (
    NOTHING,
    Expression,
    Grammar,
    Json,
    Literal,
    NotExpressible,
    OneOf,
    Prose,
    Regex,
    Repeat,
    Sequence,
    Until,
    sequence,
)
from singletree.parsing.constraints.schema_support import subschemas

_WHITE_SPACE = 1
"""Maximum white space, in characters, between two JSON tokens: a small model that may indent freely may never stop."""

_IGNORED = frozenset(
    (
        "multipleOf",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "propertyNames",
        "patternProperties",
    )
)
"""Keywords that XGrammar does not enforce, alone or beside others (vLLM refuses them in ``json``, too)."""

_FORMATS = frozenset(
    {"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"}
)
"""The formats of ``schema_support`` that XGrammar knows."""


_RUNS_ON = re.compile(r"\.|\[\^|\\[SWD]")
"""Patterns that may match the closer too: XGrammar accepts any text that ends with the closer, not only the first."""


def structural_tag(expression: Expression) -> dict[str, Any]:
    """Return the structural tag, as a JSON value.

    Raises:
        NotExpressible: XGrammar cannot express a part, or does not enforce a keyword of a schema.
    """
    return {"type": "structural_tag", "format": _format(expression)}


def _format(expression: Expression) -> dict[str, Any]:
    match expression:
        case Literal(text):
            return {"type": "const_string", "value": text}
        case Until(stop, ""):
            return _tag("", _any_text(()), stop)
        case Until(stop, pattern):
            if _RUNS_ON.search(pattern):
                raise NotExpressible("a pattern that may run over the text's end")
            return _sequence([_format(Regex(pattern)), _format(Literal(stop))])
        case Regex(pattern):
            return {"type": "regex", "pattern": pattern}
        case Json(schema):
            return {
                "type": "json_schema",
                "json_schema": _completed(schema),
                "max_whitespace_cnt": _WHITE_SPACE,
            }
        case Sequence(items):
            return _format(Literal("")) if not items else _sequence(map(_format, items))
        case OneOf((item, other)) if other == NOTHING:
            return {"type": "optional", "content": _format(item)}
        case OneOf(ways):
            return {"type": "or", "elements": [_format(way) for way in ways]}
        case Repeat(item):
            return {"type": "star", "content": _format(item)}
        case Prose():
            return _prose(expression)
        case Grammar(definition, "ebnf"):
            return {"type": "grammar", "grammar": definition}
        case Grammar():
            raise NotExpressible("XGrammar takes no Lark grammar inside a structural tag")


def _sequence(elements: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _any_text(without: Iterable[str]) -> dict[str, Any]:
    return {"type": "any_text", "excludes": list(dict.fromkeys(without))}


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _prose(prose: Prose) -> dict[str, Any]:
    if prose.markers and prose.last:
        return _prose_with_an_end(prose)
    marked = prose.markers or prose.last
    if not marked:
        return _any_text(prose.without)
    return {
        "type": "triggered_tags",
        "triggers": [marker for marker, _ in marked],
        "tags": [_marked(marker, what) for marker, what in marked],
        "stop_after_first": bool(prose.last),
        "excludes": list(prose.without),
    }


def _marked(marker: str, what: Expression) -> dict[str, Any]:
    if isinstance(what, Until) and not what.pattern:
        return _tag(marker, _any_text(()), what.stop)
    if isinstance(what, Sequence) and what.items and isinstance(end := what.items[-1], Literal):
        return _tag(marker, _format(sequence(what.items[:-1])), end.text)
    return _tag(marker, _format(what), "")


def _prose_with_an_end(prose: Prose) -> dict[str, Any]:
    """Return prose with tags after which the text ends; ``triggered_tags`` ends after all of its tags or after none."""
    stops = [marker for marker, _ in (*prose.markers, *prose.last)]

    def up_to(marker: str, what: Expression) -> dict[str, Any]:
        others = [*prose.without, *(stop for stop in stops if stop != marker)]
        return _sequence([_tag("", _any_text(others), marker), _format(what)])

    again = {"type": "or", "elements": [up_to(*each) for each in prose.markers]}
    end = {
        "type": "or",
        "elements": [_any_text([*prose.without, *stops]), *(up_to(*each) for each in prose.last)],
    }
    return _sequence([{"type": "star", "content": again}, end])


def _completed(schema: Any) -> Any:
    """Return ``schema`` in the form that XGrammar needs. An object that declares no properties may have any."""
    _check(schema)
    if isinstance(schema, Mapping) and schema.get("type") == "object" and not schema.get("properties"):
        return {"additionalProperties": True, **schema}
    return schema


def _check(schema: Any) -> None:
    """Refuse keywords that XGrammar ignores silently (vllm/v1/structured_output/backend_xgrammar.py lists them)."""
    for each in subschemas(schema):
        ignored = sorted(_IGNORED & each.keys())
        if len(each.get("allOf", ())) > 1:
            ignored.append("allOf")
        if each.get("format", "uri") not in _FORMATS:
            ignored.append("format")
        if each.keys() & {"pattern", "format"} and each.keys() & {"minLength", "maxLength"}:
            ignored.append("minLength and maxLength beside pattern or format")
        if ignored:
            raise NotExpressible(f"XGrammar does not enforce {', '.join(ignored)}")
