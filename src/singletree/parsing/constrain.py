"""What an engine must sample, from the same declaration that reads it: grammars in LLGuidance's Lark dialect.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. llama.cpp (built with LLGuidance) and vLLM
(``guidance`` backend) take it. Markers are spelled as text; the parser matches them as text as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from singletree.conversation import Tool, ToolChoice
from singletree.errors import InvalidRequest
from singletree.parsing import schema
from singletree.parsing.draw import draw_literals
from singletree.parsing.family import SLOT, Family, Form, Literals

_ANY_TEXT = "/(?s:.*)/"
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space is fixed: a small model left free to indent may never stop."""

_UNSUPPORTED = frozenset(
    {
        "not",
        "if",
        "dependentSchemas",
        "dependentRequired",
        "unevaluatedProperties",
        "unevaluatedItems",
        "contains",
        "propertyNames",
        "uniqueItems",
        "$dynamicRef",
    }
)


def calls_grammar(
    family: Family,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    in_reasoning: bool = False,
    parallel: bool = True,
) -> str:
    """A grammar under which the turn makes a call: of any of ``tools``, or of the one that ``choice`` names.

    Args:
        in_reasoning: the prompt has opened the reasoning; it may go on and is closed before the call.
        parallel: whether more calls may follow the first.

    Raises:
        InvalidRequest: the family has no calls, the named tool is not there, or a schema cannot be held to
            (``param`` is its path).
    """
    if not family.forms:
        raise InvalidRequest(
            "tool_choice asks for a call, but this model has no known tool-call format; start the server with"
            " --tool-call-parser, or leave tool_choice at auto",
            param="tool_choice",
        )
    wanted = [(i, t) for i, t in enumerate(tools) if choice.name in (None, t.name)]
    if not wanted:
        raise InvalidRequest(
            f"tool_choice names {choice.name!r}, which is not among the tools", param="tool_choice"
        )
    form = family.forms[0]
    rules = _Rules()
    calls = [_call(form, tool, rules, f"tools.{i}") for i, tool in wanted]
    joiner = form.between(family.turn)
    return rules.grammar(
        [*_thought(family, rules, in_reasoning), *_run(form, calls, rules, joiner if parallel else None)]
    )


def json_grammar(family: Family, wanted: Mapping[str, Any] | None, *, in_reasoning: bool = False) -> str:
    """A grammar under which the visible text is JSON of schema ``wanted``, or any JSON object.

    Raises:
        InvalidRequest: the schema cannot be held to.
    """
    rules = _Rules()
    text = rules.add("text", _json(wanted or {"type": "object"}, "response_format.schema"))
    before, after = family.text or ("", "")
    return rules.grammar([*_thought(family, rules, in_reasoning), before, _Rule(text), after])


class _Rule(str):
    """The name of a rule, or an expression; a plain ``str`` in a sequence is literal text."""


_Sequence = list[str]


class _Rules:
    """Collects rules under names of their own."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, kind: str, body: str, attributes: str = "") -> _Rule:
        name = _Rule(f"{kind}_{len(self._lines)}")
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def grammar(self, start: _Sequence) -> str:
        return "\n".join(["%llguidance {}", f"start: {_written(start)}", *self._lines]) + "\n"


def _written(sequence: _Sequence) -> str:
    """A sequence with its neighbouring literals made one.

    The engine's lexer takes the longest literal and never goes back, so a short literal that starts like another
    one (a line break before the next call, or before the closer) must not stand alone.
    """
    written: list[str] = []
    literal = ""
    for item in [*sequence, _Rule("")]:
        if isinstance(item, _Rule):
            written += [_quote(literal)] if literal else []
            written += [item] if item else []
            literal = ""
        else:
            literal += item
    return " ".join(written)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _until(stop: str, rules: _Rules) -> _Rule:
    """Any text up to and with ``stop``."""
    return rules.add("until", _ANY_TEXT, f"[suffix={_quote(stop)}]")


def _thought(family: Family, rules: _Rules, in_reasoning: bool) -> _Sequence:
    if not in_reasoning or family.reasoning is None:
        return []
    closer = family.reasoning[1]
    return [_until(closer.strip(), rules), closer[len(closer.rstrip("\n")) :], family.turn]


def _run(form: Form, calls: list[_Sequence], rules: _Rules, joiner: str | None) -> _Sequence:
    opener, closer = ("", "") if form.each else form.calls
    first = rules.add("call", " | ".join(_written([opener, *c]) for c in calls))
    more = "" if joiner is None else " | ".join(_written([joiner, *c]) for c in calls)
    return [first, _Rule(f"({more})*" if more else ""), closer]


def _call(form: Form, tool: Tool, rules: _Rules, path: str) -> _Sequence:
    pieces: _Sequence = []
    before, after = form.calls if form.each else ("", "")
    for i, part in enumerate(SLOT.split(f"{before}{form.call}{after}")):
        if not i % 2:
            pieces.append(part)
        elif part == "name":
            pieces.append(_quote(tool.name)[1:-1] if form.is_json else _escaped(form, tool.name))
        elif part == "id":
            pieces.append(_id(form, tool))
        elif part == "index":
            pieces.append(_Rule("/[1-9][0-9]{0,2}/"))
        elif part == "args":
            pieces.append(rules.add("arguments", _json(_parameters(tool), f"{path}.parameters")))
        elif part == "literals" and form.literals:
            pieces.append(_literals(form.literals, tool, rules, f"{path}.parameters"))
        else:
            pieces += _tagged(form, tool, rules, f"{path}.parameters")
    return pieces


def _escaped(form: Form, text: str) -> str:
    for character, spelling in reversed(form.escapes):
        text = text.replace(character, spelling)
    return text


def _literals(dialect: Literals, tool: Tool, rules: _Rules, path: str) -> _Rule:
    """``key=value`` in the schema's order, what is not required left out freely, with separators only between."""
    parameters = _parameters(tool)
    properties = parameters.get("properties")
    required = parameters.get("required")
    first, later = _Rule('""'), _Rule('""')
    for key, declared in reversed(list((properties if isinstance(properties, Mapping) else {}).items())):
        value = _literal_value(dialect, key, declared, parameters, rules, f"{path}.properties.{key}")
        ways = [_written([lead, f"{key}{dialect.assign}", *value, later]) for lead in ("", dialect.separator)]
        if not (isinstance(required, list) and key in required):
            ways = [f"{way} | {rest}" for way, rest in zip(ways, (first, later), strict=True)]
        first, later = (rules.add("rest", way) for way in ways)
    return first


