"""What a turn may spell so that a request gets what it asks for, from the same declaration that reads the turn.

Three things can be asked: that the turn makes a call (``calls``), that a call is right once it is begun
(``prose``), and that the visible text is JSON (``json_text``). Each is an expression, which ``written`` puts into an
engine's words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from singletree.conversation import ResponseFormat, Tool
from singletree.errors import InvalidRequest
from singletree.parsing import enforceable, schema
from singletree.parsing.draw import draw_literals
from singletree.parsing.expression import (
    NOTHING,
    Expression,
    Grammar,
    Json,
    Prose,
    Regex,
    Repeat,
    Unsayable,
    Until,
    choice,
    optional,
    pattern_of,
    sequence,
)
from singletree.parsing.family import SLOT, Family, Form, Literals, markers
from singletree.parsing.lark import lark
from singletree.parsing.structural_tag import structural_tag

Thinking = Literal["open", "possible", "over"]
"""Where the reasoning stands at the turn's first token: the prompt has opened it, the model may, or it is past."""

_Pieces = list[Expression | str]
_Call = tuple[str, _Pieces]


def calls(family: Family, tools: Sequence[Tool], *, thinking: Thinking, parallel: bool) -> Expression:
    """The turn makes a call of one of ``tools``; where ``parallel``, it may make more.

    Raises:
        InvalidRequest: the family has no calls, or a strict tool's schema cannot be held to (``param`` is its path).
    """
    if not family.forms:
        raise InvalidRequest(
            "tool_choice asks for a call, but this model has no known tool-call format; start the server with"
            " --tool-call-parser, or leave tool_choice at auto",
            param="tool_choice",
        )
    return sequence([*_thought(family, thinking), *_run(family, _Calls(family, tools), parallel)])


def prose(family: Family, tools: Sequence[Tool], *, thinking: Thinking, parallel: bool) -> Expression | None:
    """The turn says what it likes, and a call that it begins is one of ``tools`` and fits its schema.

    None in a family where nothing tells from the first character on that a call begins: the engine would have to
    guess.

    Raises:
        InvalidRequest: a strict tool's schema cannot be held to.
    """
    if not marks_calls(family):
        return None
    form = family.forms[0]
    shares_a_pair = bool(form.calls[0]) and not form.each  # else the marker stands before each call
    marker = "" if family.turn else _marker(family)
    run = _run(family, _Calls(family, tools, loose=True), parallel and shares_a_pair, marker)
    open_thought = _thought(family, thinking) if thinking == "open" else []
    free = _messages if family.turn else _marked_text
    return sequence([*open_thought, *free(family, run, tools, thinking, parallel)])


def _marked_text(
    family: Family, run: _Pieces, tools: Sequence[Tool], thinking: Thinking, parallel: bool
) -> _Pieces:
    """Text in which markers begin calls and thoughts."""
    marker = _marker(family)
    call: tuple[tuple[str, Expression], ...] = ((marker, sequence(run)),) if tools else ()
    thoughts: tuple[tuple[str, Expression], ...] = ()
    if family.reasoning and thinking != "over":
        thoughts = ((family.reasoning[0].strip(), Until(family.reasoning[1].strip())),)
    without = (*([] if tools else [marker]), *_other_openers(family, marker, tools))
    return [Prose((*thoughts, *call), (), without) if parallel else Prose(thoughts, call, without)]


def _messages(
    family: Family, run: _Pieces, tools: Sequence[Tool], thinking: Thinking, parallel: bool
) -> _Pieces:
    """Messages, of which each says at once whether it is text, thought or call."""
    opener, closer = family.text or ("", "")
    kinds = [(begin, closer) for begin in (opener, *family.also_text)]
    thought = [family.reasoning] if family.reasoning and thinking != "over" else []
    call = [sequence(run)] if tools else []
    # The closer is looked for alone, be it the last or not: LLGuidance ends a text at the first that ends it.
    before = [
        sequence([begin, Until(end or family.turn), family.turn if end else ""])
        for begin, end in (*thought, *kinds)
    ]
    before += [sequence([each, family.turn]) for each in call] if parallel else []
    said = [sequence([begin, _last_text(end, family.turn)]) for begin, end in kinds]
    return [Repeat(choice(before)), choice([*said, *call, NOTHING])]


def _last_text(closer: str, turn: str) -> Expression:
    """The text that a turn ends with: its closer is often the model's stop token."""
    unclosed = Prose(without=(closer or turn,))
    return choice([Until(closer), unclosed]) if closer else unclosed


def json_text(
    family: Family, form: ResponseFormat, tools: Sequence[Tool] = (), *, thinking: Thinking, parallel: bool
) -> Expression:
    """The visible text is JSON as ``form`` wants it; instead of it the turn may call one of ``tools``.

    Raises:
        InvalidRequest: a strict schema cannot be held to.
    """
    held = _held(form.schema or {"type": "object"}, form.schema_at, bool(form.strict))
    before, after = family.text or ("", "")
    ways = [sequence([before, Json(held), *_closer(family, after)])]
    if family.forms and tools:
        ways.append(sequence(_run(family, _Calls(family, tools), parallel)))
    return sequence([*_thought(family, thinking), choice(ways)])


