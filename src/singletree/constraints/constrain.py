"""Builds the constraint of a turn from the same declaration that parses the turn.

A request can ask for three things: that the turn makes a call (``require_call``), that a call is valid once it has
begun (``allow_calls``), and that the visible text is JSON or has another format (``require_format``). Each is an
expression, which ``to_constraint`` converts to an engine's notation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from singletree.constraints import enforceable, grammars
from singletree.constraints.expression import (
    NOTHING,
    Expression,
    Grammar,
    Json,
    NotExpressible,
    Prose,
    Regex,
    Repeat,
    Until,
    lark,
    one_of,
    optional,
    pattern_of,
    sequence,
    structural_tag,
)
from singletree.conversation import ResponseFormat, Tool
from singletree.errors import InvalidRequest
from singletree.parsing.arguments import coercion
from singletree.parsing.family import SLOT, Family, Form, Literals, markers
from singletree.parsing.render_turn import render_literals
from singletree.server.turn.constraints import ReasoningState

_Pieces = list[Expression | str]
_Call = tuple[str, _Pieces]


def require_call(
    family: Family, tools: Sequence[Tool], *, thinking: ReasoningState, parallel: bool
) -> Expression:
    """Return the constraint of a turn that must call one of ``tools``; with ``parallel``, one or more.

    Raises:
        InvalidRequest: the family has no calls, or a strict tool's schema cannot be enforced (``param`` is its path).
    """
    if not family.forms:
        raise InvalidRequest(
            "tool_choice asks for a call, but this model has no known tool-call format; start the server with"
            " --tool-call-parser, or leave tool_choice at auto",
            param="tool_choice",
        )
    return sequence([*_reasoning(family, thinking), *_run(family, _Calls(family, tools), parallel)])


def allow_calls(
    family: Family, tools: Sequence[Tool], *, thinking: ReasoningState, parallel: bool
) -> Expression | None:
    """Return the constraint of a turn of any text, in which every call is of one of ``tools`` and fits its schema.

    None in a family whose calls have no marker at their first character: the engine would have to guess.

    Raises:
        InvalidRequest: a strict tool's schema cannot be enforced.
    """
    if not marks_calls(family):
        return None
    form = family.forms[0]
    shares_a_pair = bool(form.calls[0]) and not form.wrap_each  # else the marker stands before each call
    marker = "" if family.message_header else _marker(family)
    run = _run(family, _Calls(family, tools, loose=True), parallel and shares_a_pair, marker)
    open_thought = _reasoning(family, thinking) if thinking == "open" else []
    free = _messages if family.message_header else _marked_text
    return sequence([*open_thought, free(family, run, tools, thinking, parallel)])


def _marked_text(
    family: Family, run: _Pieces, tools: Sequence[Tool], thinking: ReasoningState, parallel: bool
) -> Expression:
    marker = _marker(family)
    call: tuple[tuple[str, Expression], ...] = ((marker, sequence(run)),) if tools else ()
    thoughts: tuple[tuple[str, Expression], ...] = ()
    if family.reasoning and thinking != "over":
        thoughts = ((family.reasoning[0].strip(), Until(family.reasoning[1].strip())),)
    without = (*([] if tools else [marker]), *_other_openers(family, marker, tools))
    return Prose((*thoughts, *call), (), without) if parallel else Prose(thoughts, call, without)


def _messages(
    family: Family, run: _Pieces, tools: Sequence[Tool], thinking: ReasoningState, parallel: bool
) -> Expression:
    opener, closer = family.text or ("", "")
    kinds = [(begin, closer) for begin in (opener, *family.also_text)]
    thought = [family.reasoning] if family.reasoning and thinking != "over" else []
    call = [sequence(run)] if tools else []
    # The closer is searched for alone, even before another message: LLGuidance ends a text at the first closer.
    before = [
        sequence([begin, Until(end or family.message_header), family.message_header if end else ""])
        for begin, end in (*thought, *kinds)
    ]
    before += [sequence([each, family.message_header]) for each in call] if parallel else []
    last = [sequence([begin, _last_text(end, family.message_header)]) for begin, end in kinds]
    return sequence([Repeat(one_of(before)), one_of([*last, *call, NOTHING])])


def _last_text(closer: str, header: str) -> Expression:
    """Return the text that a turn ends with. Its closer is optional, as it is often the model's stop token."""
    unclosed = Prose(without=(closer or header,))
    return one_of([Until(closer), unclosed]) if closer else unclosed


