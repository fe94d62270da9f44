"""Arguments written as literals of a programming language, to JSON as they arrive.

Python's literals (https://docs.python.org/3/reference/lexical_analysis.html) and JSON's are both read, whatever the
dialect draws: models mix them. Strings leave as they are decoded; memory does not grow with them.
"""

from __future__ import annotations

import re
from enum import IntEnum

from singletree.parsing import schema
from singletree.parsing.arguments import Sink
from singletree.parsing.family import Literals

_SPACE = re.compile(r"\s*")
_ATOM = re.compile(r"[^\s,:=\[\](){}\"']+")
_PHRASE = re.compile(r"[^,\[\](){}]+")
_ESCAPE = re.compile(
    r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([0-7]{1,3})|(.))", re.DOTALL
)
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|x[0-9a-fA-F]?|[0-7]{1,2})?\Z")
_PLAIN_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "/": "/",
                  "\\": "\\", "'": "'", '"': '"'}  # fmt: skip
_WORDS = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?\Z")
_LOOSE_NUMBER = re.compile(r"[-+]?[0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9]+)?\Z")
_CLOSERS = {"[": "]", "{": "}", "(": ")"}
_QUOTES = ('"', "'")
_LONGEST_ATOM = 4096


class _At(IntEnum):
    """What may come next."""

    KEY = 0
    ASSIGN = 1
    VALUE = 2
    AFTER = 3
    STRING = 4


class LiteralArguments:
    """A run of ``key=value`` up to ``close``, told as one JSON object."""

    def __init__(self, dialect: Literals, quote: str, close: str) -> None:
        self._dialect = dialect
        self._verbatim = quote if dialect.verbatim else ""
        self._stack = [close]
        self._at = _At.KEY
        self._quote = ""
        self._is_key = False
        self._fresh = True
        self._out: list[str] = ["{"]
        self._broken = False

    def feed(self, text: str, position: int, sink: Sink) -> int:
        """See ``arguments.Codec``."""
        start = position
        while position < len(text) and self._stack and not self._broken:
            step = self._string if self._at is _At.STRING else self._between
            moved = step(text, position)
            if moved < 0:
                break
            position = moved
        if self._broken:
            sink.broken(text[start:position])
            return position
        if position > start:
            sink.delta("".join(self._out), text[start:position])
            self._out = []
        if not self._stack:
            sink.end()
            return position
        return sink.hold(text, position) if position < len(text) else position

    def close(self) -> str:
        """See ``arguments.Codec``."""
        return ""

    def _between(self, text: str, position: int) -> int:
        """One step outside strings; negative when more text must come first."""
        found = _SPACE.match(text, position)
        if found is not None and found.end() > position:
            return found.end()
        if self._at is _At.KEY:
            return self._key(text, position)
        if self._at is _At.ASSIGN:
            return self._assign(text[position], position)
        if self._at is _At.VALUE:
            return self._value(text, position)
        return self._after(text[position], position)

    def _key(self, text: str, position: int) -> int:
        if text[position] == self._stack[-1]:
            return self._pop(position)
        opened = self._opens_string(text, position)
        if opened:
            return self._begin_string(text, position, is_key=True) if opened > 0 else -1
        found = _ATOM.match(text, position)
        if found is None:
            return self._break(position)
        if found.end() == len(text):
            return self._wait(found.end() - position, position)
        bare = len(self._stack) == 1 or self._dialect.bare_keys or _NUMBER.match(found.group())
        if not bare:
            return self._break(position)
        self._say_next(schema.quoted(found.group()) + ": ")
        self._at = _At.ASSIGN
        return found.end()

    def _assign(self, character: str, position: int) -> int:
        wanted = self._dialect.assign if len(self._stack) == 1 else ":"
        if character != wanted:
            return self._break(position)
        self._at, self._fresh = _At.VALUE, True
        return position + 1

    def _value(self, text: str, position: int) -> int:
        character = text[position]
        if character == self._stack[-1] and character in ")]" and len(self._stack) > 1:
            return self._pop(position)
        opened = self._opens_string(text, position)
        if opened:
            return self._begin_string(text, position, is_key=False) if opened > 0 else -1
        if character in _CLOSERS:
            self._say_next("{" if character == "{" else "[")
            self._stack.append(_CLOSERS[character])
            self._at, self._fresh = (_At.KEY if character == "{" else _At.VALUE), True
            return position + 1
        return self._atom(text, position)

    def _atom(self, text: str, position: int) -> int:
        found = (_PHRASE if self._dialect.bare_words else _ATOM).match(text, position)
        if found is None:
            return self._break(position)
        if found.end() == len(text):
            return self._wait(found.end() - position, position)
        spelled = _literal(found.group().strip(), self._dialect.bare_words)
        if spelled is None:
            return self._break(position)
        self._say_next(spelled)
        self._at = _At.AFTER
        return found.end()

    def _after(self, character: str, position: int) -> int:
        if character == self._stack[-1]:
            return self._pop(position)
        if character != ",":
            return self._break(position)
        in_object = len(self._stack) == 1 or self._stack[-1] == "}"
        self._at = _At.KEY if in_object else _At.VALUE
        return position + 1

    def _pop(self, position: int) -> int:
        closer = self._stack.pop()
        self._out.append("}" if closer == "}" or not self._stack else "]")
        self._at, self._fresh = _At.AFTER, False
        return position + 1

    def _say_next(self, json_text: str) -> None:
        """One more member or item; the comma before it waits until then, since a trailing one means nothing."""
        self._out.append(json_text if self._fresh else ", " + json_text)
        self._fresh = False

    def _opens_string(self, text: str, position: int) -> int:
        """1 when a string opens here, -1 when more text would tell, 0 when none does."""
        if self._verbatim and text.startswith(self._verbatim, position):
            return 1
        if self._verbatim and self._verbatim.startswith(text[position:]):
            return -1
        mark = text[position]
        if mark not in _QUOTES:
            return 0
        rest = text[position : position + 3]
        return -1 if len(rest) < 3 and rest == mark * len(rest) else 1

    def _begin_string(self, text: str, position: int, *, is_key: bool) -> int:
        mark = text[position]
        if self._verbatim and text.startswith(self._verbatim, position):
            mark = self._verbatim
        elif text.startswith(mark * 3, position):
            mark *= 3
        self._quote, self._is_key, self._at = mark, is_key, _At.STRING
        self._say_next('"')
        return position + len(mark)

    def _string(self, text: str, position: int) -> int:
        quote = self._quote
        end = text.find(quote, position)
        if quote == self._verbatim:
            stop = end if end >= 0 else _before_prefix(text, position, quote)
        else:
            escape = text.find("\\", position, end if end >= 0 else len(text))
            if escape == position:
                return self._escaped(text, position)
            stop = escape if escape >= 0 else end if end >= 0 else _before_prefix(text, position, quote)
        if stop > position:
            self._out.append(schema.quoted(text[position:stop])[1:-1])
            return stop
        if end != position:
            return -1
        self._out.append('": ' if self._is_key else '"')
        self._at = _At.ASSIGN if self._is_key else _At.AFTER
        return position + len(quote)

    def _escaped(self, text: str, position: int) -> int:
        if _CUT_ESCAPE.match(text, position):
            return -1
        found = _ESCAPE.match(text, position)
        if found is None:
            return self._break(position)
        self._out.append(_decoded(found))
        return found.end()

    def _wait(self, length: int, position: int) -> int:
        return -1 if length < _LONGEST_ATOM else self._break(position)

    def _break(self, position: int) -> int:
        self._broken = True
        return position


