"""Constraints as expression trees, and their notations: LLGuidance's Lark and XGrammar's structural tags.

``lark``, for llama.cpp and vLLM's ``guidance`` backend: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
A marker that is a special token of the vocabulary is written as its id: LLGuidance never produces such a token from
text, and the parser accepts it only as that token.

``structural_tag``, for vLLM and SGLang: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html; checked with
XGrammar 0.2.8. Markers are written as text; XGrammar lets the model write them with its special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from typing import Literal as Literal_

from singletree.constraints.enforceable import FORMATS, subschemas
from singletree.constraints.grammars import to_ebnf, to_lark
from singletree.parsing.arguments.coercion import quoted


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Until:
    """Any text up to and including the first ``stop``; with a ``pattern``, a text that it matches as a whole."""

    stop: str
    pattern: str = ""


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that the pattern matches as a whole. Only syntax that every engine has: no look-around, no anchors."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Json:
    """A JSON value that fits the schema."""

    schema: Any


@dataclass(frozen=True, slots=True)
class Grammar:
    """A text of a grammar that the client sent, from its rule ``start`` (``lark``) or ``root`` (``ebnf``) on."""

    definition: str
    syntax: Literal_["lark", "ebnf"] = "lark"


@dataclass(frozen=True, slots=True)
class Sequence:
    """Expressions one after the other; without items, the empty text."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of several expressions."""

    ways: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """An expression any number of times, zero included."""

    item: Expression


@dataclass(frozen=True, slots=True)
class Prose:
    """Any text, in which an expression must follow certain markers.

    Attributes:
        markers: (marker, expression that must follow it); more text may come after that.
        last: the same, but the text ends after the expression.
        without: texts that must not occur outside these expressions.
    """

    markers: tuple[tuple[str, Expression], ...] = ()
    last: tuple[tuple[str, Expression], ...] = ()
    without: tuple[str, ...] = ()


Expression = Literal | Until | Regex | Json | Grammar | Sequence | OneOf | Repeat | Prose
NOTHING = Sequence(())


_SYNTAX = re.compile(r"[.^$*+?{}\[\]\\|()]")


class NotExpressible(Exception):
    """A notation cannot express a part of an expression; the message names the part."""


def sequence(items: Iterable[Expression | str]) -> Expression:
    """Return expressions one after the other; plain text is a literal. Adjacent literals are joined.

    LLGuidance's lexer takes the longest literal and never goes back, so a short literal that starts like another one
    (a line break before the next call, or before the closer) must not stand alone.
    """
    flat: list[Expression] = []
    for item in items:
        for part in item.items if isinstance(item, Sequence) else (item,):
            one = Literal(part) if isinstance(part, str) else part
            if isinstance(one, Literal) and flat and isinstance(flat[-1], Literal):
                flat[-1] = Literal(flat[-1].text + one.text)
            elif one != Literal(""):
                flat.append(one)
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def one_of(ways: Iterable[Expression]) -> Expression:
    """Return a choice of one of several expressions."""
    each = tuple(ways)
    return each[0] if len(each) == 1 else OneOf(each)


def optional(item: Expression) -> Expression:
    """Return a choice of ``item`` or the empty text."""
    return OneOf((item, NOTHING))


def pattern_of(text: str) -> str:
    """Return a pattern that matches only ``text``. Little is escaped: some engines read ``\\<`` as a word start."""
    return _SYNTAX.sub(r"\\\g<0>", text)


_ANY = "/(?s:.*)/"
_COMPACT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
"""White space is fixed: a small model that may indent freely may not stop. LLGuidance reads ``oneOf`` as ``anyOf``."""
_ANY_WHITE_SPACE = {"whitespace_pattern": r"[ \n\t\r]*", "coerce_one_of": True}