def marks_calls(family: Family) -> bool:
    """Whether a marker, or a message's header, tells from its first character on that a call begins."""
    return bool(family.forms) and (bool(family.turn and family.text) or bool(_marker(family)))


def written(
    expression: Expression, kind: str, tokens: Mapping[str, int], stop_token_ids: Iterable[int] = ()
) -> Any:
    """The expression as the value of a constraint of this kind; None when that cannot say it.

    ``tokens`` are the special tokens of the vocabulary (text -> id), ``stop_token_ids`` those that end a turn.
    """
    if kind == "lark":
        return lark(expression, tokens, stop_token_ids)
    if kind == "structural_tag":
        try:
            return structural_tag(expression)
        except Unsayable:
            return None
    return None


def special_tokens_of(family: Family, tokens: Mapping[str, int], special: Iterable[str]) -> dict[str, int]:
    """Those of the ``special`` tokens that the family's markers hold, with their ids."""
    drawn = markers(family)
    return {t: tokens[t] for t in special if t in tokens and any(t in marker for marker in drawn)}


def grammar_is_held(family: Family, tool: Tool) -> bool:
    """Whether the grammar of a custom tool can be held to: inside a JSON string only a regular expression can."""
    if tool.grammar is None:
        return False
    syntax, definition = tool.grammar
    if syntax == "regex":
        return enforceable.is_regular(definition)
    return bool(family.forms) and bool(family.forms[0].parameter) and not family.forms[0].nested


def _held(wanted: Mapping[str, Any], path: str, strict: bool) -> Any:
    if not strict:
        return enforceable.relaxed(wanted)
    enforceable.check(wanted, path)
    return wanted


def _thought(family: Family, thinking: Thinking) -> _Pieces:
    if family.reasoning is None or thinking == "over":
        return []
    opener, closer = family.reasoning
    rest: _Pieces = [Until(closer.strip()), closer[len(closer.rstrip("\n")) :], family.turn]
    return rest if thinking == "open" else [optional(sequence([opener, *rest]))]


def _closer(family: Family, closer: str) -> _Pieces:
    """A marker that also ends the turn may be the engine's stop token, which no grammar can ask for."""
    for end in family.ends:
        if end.strip() and closer.endswith(end):
            return [closer.removesuffix(end), optional(sequence([end]))]
    return [closer]


def _run(family: Family, made: _Calls, parallel: bool, marker: str = "") -> _Pieces:
    """Calls and what stands around them, less the ``marker`` that they begin with."""
    form = family.forms[0]
    if not made.calls:
        return []
    opener, closer = ("", "") if form.each else form.calls
    first = choice(sequence([(opener + head).removeprefix(marker), *rest]) for head, rest in made.calls)
    joiner = form.between(family.turn)
    again = choice(sequence([joiner + head, *rest]) for head, rest in made.calls)
    return [first, Repeat(again) if parallel else NOTHING, *_closer(family, closer)]


def _marker(family: Family) -> str:
    """What a call begins with and nothing else does; empty where there is no such thing."""
    form = family.forms[0] if family.forms else None
    if form is None or form.bare or family.turn or family.text:
        return ""
    opener = form.opener.strip()
    tag = re.match(r"<[^<>\s]+>", opener)
    return tag[0] if tag else opener


def _other_openers(family: Family, marker: str, tools: Sequence[Tool]) -> Iterable[str]:
    """How calls could begin in the spellings that are read as well: those stay out of the text."""
    for form in family.forms:
        own = SLOT.split(form.call)[0]
        openers = [form.opener, *([own] if form.optional else [])]
        if form.bare:
            openers = [f"{form.calls[0]}{own}{tool.name}" for tool in tools]
        for opener in openers:
            bare = opener.strip()
            if re.search(r"\w", bare) and marker not in bare and not marker.startswith(bare):
                yield bare