def require_format(
    family: Family,
    form: ResponseFormat,
    tools: Sequence[Tool] = (),
    *,
    thinking: ReasoningState,
    parallel: bool,
) -> Expression:
    """Return the constraint of a turn whose visible text has the format ``form``, or which calls one of ``tools``.

    Raises:
        InvalidRequest: a strict schema, a pattern or a grammar cannot be enforced.
    """
    before, after = family.text or ("", "")
    ways = [sequence([before, _formatted(form), *_closer(family, after)])]
    if family.forms and tools:
        ways.append(sequence(_run(family, _Calls(family, tools), parallel)))
    return sequence([*_reasoning(family, thinking), one_of(ways)])


def _formatted(form: ResponseFormat) -> Expression:
    if form.choices:
        return Regex("|".join(map(pattern_of, form.choices)))
    if form.pattern:
        return Regex(enforceable.whole_pattern(form.pattern, form.at))
    if form.grammar:
        syntax = grammars.syntax_of(form.grammar)
        if syntax == "ebnf":
            grammars.check_ebnf(form.grammar, form.at)
        return Grammar(form.grammar, syntax)
    return Json(_enforceable(form.schema or {"type": "object"}, form.schema_at, form.strict))


def marks_calls(family: Family) -> bool:
    """Return whether a call begins with a marker, or a message header, that nothing else begins with."""
    return bool(family.forms) and (bool(family.message_header and family.text) or bool(_marker(family)))


def to_constraint(
    expression: Expression, kind: str, tokens: Mapping[str, int], stop_token_ids: Iterable[int] = ()
) -> Any:
    """Return the expression as the value of a constraint; None when that kind of constraint cannot express it.

    Args:
        kind: ``lark``, ``gbnf`` or ``structural_tag``.
        tokens: special tokens of the vocabulary that the markers contain: text -> id.
        stop_token_ids: tokens that end a turn.
    """
    if kind == "lark":
        return lark(expression, tokens, stop_token_ids)
    if kind == "gbnf" and isinstance(expression, Grammar) and expression.syntax == "ebnf":
        return expression.definition
    if kind == "structural_tag":
        with suppress(NotExpressible):
            return structural_tag(expression)
    return None


def special_tokens_of(family: Family, special: Mapping[str, int]) -> dict[str, int]:
    """Return those of the ``special`` tokens (text -> id) that the family's markers contain."""
    literals = markers(family)
    return {text: id for text, id in special.items() if any(text in marker for marker in literals)}


def grammar_is_enforceable(family: Family, tool: Tool) -> bool:
    """Return whether a custom tool's grammar can be enforced; inside a JSON string only a regular expression can."""
    if tool.grammar is None:
        return False
    syntax, definition = tool.grammar
    if syntax == "regex":
        return enforceable.is_regular(definition)
    return bool(family.forms) and bool(family.forms[0].parameter) and not family.forms[0].nested


def _enforceable(wanted: Mapping[str, Any], path: str, strict: bool | None) -> Any:
    if not strict:
        return enforceable.relaxed(wanted)
    enforceable.check_schema(wanted, path)
    return wanted


def _reasoning(family: Family, thinking: ReasoningState) -> _Pieces:
    if family.reasoning is None or thinking == "over":
        return []
    opener, closer = family.reasoning
    rest: _Pieces = [Until(closer.strip()), closer[len(closer.rstrip("\n")) :], family.message_header]
    return rest if thinking == "open" else [optional(sequence([opener, *rest]))]


def _closer(family: Family, closer: str) -> _Pieces:
    """Return a closer. One that also ends the turn is optional: it may be the engine's stop token."""
    for end in family.dropped_markers:
        if end.strip() and closer.endswith(end):
            return [closer.removesuffix(end), optional(sequence([end]))]
    return [closer]


