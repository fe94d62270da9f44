"""Scans one JSON value as it arrives: finds its end, and whether it is valid JSON.

RFC 8259, strictly: no comments, no trailing commas, no control characters inside strings.
"""

from __future__ import annotations

import re
from enum import IntEnum

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \t\n\r]*")
_ATOM = re.compile(r"[-+.\w]*")
_ATOM_DONE = re.compile(r"(?:true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)\Z")
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
                found = _ATOM.match(text, position)
                assert found is not None
                self._atom.append(found.group())
                position = found.end()
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
        self.broken = _ATOM_DONE.match("".join(self._atom)) is None
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
