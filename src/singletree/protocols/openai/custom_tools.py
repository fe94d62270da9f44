"""Custom tools: the client gets one free-form string, the model sees a function with one string argument.

https://platform.openai.com/docs/guides/function-calling#custom-tools. Chat Completions has them too.
``InputText`` extracts the string from the arguments while they are still being written, so that a patch
streams as raw text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from singletree.conversation import Tool
from singletree.protocols import limits, wire

_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
_SYNTAX = {"lark": "Lark grammar", "regex": "regular expression"}

_OPENER = '{"input":"'
_MAX_OPENER_LENGTH = 100  # a few line breaks and an indent; endless white space is not buffered forever
_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Plain characters (raw control characters too: models write them) and whole escapes. A `\u` that can
# no longer become an escape is plain text. What remains is the closing quote or an unfinished escape.
_WHOLE = re.compile(r'(?>(?:[^"\\]++|\\(?:u[0-9a-fA-F]{4}|[^u]|u(?![0-9a-fA-F]{0,3}\Z)))*)')
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_PLAIN = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "/": "/", "\\": "\\"}
_SURROGATE = re.compile("[\ud800-\udfff]")


def custom_tool(
    name: str, description: str | None, grammar: tuple[str, str] | None, at: str, *, grammar_at: str
) -> Tool:
    """Return a custom tool as the model sees it.

    ``grammar`` is the syntax (``lark`` or ``regex``) and the definition at ``grammar_at``; None for free text.
    """
    how, extra = "Call it with one argument, `input`: the text itself.", None
    if grammar is not None:
        syntax, definition = grammar
        limits.check_grammar(syntax, definition, grammar_at)
        how += f" It must match this {_SYNTAX[syntax]}:\n{definition}"
        extra = {"grammar": {"syntax": syntax, "definition": definition}}
    return Tool(
        name,
        f"{description}\n\n{how}" if description else how,
        _PARAMETERS,
        kind="custom",
        extra=extra,
        grammar=grammar,
        schema_at=f"{at}.parameters",
    )


def to_arguments(text: str) -> str:
    """Return the arguments, as JSON text, of a custom call with the input ``text``; the model's own text is lost."""
    return json.dumps({"input": text}, ensure_ascii=False)


def to_input(arguments: str, *, complete: bool) -> str:
    """Return the input of a custom call with these arguments: the output of ``InputText`` in one piece."""
    reader = InputText()
    return reader.feed(arguments) + reader.close(arguments, complete=complete)


class InputText:
    """Extract the string from ``{"input": "…"}`` incrementally.

    Arguments of any other form are buffered until ``close``, which returns their likeliest input.
    """

    def __init__(self) -> None:
        self._buffer = ""  # the opener so far; then an unfinished escape
        self._high = ""  # a high surrogate that waits for the low one
        self._read = self._opener

    def feed(self, piece: str) -> str:
        return self._read(piece)

    def close(self, arguments: str, *, complete: bool) -> str:
        """Return the rest of the text; ``arguments`` is everything fed, ``complete`` whether the call is complete."""
        if self._read in (self._string, self._nothing):
            return "\ufffd" if self._high else ""
        if complete:
            return _other_form(arguments)
        return "" if self._read == self._opener else arguments

    def _opener(self, piece: str) -> str:
        self._buffer += piece
        if found := _OPENING.match(self._buffer):
            rest, self._buffer = self._buffer[found.end() :], ""
            self._read = self._string
            return self._string(rest)
        if len(self._buffer) > _MAX_OPENER_LENGTH or not _OPENER.startswith("".join(self._buffer.split())):
            self._buffer, self._read = "", self._another_form
        return ""

    def _string(self, piece: str) -> str:
        raw = self._buffer + piece
        found = _WHOLE.match(raw)
        end = found.end() if found else 0
        self._buffer = raw[end:]
        if self._buffer.startswith('"'):
            self._read = self._nothing
        text = self._high + (_ESCAPE.sub(_unescape, raw[:end]) if "\\" in raw else raw[:end])
        self._high = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
        text = text[: len(text) - len(self._high)]
        return wire.encodable(text) if _SURROGATE.search(text) else text

    def _another_form(self, piece: str) -> str:
        return ""

    def _nothing(self, piece: str) -> str:
        return ""


def _unescape(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 16)) if escape[1] else _PLAIN.get(escape[2], escape[0])


def _other_form(arguments: str) -> str:
    """Return the input of complete arguments in another form: their ``input``, the string they are, or their text."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return arguments
    if isinstance(value, dict):
        value = value.get("input")
    return value if isinstance(value, str) else arguments
