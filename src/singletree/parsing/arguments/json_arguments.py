"""Reads arguments, or whole calls, that are written as JSON.

RFC 8259, strictly: no comments, no trailing commas, no control characters inside strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import IntEnum

from singletree.parsing.arguments import LONGEST_VALUE, Coded, FindBreak, MakeReader, Sink, coercion
from singletree.parsing.family import Form
from singletree.parsing.patterns import Pattern

_STRING_BREAK = re.compile(f"[{coercion.UNLIKE_JSON}]")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \t\n\r]*")
_ATOM = re.compile(r"[-+.\w]*")
_WORDS = ("true", "false", "null")
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")


class _At(IntEnum):
    """What may come next: the state of the scanner."""

    STRING = 0
    ESCAPE = 1
    UNICODE = 2
    ATOM = 3
    VALUE = 4
    FIRST_ITEM = 5
    FIRST_KEY = 6
    KEY = 7
    COLON = 8
    AFTER = 9


class JsonScanner:
    """Scanner of one JSON object or array.

    Attributes:
        done: whether the value has closed.
        broken: whether the text is not valid JSON.
    """

    __slots__ = ("_at", "_atom", "_hex", "_in_key", "_stack", "broken", "done")

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._at = _At.VALUE
        self._stack: list[str] = []
        self._in_key = False
        self._atom: list[str] = []
        self._hex = 0

    @property
    def in_string(self) -> bool:
        """Return whether the text so far ends inside a string, and not inside an escape."""
        return self._at is _At.STRING

    def scan(self, text: str, position: int = 0) -> int:
        """Read ``text`` from ``position`` on; return the position after the value, or of the error."""
        length = len(text)
        while position < length:
            if self._at is _At.STRING:
                position = _PLAIN.match(text, position).end()  # type: ignore[union-attr]
                if position == length:
                    break
                position = self._string_character(text, position)
            elif self._at is _At.ATOM:
                start, position = position, _ATOM.match(text, position).end()  # type: ignore[union-attr]
                self._atom.append(text[start:position])
                if position < length:
                    self._end_atom()
            elif self._at <= _At.UNICODE:
                self._escaped(text[position])
                position += 1
            else:
                position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
                if position == length:
                    break
                position = self._punctuation(text[position], position)
            if self.done or self.broken:
                break
        return position

    def _string_character(self, text: str, position: int) -> int:
        character = text[position]
        if character == '"':
            self._at = _At.COLON if self._in_key else _At.AFTER
        elif character == "\\":
            self._at = _At.ESCAPE
        else:
            self.broken = True
            return position
        return position + 1

    def _escaped(self, character: str) -> None:
        if self._at is _At.ESCAPE:
            self.broken = character not in _ESCAPES
            self._at, self._hex = (_At.UNICODE, 4) if character == "u" else (_At.STRING, 0)
            return
        self.broken = character not in _HEX
        self._hex -= 1
        if not self._hex:
            self._at = _At.STRING

    def _end_atom(self) -> None:
        atom = "".join(self._atom)
        self.broken = atom not in _WORDS and coercion.NUMBER.match(atom) is None
        self._atom, self._at = [], _At.AFTER

    def _punctuation(self, character: str, position: int) -> int:
        at = self._at
        if at is _At.AFTER:
            self._after(character)
        elif at is _At.COLON:
            self.broken = character != ":"
            self._at = _At.VALUE
        elif not self._stack and character not in "{[":
            self.broken = True
        elif character == '"':
            self._in_key = at in (_At.KEY, _At.FIRST_KEY)
            self._at = _At.STRING
        elif at is _At.KEY:
            self.broken = True
        elif at is _At.FIRST_KEY:
            self._close(character, "}")
        elif at is _At.FIRST_ITEM and character == "]":
            self._close(character, "]")
        elif character in "{[":
            self._stack.append("}" if character == "{" else "]")
            self._at = _At.FIRST_KEY if character == "{" else _At.FIRST_ITEM
        elif character in "-0123456789tfn":
            self._at = _At.ATOM
            return position
        else:
            self.broken = True
        return position if self.broken else position + 1

    def _after(self, character: str) -> None:
        if character == ",":
            self._at = _At.KEY if self._stack[-1] == "}" else _At.VALUE
        else:
            self._close(character, self._stack[-1])

    def _close(self, character: str, closer: str) -> None:
        if character != closer:
            self.broken = True
            return
        self._stack.pop()
        self._at = _At.AFTER
        self.done = not self._stack


def compile_arguments(
    form: Form, end: str, closers: Sequence[str], pair_closers: Sequence[Pattern], coded: Coded
) -> MakeReader:
    """Return what makes a reader of an object: JSON is the same in each form."""
    return lambda schema: JsonArguments()


class JsonArguments:
    """Reader of one JSON object, which is passed on as the model's own bytes; of nothing, it is an empty one."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()
        self._begun = False

    @property
    def find_break(self) -> FindBreak | None:
        return _STRING_BREAK.search if self._scanner.in_string else None

    def feed(self, text: str, position: int, sink: Sink) -> int:
        scanner = self._scanner
        if not self._begun and text[position] != "{":
            sink.delta("{}", "")
            sink.end()
            return position
        self._begun = True
        end = scanner.scan(text, position)
        piece = text if position == 0 and end == len(text) else text[position:end]
        if scanner.broken:
            sink.broken(piece)
        else:
            sink.delta(piece, piece)
            if scanner.done:
                sink.end()
        return end

    def close(self) -> str:
        return ""


