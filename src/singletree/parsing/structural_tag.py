"""Expressions as XGrammar's structural tags, which vLLM and SGLang take.

https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html; read and proven with XGrammar 0.2.8. Markers stand as text,
which XGrammar lets the model spell with its special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from singletree.parsing.enforceable import subschemas
from singletree.parsing.expression import (
    NOTHING,
    Choice,
    Expression,
    Grammar,
    Json,
    Literal,
    Prose,
    Regex,
    Repeat,
    Sequence,
    Unsayable,
    Until,
    sequence,
)

_WHITE_SPACE = 1
"""Most white-space characters between two JSON tokens: a small model left free to indent may never stop."""

_PASSED_OVER = frozenset(
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
"""Keywords that XGrammar does not hold the model to, alone or beside others (vLLM refuses them in ``json``, too)."""

_FORMATS = frozenset(
    {"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"}
)
"""Those of ``enforceable`` that XGrammar knows."""


_RUNS_ON = re.compile(r"\.|\[\^|\\[SWD]")
"""XGrammar takes the longest text as well as the first that is closed: what may hold the closer must not be there."""


def structural_tag(expression: Expression) -> dict[str, Any]:
    """The structural tag, as a JSON value.

    Raises:
        Unsayable: XGrammar has no words for a part, or would not hold the model to a keyword of a schema.
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
                raise Unsayable("a pattern that may run over the text's end")
            return _sequence([_format(Regex(pattern)), _format(Literal(stop))])
        case Regex(pattern):
            return {"type": "regex", "pattern": pattern}
        case Json(schema):
            return {"type": "json_schema", "json_schema": _held(schema), "max_whitespace_cnt": _WHITE_SPACE}
        case Sequence(items):
            return _format(Literal("")) if not items else _sequence(map(_format, items))
        case Choice((item, other)) if other == NOTHING:
            return {"type": "optional", "content": _format(item)}
        case Choice(ways):
            return {"type": "or", "elements": [_format(way) for way in ways]}
        case Repeat(item):
            return {"type": "star", "content": _format(item)}
        case Prose():
            return _prose(expression)
        case Grammar():
            raise Unsayable("XGrammar takes no Lark grammar inside a structural tag")


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
    """``triggered_tags`` ends after all of its tags or after none."""
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


def _held(schema: Any) -> Any:
    """``schema`` as XGrammar must read it. An object that names no properties may have any."""
    _check(schema)
    if isinstance(schema, Mapping) and schema.get("type") == "object" and not schema.get("properties"):
        return {"additionalProperties": True, **schema}
    return schema


def _check(schema: Any) -> None:
    """Refuse what XGrammar passes over in silence (vllm/v1/structured_output/backend_xgrammar.py names the cases)."""
    for each in subschemas(schema):
        passed_over = sorted(_PASSED_OVER & each.keys())
        if len(each.get("allOf", ())) > 1:
            passed_over.append("allOf")
        if each.get("format", "uri") not in _FORMATS:
            passed_over.append("format")
        if each.keys() & {"pattern", "format"} and each.keys() & {"minLength", "maxLength"}:
            passed_over.append("minLength and maxLength beside pattern or format")
        if passed_over:
            raise Unsayable(f"XGrammar does not enforce {', '.join(passed_over)}")