def _literal_value(
    dialect: Literals, key: str, declared: Any, root: Mapping[str, Any], rules: _Rules, path: str
) -> _Sequence:
    types = schema.parameter_types(root, key)
    if _has_values(declared):
        spelled = (
            draw_literals(dialect, json.dumps({"": v})).removeprefix(dialect.assign)
            for v in _values(declared)
        )
        return [rules.add("value", " | ".join(map(_quote, spelled)))]
    if dialect.verbatim and schema.is_string(types):
        return [dialect.quote, _until(dialect.quote, rules)]
    words = [
        w for w, kind in zip(dialect.words, ("boolean", "boolean", "null"), strict=True) if kind in types
    ]
    if words and types <= {"boolean", "null"}:
        return [rules.add("value", " | ".join(map(_quote, words)))]
    return [rules.add("value", _json(_with_definitions(declared, root), path))]


def _parameters(tool: Tool) -> Mapping[str, Any]:
    return {"type": "object", **(tool.parameters or {})}


def _id(form: Form, tool: Tool) -> _Rule:
    if not form.id_picture:
        return _Rule("/[a-zA-Z0-9]{9}/")
    drawn = form.id_picture.replace("{name}", tool.name)
    pattern = re.escape(drawn).replace(re.escape("{index}"), "[0-9]{1,4}").replace("/", r"\/")
    return _Rule(f"/{pattern}/")


def _tagged(form: Form, tool: Tool, rules: _Rules, path: str) -> Iterable[_Rule]:
    """Parameters in the schema's order; those not required may be left out."""
    parameters = _parameters(tool)
    properties = parameters.get("properties")
    required = parameters.get("required")
    for key, declared in (properties if isinstance(properties, Mapping) else {}).items():
        piece = _written(_parameter(form, key, declared, parameters, rules, f"{path}.properties.{key}"))
        yield _Rule(piece if isinstance(required, list) and key in required else f"({piece})?")


def _parameter(
    form: Form, key: str, declared: Any, root: Mapping[str, Any], rules: _Rules, path: str
) -> _Sequence:
    text = schema.is_string(schema.parameter_types(root, key))
    slots = {"key": _escaped(form, key), "string": "true" if text else "false", "type": _wire_type(root, key)}
    head, _, tail = form.parameter.partition("{value}")
    opener, tail = (SLOT.sub(lambda m: slots[m[1]], part) for part in (head, tail))
    if text and not _has_values(declared):
        closer = tail.rstrip("\n")
        return [opener, _until(closer, rules), tail[len(closer) :]]
    if text:
        value = rules.add("value", " | ".join(_quote(str(v)) for v in _values(declared)))
    else:
        value = rules.add("value", _json(_with_definitions(declared, root), path))
    return [opener, value, tail]


def _wire_type(root: Mapping[str, Any], key: str) -> str:
    types = schema.parameter_types(root, key)
    named = "string" if schema.is_string(types) else min(types)
    return "number" if named == "integer" else named


def _has_values(declared: Any) -> bool:
    return isinstance(declared, Mapping) and bool("const" in declared or declared.get("enum"))


def _values(declared: Mapping[str, Any]) -> Sequence[Any]:
    return [declared["const"]] if "const" in declared else declared["enum"]


def _with_definitions(declared: Any, root: Mapping[str, Any]) -> Any:
    shared = {k: root[k] for k in ("$defs", "definitions") if k in root}
    return {**shared, **declared} if isinstance(declared, Mapping) else declared


def _json(wanted: Any, path: str) -> str:
    _check(wanted, path, 0)
    held = {**wanted, "x-guidance": _COMPACT} if isinstance(wanted, Mapping) else wanted
    return "%json " + json.dumps(held, ensure_ascii=False)


def _check(wanted: Any, path: str, depth: int) -> None:
    """Refuse, with its path, what no engine here can hold the model to."""
    if depth > 64:
        raise InvalidRequest(f"{path}: the schema is nested deeper than 64 levels; flatten it", param=path)
    if isinstance(wanted, Mapping):
        for key, value in wanted.items():
            if key in _UNSUPPORTED and value:
                raise InvalidRequest(
                    f"{path}.{key}: this keyword cannot be enforced; leave it out", param=f"{path}.{key}"
                )
            if key == "$ref" and not str(value).startswith("#"):
                raise InvalidRequest(
                    f"{path}.$ref: only references inside the schema are followed", param=f"{path}.$ref"
                )
            if key not in ("enum", "const", "default", "examples"):
                _check(value, f"{path}.{key}", depth + 1)
    elif isinstance(wanted, list):
        for i, value in enumerate(wanted):
            _check(value, f"{path}.{i}", depth + 1)
