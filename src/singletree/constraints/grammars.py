"""Grammars of clients, in EBNF or in Lark: checked, and converted into each other.

EBNF is that of llama.cpp (GBNF, https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md) and of XGrammar
(https://xgrammar.mlc.ai/docs/tutorials/ebnf_guided_generation.html). Lark is that of
https://lark-parser.readthedocs.io/en/stable/grammar.html.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

from singletree.errors import InvalidRequest
from singletree.parsing.arguments.coercion import quoted

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


class _SyntaxError(Exception): ...


def syntax_of(grammar: str) -> Literal["lark", "ebnf"]:
    """Return the notation in which ``grammar`` is written."""
    return "ebnf" if _RULE.search(grammar) else "lark"


def check_ebnf(grammar: str, path: str) -> None:
    """Raise InvalidRequest if the text at ``path`` of the request is not a valid EBNF grammar."""
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
    bodies = (" ".join(_converted(token, names) for token in body) or _NOTHING for body in rules.values())
    return "\n".join(f"{name}: {body}" for name, body in zip(names.values(), bodies, strict=True))


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
    return chr(number) if number <= sys.maxunicode and not 0xD800 <= number <= 0xDFFF else "\ufffd"


def _rules(grammar: str) -> dict[str, list[_Token]]:
    rules: dict[str, list[_Token]] = {}
    body: list[_Token] | None = None
    for token in _tokens(grammar):
        if token.kind == "rule":
            if token.text in rules:
                raise _SyntaxError(f"the rule {token.text!r} is defined twice; rename one")
            body = rules[token.text] = []
        elif body is None:
            found = token.text[:_SHOWN]
            raise _SyntaxError(f"it begins with {found!r}; begin with a rule such as root ::= ...")
        else:
            body.append(token)
    if _ROOT not in rules:
        raise _SyntaxError("there is no rule 'root'; give the first rule this name")
    for name, body in rules.items():
        _check_body(name, body, rules)
        rules[name] = list(_with_empty_alternatives(body))[:-1]  # without the marker of the end
    return rules


def _tokens(grammar: str) -> Iterator[_Token]:
    for found in _scan(_TOKEN, grammar):
        kind = found.lastgroup or ""
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
    empty = _Token("text", _NOTHING)
    ends = [_Token("operator", "|"), *body, _Token("operator", "|")]
    for before, token in pairwise(ends):
        opens = before.kind == "operator" and before.text in "(|"
        closes = token.kind == "operator" and token.text in ")|"
        if opens and closes:
            yield empty
        yield token


_LARK = re.compile(
    r"""
      (?P<rule>^[ \t]*[?!]*(?P<name>[A-Za-z_]\w*)[ \t]*:)
    | (?P<imported>^%import[ \t]+common\.(?P<terminal>\w+)[ \t]*$)
    | (?P<space>[ \t\r\n] | //[^\n]* | ->[ \t]*\w+)
    | "(?P<low>[A-Za-z0-9])"\.\."(?P<high>[A-Za-z0-9])"
    | (?P<text>"(?:[^"\\\n]|\\.)*"(?!i))
    | /(?P<pattern>(?:[^/\\\n]|\\.)+)/(?![imslux])
    | (?P<reference>[A-Za-z_]\w*)
    | (?P<times>~[ \t]*(?P<least>\d+)(?:[ \t]*\.\.[ \t]*(?P<most>\d+))?)
    | (?P<operator>[|()*+?\[\]])
    """,
    re.VERBOSE | re.MULTILINE,
)
_OPERATORS = {"[": " (", "]": ")?", "(": " (", "|": " |"}
_COMMON = {
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "LF": r'"\n"',
    "NEWLINE": r'("\r"? "\n")+',
    "WORD": "[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""Terminals of Lark's library."""

_ATOM = re.compile(
    r"""
      (?P<characters>\[(?P<inner>\^?(?:[^\]\\]|\\.)+)\])
    | (?P<group>\((?:\?:|(?!\?)))
    | (?P<operator>[|)] | (?:[*+?] | \{\d+(?:,\d*)?\})(?!\?))
    | (?P<any>\.)
    | \\(?P<escape>.)
    | (?P<character>[^\\^$()\[\]{}*+?|])
    """,
    re.VERBOSE,
)
_CLASSES = {"d": "0-9", "w": "a-zA-Z0-9_", "s": r" \t\f\r\n"}


def to_ebnf(grammar: str) -> str | None:
    """Return a ``grammar`` in Lark as EBNF, with the rule ``root`` for ``start``; None where EBNF cannot express it.

    A terminal of Lark takes the longest text, a rule of EBNF any: nothing that Lark takes is lost.
    """
    try:
        converted = "".join(_from_lark(found) for found in _scan(_LARK, grammar))
        _rules(converted)
    except _SyntaxError:
        return None
    return converted


def _from_lark(found: re.Match[str]) -> str:
    if found["rule"]:
        return f"\n{_ebnf_name(found['name'])} ::="
    if found["imported"]:
        return f"\n{_ebnf_name(found['terminal'])} ::= {_known(_COMMON, found['terminal'])}"
    if found["reference"]:
        return f" {_ebnf_name(found['reference'])}"
    if found["text"]:
        return f" {quoted(_ESCAPE.sub(_unescaped, found['text'][1:-1]))}"
    if found["pattern"]:
        return f" ({''.join(map(_from_pattern, _scan(_ATOM, found['pattern'])))})"
    if found["low"]:
        return f" [{found['low']}-{found['high']}]"
    if found["times"]:
        return f"{{{found['least']},{found['most'] or found['least']}}}"
    return "" if found["space"] else _OPERATORS.get(found[0], found[0])


def _from_pattern(atom: re.Match[str]) -> str:
    escape, character = atom["escape"], atom["character"]
    if atom["characters"]:
        inner = re.sub(r"\\(.)", lambda m: _CLASSES.get(m[1]) or _in_class(_meant(m[1])), atom["inner"])
        return f" [{inner}]"
    if atom["any"]:
        return r" [^\n]"
    if escape and escape.lower() in _CLASSES:
        return f" [{'^' * escape.isupper()}{_CLASSES[escape.lower()]}]"
    if escape or character:
        return f" {quoted(_meant(escape) if escape else character)}"
    return " (" if atom["group"] else atom["operator"]


def _meant(escape: str) -> str:
    """Return the character that an escape of a regular expression stands for."""
    return _known(_CONTROLS, escape) if escape.isalnum() else escape


def _in_class(character: str) -> str:
    return json.dumps(character)[1:-1] if character not in "]-^" else f"\\{character}"


def _known(table: dict[str, str], name: str) -> str:
    if name not in table:
        raise _SyntaxError(f"{name} is not known")
    return table[name]


def _ebnf_name(name: str) -> str:
    return _ROOT if name == "start" else f"lark_{name}"


def _scan(tokens: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(text):
        found = tokens.match(text, at)
        if found is None:
            line = text.count("\n", 0, at) + 1
            raise _SyntaxError(f"line {line} has a syntax error at {text[at : at + _SHOWN]!r}; correct it")
        yield found
        at = found.end()