def _before_prefix(text: str, position: int, quote: str) -> int:
    """Where at the end of ``text`` a cut ``quote`` may begin."""
    for length in range(min(len(quote) - 1, len(text) - position), 0, -1):
        if quote.startswith(text[-length:]):
            return len(text) - length
    return len(text)


def _decoded(found: re.Match[str]) -> str:
    """An escape as the inside of a JSON string."""
    short, long, byte, octal, other = found.groups()
    if other is not None:
        return schema.quoted(_PLAIN_ESCAPES.get(other, "\\" + other))[1:-1]
    code = int(octal, 8) if octal else int(short or long or byte, 16)
    if 0xD800 <= code <= 0xDFFF:
        return f"\\u{code:04x}"
    return schema.quoted(chr(code) if code <= 0x10FFFF else found.group())[1:-1]


def _literal(word: str, bare_words: bool) -> str | None:
    """A word as JSON; None when it is no literal."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.match(word):
        return word
    if _LOOSE_NUMBER.match(word) and any(c.isdigit() for c in word):
        return _number(word.replace("_", "").lstrip("+"))
    return schema.quoted(word) if bare_words and word else None


def _number(word: str) -> str | None:
    """Python's number in JSON's spelling, its digits kept: no leading zeros, digits on both sides of a point."""
    sign, digits = ("-", word[1:]) if word.startswith("-") else ("", word)
    whole, point, rest = digits.partition(".")
    if point:
        rest = rest if rest[:1].isdigit() else "0" + rest
    spelled = f"{sign}{whole.lstrip('0') or '0'}{point}{rest}"
    return spelled if _NUMBER.match(spelled) else None