class _Calls:
    """The calls of some tools, each as its first literal and what follows.

    Args:
        loose: a tool that is not strict may be called with any parameters, in any order.
    """

    def __init__(self, family: Family, tools: Sequence[Tool], *, loose: bool = False) -> None:
        self._family = family
        self._form = family.forms[0]
        self._loose = loose
        self.calls = [self._call(tool) for tool in tools]

    def _call(self, tool: Tool) -> _Call:
        form = self._form
        before, after = form.calls if form.each else ("", "")
        head, *slots, closer = SLOT.split(f"{before}{form.call}{after}")
        pieces = _Pieces()
        for i, part in enumerate(slots):
            pieces += [part] if i % 2 else self._slot(part, tool)
        return head, [*pieces, *_closer(self._family, closer)]

    def _slot(self, slot: str, tool: Tool) -> _Pieces:
        form = self._form
        if slot == "name":
            return [json.dumps(tool.name)[1:-1] if form.is_json else _escaped(form, tool.name)]
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
        if tool.grammar is not None and tool.grammar[0] == "regex" and grammar_is_held(self._family, tool):
            pattern = f"^(?:{tool.grammar[1]})$"
            return {**declared, "properties": {"input": {"type": "string", "pattern": pattern}}}
        return _held(declared, tool.schema_at, bool(tool.strict))  # type: ignore[no-any-return]

    def _tagged(self, tool: Tool, parameters: Mapping[str, Any]) -> _Pieces:
        """Parameters in the schema's order, those not required left out freely."""
        each = [
            (key, sequence(self._parameter(key, declared, parameters, tool)))
            for key, declared in _properties(parameters).items()
        ]
        if self._is_loose(tool):
            return [Repeat(choice(piece for _, piece in each))] if each else []
        return [piece if _is_required(parameters, key) else optional(piece) for key, piece in each]

    def _parameter(self, key: str, declared: Any, root: Mapping[str, Any], tool: Tool) -> _Pieces:
        form = self._form
        text = schema.is_string(schema.parameter_types(root, key))
        slots = {
            "key": _escaped(form, key),
            "string": "true" if text else "false",
            "type": _wire_type(root, key),
        }
        head, _, tail = form.parameter.partition("{value}")
        opener, tail = (SLOT.sub(lambda m: slots[m[1]], part) for part in (head, tail))
        closer = tail.rstrip("\n")
        if tool.grammar is not None and grammar_is_held(self._family, tool):
            syntax, definition = tool.grammar
            value: _Pieces = (
                [Until(closer, definition)] if syntax == "regex" else [Grammar(definition), closer]
            )
            return [opener, *value, tail[len(closer) :]]
        if not text:
            return [opener, Json(_with_definitions(declared, root)), tail]
        if _has_values(declared):
            return [opener, choice(sequence([str(v)]) for v in _values(declared)), tail]
        return [opener, Until(closer, _pattern(tool, key, declared, root)), tail[len(closer) :]]


def _escaped(form: Form, text: str) -> str:
    for character, spelling in reversed(form.escapes):
        text = text.replace(character, spelling)
    return text


def _id(form: Form, tool: Tool) -> Regex:
    if not form.id_picture:
        return Regex("[a-zA-Z0-9]{9}")
    drawn = form.id_picture.replace("{name}", tool.name)
    return Regex(pattern_of(drawn).replace(pattern_of("{index}"), "[0-9]{1,4}"))


def _literals(dialect: Literals, parameters: Mapping[str, Any], tool: Tool) -> Expression:
    """``key=value`` in the schema's order, what is not required left out freely, with separators only between."""
    first: Expression = NOTHING
    later: Expression = NOTHING
    for key, declared in reversed(_properties(parameters).items()):
        value = _literal_value(dialect, key, declared, parameters, tool)
        begins, goes_on = (
            sequence([lead, f"{key}{dialect.assign}", *value, later]) for lead in ("", dialect.separator)
        )
        if _is_required(parameters, key):
            first, later = begins, goes_on
        else:
            first, later = choice([begins, first]), choice([goes_on, later])
    return first


def _literal_value(
    dialect: Literals, key: str, declared: Any, root: Mapping[str, Any], tool: Tool
) -> _Pieces:
    types = schema.parameter_types(root, key)
    if _has_values(declared):
        spelled = (draw_literals(dialect, json.dumps({"": v})) for v in _values(declared))
        return [choice(sequence([text.removeprefix(dialect.assign)]) for text in spelled)]
    if dialect.verbatim and schema.is_string(types):
        return [dialect.quote, Until(dialect.quote, _pattern(tool, key, declared, root))]
    words = [w for w, t in zip(dialect.words, ("boolean", "boolean", "null"), strict=True) if t in types]
    if words and types <= {"boolean", "null"}:
        return [choice(sequence([word]) for word in words)]
    return [Json(_with_definitions(declared, root))]


def _pattern(tool: Tool, key: str, declared: Any, root: Mapping[str, Any]) -> str:
    if isinstance(declared, Mapping) and "$ref" in declared:
        declared = schema.resolve(declared["$ref"], root)
    return enforceable.pattern_of_text(
        declared, f"{tool.schema_at}.properties.{key}", strict=bool(tool.strict)
    )


def _properties(parameters: Mapping[str, Any]) -> dict[str, Any]:
    properties = parameters.get("properties")
    return dict(properties) if isinstance(properties, Mapping) else {}


def _is_required(parameters: Mapping[str, Any], key: str) -> bool:
    required = parameters.get("required")
    return isinstance(required, list) and key in required


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
