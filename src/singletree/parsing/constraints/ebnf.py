"""Checks grammars in the EBNF of llama.cpp (GBNF) and XGrammar, and converts them to Lark.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md, https://xgrammar.mlc.ai/docs/tutorials/ebnf_guided_generation.html.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

from singletree.errors import InvalidRequest

_TOKEN = re.compile(
    r"""
      (?P<space>[ \t\r\n]+ | \#[^\n]*)
    | (?P<text>"(?:[^"\\\n]|\\.)*")
    | (?P<characters>\[(?:[^\]\\\n]|\\.)*\])
    | (?P<rule>(?P<name>[A-Za-z_][A-Za-z0-9_-]*) [ \t]* ::=)
    | (?P<reference>[A-Za-z_][A-Za-z0-9_-]*)
    | (?P<times>\{ [ \t]* \d+ [ \t]* (?:,[ \t]*\d*[ \t]*)? \})
    | (?P<operator>[|()*+?.])
    """,
    re.VERBOSE,
)
_RULE = re.compile(r"^[ \t]*[A-Za-z_][A-Za-z0-9_-]*[ \t]*::=", re.MULTILINE)
_ROOT = "root"
_SHOWN = 24
_NOTHING = '""'


class _Token(NamedTuple):
    kind: str
    text: str


class _SyntaxError(Exception):
    """An error in a grammar; the message describes it."""


def syntax_of(grammar: str) -> Literal["lark", "ebnf"]:
    """Return the notation in which ``grammar`` is written."""
    return "ebnf" if _RULE.search(grammar) else "lark"


def check_ebnf(grammar: str, path: str) -> None:
    """Refuse a text that is not a valid EBNF grammar.

    Args:
        grammar: the text.
        path: its path in the request.

    Raises:
        InvalidRequest: the text is not valid; ``param`` is ``path``.
    """
    try:
        _rules(grammar)
    except _SyntaxError as error:
        raise InvalidRequest(f"{path} is not a valid EBNF grammar: {error}", param=path) from None


def to_lark(grammar: str) -> str:
    """Return a checked ``grammar`` in Lark, with the first rule ``start``.

    Characters become rules and not terminals: a terminal of Lark takes the longest text, a rule of EBNF any.
    """
    rules = _rules(grammar)
    names = {name: "start" if name == _ROOT else f"rule_{i}" for i, name in enumerate(rules)}
    return "\n".join(
        f"{names[name]}: {' '.join(_converted(token, names) for token in body) or _NOTHING}"
        for name, body in rules.items()
    )


def _converted(token: _Token, names: dict[str, str]) -> str:
    if token.kind == "reference":
        return names[token.text]
    if token.kind == "text":
        return json.dumps(_ESCAPE.sub(_unescaped, token.text[1:-1]), ensure_ascii=False)
    if token.kind == "characters":
        inner = re.sub(r"\\.|[/\[&~]", lambda m: m[0] if m[0][0] == "\\" else f"\\{m[0]}", token.text[1:-1])
        return f"/[{inner}]/"
    if token.text == ".":
        return r"/(?s:.)/"
    return token.text


_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code is None:
        return _CONTROLS.get(found[4], found[4])
    number = int(code, 16)
    return chr(number) if number <= sys.maxunicode else "\ufffd"


def _rules(grammar: str) -> dict[str, list[_Token]]:
    rules: dict[str, list[_Token]] = {}
    body: list[_Token] | None = None
    for token in _tokens(grammar):
        if token.kind == "rule":
            if token.text in rules:
                raise _SyntaxError(f"the rule {token.text!r} is defined twice; rename one")
            body = rules[token.text] = []
        elif body is None:
            raise _SyntaxError(
                f"it begins with {token.text[:_SHOWN]!r}; begin with a rule such as root ::= ..."
            )
        else:
            body.append(token)
    if _ROOT not in rules:
        raise _SyntaxError("there is no rule 'root'; give the first rule this name")
    for name, body in rules.items():
        _check_body(name, body, rules)
        rules[name] = list(_with_empty_alternatives(body))[:-1]  # without the marker of the end
    return rules


def _tokens(grammar: str) -> Iterator[_Token]:
    at = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            line = grammar.count("\n", 0, at) + 1
            raise _SyntaxError(f"line {line} has a syntax error at {grammar[at : at + _SHOWN]!r}; correct it")
        at, kind = found.end(), found.lastgroup or ""
        if found["rule"] is not None:
            yield _Token("rule", found["name"])
        elif kind != "space":
            yield _Token(kind, found[0])


def _check_body(name: str, body: list[_Token], rules: dict[str, list[_Token]]) -> None:
    depth = 0
    before = _Token("operator", "|")
    for token in body:
        depth += (token.text == "(") - (token.text == ")") if token.kind == "operator" else 0
        repeats = token.kind == "times" or (token.kind == "operator" and token.text in "*+?")
        if depth < 0:
            break
        if repeats and before.kind == "operator" and before.text in "(|":
            raise _SyntaxError(f"in the rule {name!r} there is nothing before {token.text!r} to repeat")
        if token.kind == "reference" and token.text not in rules:
            raise _SyntaxError(f"the rule {token.text!r}, which {name!r} refers to, is not defined; add it")
        before = token
    if depth:
        raise _SyntaxError(f"in the rule {name!r} the parentheses are not balanced")


def _with_empty_alternatives(body: list[_Token]) -> Iterator[_Token]:
    """Yield the tokens, with an empty text for each alternative that is empty."""
    empty = _Token("text", _NOTHING)
    ends = [_Token("operator", "|"), *body, _Token("operator", "|")]
    for before, token in pairwise(ends):
        opens = before.kind == "operator" and before.text in "(|"
        closes = token.kind == "operator" and token.text in ")|"
        if opens and closes:
            yield empty
        yield token
