"""Converts expressions to LLGuidance's dialect of Lark, for llama.cpp and vLLM's ``guidance`` backend.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. A marker that is a special token of the vocabulary
is written as its id: LLGuidance never produces such a token from text, and the parser accepts it only as that token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from singletree.parsing.constraints import ebnf
from singletree.parsing.constraints.expression import (
    NOTHING,
    Expression,
    Grammar,
    Json,
    Literal,
    OneOf,
    Prose,
    Regex,
    Repeat,
    Sequence,
    Until,
    pattern_of,
)

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
                nested = definition if syntax == "lark" else ebnf.to_lark(definition)
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
        """Yield ``text`` in pieces, each with the id of its special token or None for plain text."""
        end = 0
        for found in self._special.finditer(text):
            if found.start() > end:
                yield text[end : found.start()], None
            yield found[0], self._tokens[found[0]]
            end = found.end()
        if end < len(text):
            yield text[end:], None

    def _literal(self, text: str) -> str:
        return " ".join(_quote(t) if id is None else f"<[{id}]>" for t, id in self._pieces(text)) or '""'

    def _until(self, stop: str, without: Iterable[str], text: str = _ANY) -> str:
        """Return ``text`` up to ``stop``. Text never contains a special token, so such a stop needs no lazy match."""
        (head, id), *rest = self._pieces(stop)
        behind = self._literal("".join(each for each, _ in rest)) if rest else ""
        if id is not None:
            return f"{self._terminal(text, without)} <[{id}]> {behind}".rstrip()
        terminal = self._terminal(text, without, f" {_quote(head)}")
        return f"{terminal} {behind}" if rest else self._rule("until", terminal, "[lazy]")

    def _terminal(self, text: str, without: Iterable[str], tail: str = "") -> str:
        """Return a terminal: ``text`` without certain texts, then ``tail``. It never contains special tokens."""
        banned = "|".join(
            _slashed(pattern_of(t)) for t in dict.fromkeys(without) if not self._special.search(t)
        )
        besides = f" & ~/(?s:.*)({banned})(?s:.*)/" if banned else ""
        return self._rule("TEXT", f"({text}{besides}){tail}")

    def _json(self, schema: Any) -> str:
        held = {**schema, "x-guidance": self._white_space} if isinstance(schema, Mapping) else schema
        return json.dumps(held, ensure_ascii=False)

    def _prose(self, prose: Prose) -> str:
        stops = [marker for marker, _ in (*prose.markers, *prose.last)]
        again = [f"{self._until(m, prose.without)} {self.write(what)}" for m, what in prose.markers]
        last = [f"{self._until(m, prose.without)} {self.write(what)}" for m, what in prose.last]
        end = self._rule("end", " | ".join([self._terminal(_ANY, (*prose.without, *stops)), *last]))
        return f"({self._rule('marked', ' | '.join(again))})* {end}" if again else end


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashed(pattern: str) -> str:
    return re.sub(r"(?<!\\)/", r"\/", pattern).replace("\n", r"\n")