def _run(family: Family, made: _Calls, parallel: bool, marker: str = "") -> _Pieces:
    """Return calls and the pair around them, without the ``marker`` that they begin with."""
    form = family.forms[0]
    if not made.calls:
        return []
    opener, closer = ("", "") if form.wrap_each else form.calls
    first = one_of(sequence([(opener + head).removeprefix(marker), *rest]) for head, rest in made.calls)
    joiner = form.between(family.message_header)
    again = one_of(sequence([joiner + head, *rest]) for head, rest in made.calls)
    return [first, Repeat(again) if parallel else NOTHING, *_closer(family, closer)]


def _marker(family: Family) -> str:
    """Return the marker that a call begins with and nothing else does; empty when there is none."""
    form = family.forms[0] if family.forms else None
    if form is None or form.unmarked or family.message_header or family.text:
        return ""
    opener = form.opener.strip()
    tag = re.match(r"<[^<>\s]+>", opener)
    return tag[0] if tag else opener


def _other_openers(family: Family, marker: str, tools: Sequence[Tool]) -> Iterable[str]:
    """Yield openers of calls in the other forms that are parsed: they must not occur in the text."""
    for form in family.forms:
        own = SLOT.split(form.call)[0]
        openers = [form.opener, *([own] if form.optional else [])]
        if form.unmarked:
            openers = [f"{form.calls[0]}{own}{tool.name}" for tool in tools]
        for opener in openers:
            bare = opener.strip()
            if re.search(r"\w", bare) and marker not in bare and not marker.startswith(bare):
                yield bare


class _Calls:
    """The calls of some tools, each as its first literal and the expression that follows.

    Args:
        loose: whether a tool that is not strict may be called with any parameters, in any order.
    """

    def __init__(self, family: Family, tools: Sequence[Tool], *, loose: bool = False) -> None:
        self._family = family
        self._form = family.forms[0]
        self._loose = loose
        self.calls = [self._call(tool) for tool in tools]

    def _call(self, tool: Tool) -> _Call:
        form = self._form
        before, after = form.calls if form.wrap_each else ("", "")
        head, *slots, closer = SLOT.split(f"{before}{form.call}{after}")
        pieces = _Pieces()
        for i, part in enumerate(slots):
            pieces += [part] if i % 2 else self._slot(part, tool)
        return head, [*pieces, *_closer(self._family, closer)]

    def _slot(self, slot: str, tool: Tool) -> _Pieces:
        form = self._form
        if slot == "name":
            return [json.dumps(tool.name)[1:-1] if form.is_json else form.escaped(tool.name)]
        if slot == "id":
            return [_id(form, tool)]
        if slot == "index":
            return [Regex("[1-9][0-9]{0,2}")]
        parameters = self._parameters(tool)
        if slot == "args":
            return [Json({"type": "object"} if self._is_loose(tool) else parameters)]
        if slot == "literals" and form.literals:
            return [_literals(form.literals, parameters, tool)]
        return self._tagged(tool, parameters) if slot == "params" else []

    def _is_loose(self, tool: Tool) -> bool:
        return self._loose and not tool.strict and tool.kind == "function"

    def _parameters(self, tool: Tool) -> Mapping[str, Any]:
        declared = {"type": "object", **(tool.parameters or {})}
        syntax, definition = tool.grammar or ("", "")
        if syntax == "regex" and grammar_is_enforceable(self._family, tool):
            pattern = f"^(?:{definition})$"
            return {**declared, "properties": {"input": {"type": "string", "pattern": pattern}}}
        return _enforceable(declared, tool.schema_at, tool.strict)  # type: ignore[no-any-return]

    def _tagged(self, tool: Tool, parameters: Mapping[str, Any]) -> _Pieces:
        """Return parameters in the schema's order; those not required are optional."""
        pieces = {
            key: sequence(self._parameter(key, declared, parameters, tool))
            for key, declared in _properties(parameters).items()
        }
        if self._is_loose(tool):
            return [Repeat(one_of(pieces.values()))] if pieces else []
        return [piece if _is_required(parameters, key) else optional(piece) for key, piece in pieces.items()]

    def _parameter(self, key: str, declared: Any, root: Mapping[str, Any], tool: Tool) -> _Pieces:
        form = self._form
        types = coercion.parameter_types(root, key)
        text = coercion.is_string(types)
        wire_type = "string" if text else min(types).replace("integer", "number")
        slots = {"key": form.escaped(key), "string": "true" if text else "false", "type": wire_type}
        head, _, tail = form.parameter.partition("{value}")
        opener, tail = (SLOT.sub(lambda m: slots[m[1]], part) for part in (head, tail))
        closer = tail.rstrip("\n")
        if tool.grammar is not None and grammar_is_enforceable(self._family, tool):
            syntax, definition = tool.grammar
            value = [Until(closer, definition)] if syntax == "regex" else [Grammar(definition), closer]
            return [opener, *value, tail[len(closer) :]]
        if not text:
            return [opener, Json(_with_definitions(declared, root)), tail]
        if _has_values(declared):
            return [opener, one_of(sequence([str(v)]) for v in _values(declared)), tail]
        return [opener, Until(closer, _pattern(tool, key, declared, root)), tail[len(closer) :]]