def lark(
    expression: Expression,
    tokens: Mapping[str, int] | None = None,
    stop_token_ids: Iterable[int] = (),
    *,
    any_white_space: bool = False,
) -> str:
    """Return the text of the grammar.

    Args:
        expression: the constraint.
        tokens: the special tokens that its markers contain: text -> id.
        stop_token_ids: the tokens that end a turn. Without them LLGuidance lets a turn end with one stop token only,
            which in llama.cpp is not always the one that the model has learned.
        any_white_space: whether JSON may have any white space, to accept what another engine generated.
    """
    writer = _Writer(tokens or {}, _ANY_WHITE_SPACE if any_white_space else _COMPACT)
    start = writer.write(expression)
    stops = ",".join(map(str, sorted(stop_token_ids)))
    end = f" (<[{stops}]>)?" if stops else ""
    return "\n".join(["%llguidance {}", f"start: {start}{end}", *writer.lines]) + "\n"


class _Writer:
    def __init__(self, tokens: Mapping[str, int], white_space: Mapping[str, Any]) -> None:
        self.lines: list[str] = []
        self._white_space = white_space
        self._names: dict[tuple[str, str, str], str] = {}
        self._tokens = tokens
        longest_first = sorted(tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def write(self, expression: Expression) -> str:
        match expression:
            case Literal(text):
                return self._literal(text)
            case Until(stop, pattern):
                return self._until(stop, (), f"/{_slashed(pattern)}/" if pattern else _ANY)
            case Regex(pattern):
                return f"/{_slashed(pattern)}/"
            case Json(schema):
                return self._rule("json", "%json " + self._json(schema))
            case Grammar(definition, syntax):
                nested = definition if syntax == "lark" else to_lark(definition)
                return self._rule("grammar", f"%lark {{\n{nested}\n}}")
            case Sequence(items):
                return " ".join(map(self.write, items)) or '""'
            case OneOf((item, other)) if other == NOTHING:
                return f"({self.write(item)})?"
            case OneOf(ways):
                return self._rule("choice", " | ".join(map(self.write, ways)))
            case Repeat(item):
                return f"({self.write(item)})*"
            case Prose():
                return self._prose(expression)

    def _rule(self, kind: str, body: str, attributes: str = "") -> str:
        """Return the name of a rule. An equal rule is used again, so that its text is one lexeme."""
        name = self._names.get((kind, attributes, body))
        if name is None:
            name = self._names[kind, attributes, body] = f"{kind}_{len(self.lines)}"
            self.lines.append(f"{name}{attributes}: {body}")
        return name

    def _pieces(self, text: str) -> Iterator[tuple[str, int | None]]:
        end = 0
        for found in self._special.finditer(text):
            if found.start() > end:
                yield text[end : found.start()], None
            yield found[0], self._tokens[found[0]]
            end = found.end()
        if end < len(text):
            yield text[end:], None

    def _literal(self, text: str) -> str:
        return " ".join(quoted(t) if id is None else f"<[{id}]>" for t, id in self._pieces(text)) or '""'

    def _until(self, stop: str, without: Iterable[str], text: str = _ANY) -> str:
        """Return ``text`` up to ``stop``. Text never contains a special token, so such a stop needs no lazy match."""
        (head, id), *rest = self._pieces(stop)
        behind = self._literal("".join(each for each, _ in rest)) if rest else ""
        if id is not None:
            return f"{self._terminal(text, without)} <[{id}]> {behind}".rstrip()
        terminal = self._terminal(text, without, f" {quoted(head)}")
        return f"{terminal} {behind}" if rest else self._rule("until", terminal, "[lazy]")

    def _terminal(self, text: str, without: Iterable[str], tail: str = "") -> str:
        """Return a terminal: ``text`` without certain texts, then ``tail``. It never contains special tokens."""
        written = [text for text in dict.fromkeys(without) if not self._special.search(text)]
        banned = "|".join(_slashed(pattern_of(text)) for text in written)
        besides = f" & ~/(?s:.*)({banned})(?s:.*)/" if banned else ""
        return self._rule("TEXT", f"({text}{besides}){tail}")

    def _json(self, schema: Any) -> str:
        held = {**schema, "x-guidance": self._white_space} if isinstance(schema, Mapping) else schema
        return json.dumps(held, ensure_ascii=False)

    def _prose(self, prose: Prose) -> str:
        stops = [marker for marker, _ in (*prose.markers, *prose.last)]
        again, last = (
            [f"{self._until(marker, prose.without)} {self.write(what)}" for marker, what in marked]
            for marked in (prose.markers, prose.last)
        )
        end = self._rule("end", " | ".join([self._terminal(_ANY, (*prose.without, *stops)), *last]))
        return f"({self._rule('marked', ' | '.join(again))})* {end}" if again else end


def _slashed(pattern: str) -> str:
    return re.sub(r"(?<!\\)/", r"\/", pattern).replace("\n", r"\n")


_WHITE_SPACE = 1
"""Maximum white space, in characters, between two JSON tokens: a small model that may indent freely may never stop."""

_IGNORED = {"multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames",
            "patternProperties"}  # fmt: skip
"""Keywords that XGrammar does not enforce, alone or beside others (vLLM refuses them in ``json``, too)."""

_FORMATS = FORMATS - {"unknown"}

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
            completed = _completed(schema)
            return {"type": "json_schema", "json_schema": completed, "max_whitespace_cnt": _WHITE_SPACE}
        case Sequence(items):
            return _format(Literal("")) if not items else _sequence(map(_format, items))
        case OneOf((item, other)) if other == NOTHING:
            return {"type": "optional", "content": _format(item)}
        case OneOf(ways):
            return _either(map(_format, ways))
        case Repeat(item):
            return {"type": "star", "content": _format(item)}
        case Prose():
            return _prose(expression)
        case Grammar(definition, syntax):
            converted = definition if syntax == "ebnf" else to_ebnf(definition)
            if converted is None:
                raise NotExpressible("a grammar in Lark with what XGrammar's EBNF has not")
            return {"type": "grammar", "grammar": converted}


def _sequence(elements: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _either(elements: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


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
    end = _end_of(what)
    return _tag(marker, _format(_without_end(what, len(end)) if end else what), end)


def _end_of(what: Expression) -> str:
    """Return the text that ends each way of ``what``: XGrammar refuses a tag that has free text and no such end."""
    match what:
        case Literal(text):
            return text
        case Sequence((*_, last)):
            return _end_of(last)
        case OneOf(ways):
            ends = sorted(map(_end_of, ways), key=len)
            return ends[0] if all(end.endswith(ends[0]) for end in ends) else ""
    return ""


def _without_end(what: Expression, length: int) -> Expression:
    match what:
        case Literal(text):
            return Literal(text[:-length])
        case Sequence((*items, last)):
            return sequence([*items, _without_end(last, length)])
        case OneOf(ways):
            return OneOf(tuple(_without_end(way, length) for way in ways))
    raise AssertionError(what)


def _prose_with_an_end(prose: Prose) -> dict[str, Any]:
    """Return prose with tags after which the text ends; ``triggered_tags`` ends after all of its tags or after none."""
    stops = [marker for marker, _ in (*prose.markers, *prose.last)]

    def up_to(marker: str, what: Expression) -> dict[str, Any]:
        others = [*prose.without, *(stop for stop in stops if stop != marker)]
        return _sequence([_tag("", _any_text(others), marker), _format(what)])

    again = {"type": "star", "content": _either(up_to(*each) for each in prose.markers)}
    end = _either([_any_text([*prose.without, *stops]), *(up_to(*each) for each in prose.last)])
    return _sequence([again, end])


def _completed(schema: Any) -> Any:
    """Return ``schema`` in the form that XGrammar needs. An object that declares no properties may have any."""
    _check(schema)
    if isinstance(schema, Mapping) and schema.get("type") == "object" and not schema.get("properties"):
        return {"additionalProperties": True, **schema}
    return schema


def _check(schema: Any) -> None:
    # XGrammar ignores these silently; vllm/v1/structured_output/backend_xgrammar.py lists them.
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
