"""Custom tools: the client sees one free-form string, the model a function with one string argument.

https://platform.openai.com/docs/guides/function-calling#custom-tools. Chat Completions has them too.
``InputText`` takes the string out of the arguments while they are still being written, so that a patch
streams as raw text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from singletree.protocols import wire

PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}

_SYNTAX = {"lark": "Lark grammar", "regex": "regular expression"}

_OPENER = '{"input":"'
_LONGEST_OPENER = 100  # a few line breaks and an indent; endless white space is not held for ever
_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Plain characters (raw control characters too: models write them) and whole escapes. A `\u` that cannot
# become an escape any more stands for itself: what is left is the closing quote or an escape still open.
_WHOLE = re.compile(r'(?:[^"\\]++|\\(?:u[0-9a-fA-F]{4}|[^u]|u(?![0-9a-fA-F]{0,3}\Z)))*+')
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_PLAIN = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "/": "/", "\\": "\\"}
_SURROGATE = re.compile("[\ud800-\udfff]")


def description(said: str | None, syntax: str | None, definition: str) -> str:
    """What the model is told: the client's words, how to call the tool, and the grammar if there is one.

    ``syntax`` is ``lark`` or ``regex``; None for free text.
    """
    how = "Call it with one argument, `input`: the text itself."
    if syntax is not None:
        how += f" It must match this {_SYNTAX.get(syntax, 'grammar')}:\n{definition}"
    return f"{said}\n\n{how}" if said else how


def to_arguments(text: str) -> str:
    """The arguments, as JSON text, of a custom call whose input is ``text``."""
    return msgspec.json.encode({"input": text}).decode()


def to_input(arguments: str, *, complete: bool) -> str:
    """The input of a custom call that has these arguments: what ``InputText`` gives, in one piece."""
    reader = InputText()
    return reader.feed(arguments) + reader.close(arguments, complete=complete)


class InputText:
    """Reads ``{"input": "…"}`` as it is written and gives the text of the string.

    Arguments of any other form are held back until ``close``, which makes the best of them.
    """

    def __init__(self) -> None:
        self._held = ""  # the opener so far; then an escape that is still open
        self._high = ""  # a high surrogate that waits for the low one
        self._read = self._opener

    def feed(self, piece: str) -> str:
        """Takes more of the arguments; returns the text that they complete."""
        return self._read(piece)

    def close(self, arguments: str, *, complete: bool) -> str:
        """The text not given yet. ``arguments`` is all that was fed, ``complete`` whether it is whole."""
        if self._read in (self._string, self._nothing):
            return "\ufffd" if self._high else ""
        if complete:
            return _other_form(arguments)
        return "" if self._read == self._opener else arguments

    def _opener(self, piece: str) -> str:
        self._held += piece
        if found := _OPENING.match(self._held):
            rest, self._held = self._held[found.end() :], ""
            self._read = self._string
            return self._string(rest)
        if len(self._held) > _LONGEST_OPENER or not _OPENER.startswith("".join(self._held.split())):
            self._held, self._read = "", self._another_form
        return ""

    def _string(self, piece: str) -> str:
        raw = self._held + piece
        found = _WHOLE.match(raw)
        end = found.end() if found else 0
        self._held = raw[end:]
        if self._held.startswith('"'):
            self._read = self._nothing
        text = self._high + (_ESCAPE.sub(_unescaped, raw[:end]) if "\\" in raw else raw[:end])
        self._high = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
        text = text[: len(text) - len(self._high)]
        return wire.encodable(text) if _SURROGATE.search(text) else text

    def _another_form(self, piece: str) -> str:
        return ""

    def _nothing(self, piece: str) -> str:
        return ""


def _unescaped(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 16)) if escape[1] else _PLAIN.get(escape[2], escape[0])


def _other_form(arguments: str) -> str:
    """Whole arguments of another form: their ``input``, the string they are, else they themselves."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return arguments
    if isinstance(value, dict):
        value = value.get("input")
    return value if isinstance(value, str) else arguments