def _id(form: Form, tool: Tool) -> Regex:
    if not form.id_format:
        return Regex("[a-zA-Z0-9]{9}")
    id = pattern_of(form.id_format.replace("{name}", tool.name))
    return Regex(id.replace(pattern_of("{index}"), "[0-9]{1,4}"))


def _literals(dialect: Literals, parameters: Mapping[str, Any], tool: Tool) -> Expression:
    """Return ``key=value`` in the schema's order, with separators between; those not required are optional."""
    first: Expression = NOTHING
    later: Expression = NOTHING
    for key, declared in reversed(_properties(parameters).items()):
        value = _literal_value(dialect, key, declared, parameters, tool)
        named = [f"{key}{dialect.assign}", *value, later]
        begins, goes_on = sequence(named), sequence([dialect.separator, *named])
        if _is_required(parameters, key):
            first, later = begins, goes_on
        else:
            first, later = one_of([begins, first]), one_of([goes_on, later])
    return first


def _literal_value(
    dialect: Literals, key: str, declared: Any, root: Mapping[str, Any], tool: Tool
) -> _Pieces:
    types = coercion.parameter_types(root, key)
    if _has_values(declared):
        texts = (render_literals(dialect, json.dumps({"": v})) for v in _values(declared))
        return [one_of(sequence([text.removeprefix(dialect.assign)]) for text in texts)]
    if dialect.verbatim and coercion.is_string(types):
        return [dialect.quote, Until(dialect.quote, _pattern(tool, key, declared, root))]
    words = [w for w, t in zip(dialect.words, ("boolean", "boolean", "null"), strict=True) if t in types]
    if words and types <= {"boolean", "null"}:
        return [one_of(sequence([word]) for word in words)]
    return [Json(_with_definitions(declared, root))]


def _pattern(tool: Tool, key: str, declared: Any, root: Mapping[str, Any]) -> str:
    if isinstance(declared, Mapping) and "$ref" in declared:
        declared = coercion.resolve_reference(declared["$ref"], root)
    path = f"{tool.schema_at}.properties.{key}"
    return enforceable.pattern_of_text(declared, path, strict=bool(tool.strict))


def _properties(parameters: Mapping[str, Any]) -> dict[str, Any]:
    properties = parameters.get("properties")
    return dict(properties) if isinstance(properties, Mapping) else {}


def _is_required(parameters: Mapping[str, Any], key: str) -> bool:
    required = parameters.get("required")
    return isinstance(required, list) and key in required


def _has_values(declared: Any) -> bool:
    return isinstance(declared, Mapping) and bool("const" in declared or declared.get("enum"))


def _values(declared: Mapping[str, Any]) -> Sequence[Any]:
    return [declared["const"]] if "const" in declared else declared["enum"]


def _with_definitions(declared: Any, root: Mapping[str, Any]) -> Any:
    shared = {k: root[k] for k in ("$defs", "definitions") if k in root}
    return {**shared, **declared} if isinstance(declared, Mapping) else declared