class JsonCall:
    """Reader of a whole call as one JSON object, for keys in an unusual order or with unusual values.

    The object is held until it has closed, because its name may be its last member. ``arguments`` may be an object, a
    string that contains one, null or missing; with anything else the object is not a call.

    Args:
        opener: raw text of the markup before the object.
    """

    find_break = None
    _NAMES = ("name", "tool_name", "function")
    _ARGUMENTS = ("arguments", "parameters", "args")

    def __init__(self, opener: str) -> None:
        self._scanner = JsonScanner()
        self._opener = opener
        self._pieces: list[str] = []
        self._length = 0

    def feed(self, text: str, position: int, sink: Sink) -> int:
        end = self._scanner.scan(text, position)
        self._pieces.append(text[position:end])
        self._length += end - position
        if self._scanner.broken or self._length > LONGEST_VALUE:
            sink.broken(self.close())
        elif self._scanner.done:
            self._emit_call(sink)
        return end

    def close(self) -> str:
        held = self._opener + "".join(self._pieces)
        self._opener, self._pieces = "", []
        return held

    def _emit_call(self, sink: Sink) -> None:
        source = "".join(self._pieces)
        raw = self.close()
        spans = _members(source)
        name = next((v for k in self._NAMES if (v := _value(spans.get(k)))), "")
        arguments = _arguments(next((spans[k] for k in self._ARGUMENTS if k in spans), "null"))
        if not name or arguments is None:
            sink.broken(raw)
            return
        sink.start(name, _value(spans.get("id") or spans.get("tool_call_id")), raw)
        sink.delta(arguments, "")
        sink.end()


def _members(source: str) -> dict[str, str]:
    """Return the members of a JSON object, each value as the text in which it was written."""
    decoder = json.JSONDecoder()
    members: dict[str, str] = {}
    at = _skip(source, 1)
    try:
        while source[at] == '"':
            key, at = decoder.raw_decode(source, at)
            start = _skip(source, _skip(source, at) + 1)
            _, at = decoder.raw_decode(source, start)
            members[key] = source[start:at]
            at = _skip(source, at)
            at = _skip(source, at + 1) if source[at] == "," else at
    except (ValueError, RecursionError):
        return {}
    return members


def _skip(source: str, at: int) -> int:
    return _SPACE.match(source, at).end()  # type: ignore[union-attr]


def string_of(text: str) -> str:
    """Return the string that JSON writes as ``text`` between quotes; empty if none, or if a special token is in it."""
    try:
        text.encode()  # the code of a token is half a surrogate pair
        string: str = json.loads(f'"{text}"')
    except ValueError:
        return ""
    return string


def _value(text: str | None) -> str:
    return string_of(text[1:-1]) if text is not None and text.startswith('"') else ""


_ESCAPED = re.compile(r"\\(?:(u[dD][89a-fA-F])|.)")


def _arguments(text: str) -> str | None:
    if text.startswith('"'):
        # Surrogates are escapes in the object, too: alone, none is a character.
        text = json.loads(_ESCAPED.sub(lambda m: f"\\{m[0]}" if m[1] else m[0], text)).strip() or "{}"
    if text == "null":
        return "{}"
    return text if text.startswith("{") and coercion.is_json(text) else None
