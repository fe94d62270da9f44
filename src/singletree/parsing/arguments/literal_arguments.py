"""Converts arguments written as literals of a programming language to JSON, as they arrive.

Python's literals (https://docs.python.org/3/reference/lexical_analysis.html) and JSON's are both parsed, whichever the
dialect renders: models mix them. Strings are passed on as they are decoded; memory does not grow with them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any

from singletree.parsing import patterns
from singletree.parsing.arguments import Coded, MakeReader, Sink, coercion
from singletree.parsing.family import Form, Literals
from singletree.parsing.patterns import SPACE, Either, Exact, Match, Pattern, Scalar

_LONGEST_ATOM = 4096
"""Maximum length of a value that is no string, and of the white space behind a string's end, in characters."""
_SPACE = re.compile(r"\s*")
_WORD = r"[^\s,:=\[\](){}\"']"
_ATOM = re.compile(rf"{_WORD}*")
_PHRASE = re.compile(r"[^,\[\](){}]*")
_ESCAPE = re.compile(
    r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([0-7]{1,3})|(.))", re.DOTALL
)
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|x[0-9a-fA-F]?|[0-7]{1,2})?\Z")
_PLAIN_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "/": "/",
                  "\\": "\\", "'": "'", '"': '"'}  # fmt: skip
_WORDS = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_CLOSERS = {"[": "]", "{": "}", "(": ")"}
_QUOTES = ('"', "'")
_FOLLOWERS = ",)]}:"
"""Characters that can follow a string."""
_NEXT = Pattern([SPACE, Exact(","), SPACE, patterns.slot("name"), SPACE, Exact("=")])
"""The argument after a string."""
_NEXT_CALL = Pattern([SPACE, Exact(")"), SPACE, Exact(","), SPACE, patterns.slot("name"), SPACE, Exact("(")])
"""The call after a string that is the last argument."""
_MOST_CLOSERS = 64
"""Behind a string in more brackets than these, the end of the call is not looked for."""
_NESTED = Pattern([Exact("{"), SPACE, Either(tuple(_CLOSERS))])
_FIRST_ITEM = Pattern([Exact("{"), SPACE, Scalar("".join(_QUOTES), _WORD), SPACE, Either((",", "}"))])
"""The beginning of a set: the first item of an object has a colon behind it."""
_STRING_BREAKS = {mark: re.compile(rf"{mark}|\\") for quote in _QUOTES for mark in (quote, quote * 3)}
"""By the quote of a string, what finds its end and its escapes."""


class _At(IntEnum):
    """What may come next: the state of the reader."""

    KEY = 0
    ASSIGN = 1
    VALUE = 2
    AFTER = 3
    STRING = 4


def compile_arguments(
    form: Form, end: str, closers: Sequence[str], pair_closers: Sequence[Pattern], coded: Coded
) -> MakeReader:
    """Return what makes a reader of the literals of one call of ``form``."""
    dialect = form.literals
    assert dialect is not None
    quote = coded(dialect.quote)

    def make(parameters: Mapping[str, Any] | None) -> LiteralArguments:
        keys = coercion.property_names(parameters) if dialect.nested_quotes else frozenset()
        return LiteralArguments(dialect, quote, end, pair_closers, keys)

    return make


class LiteralArguments:
    """Reader of a run of ``key=value``, which is converted to one JSON object.

    Args:
        quote: text that opens and closes a string, in a dialect that escapes nothing.
        close: text that ends the run.
        pair_closers: patterns that close the pair of calls.
        keys: names of the tool's parameters; empty when not known.
    """

    find_break = None

    def __init__(
        self,
        dialect: Literals,
        quote: str,
        close: str,
        pair_closers: Sequence[Pattern] = (),
        keys: Collection[str] = (),
    ) -> None:
        self._dialect = dialect
        self._pair_closers = pair_closers
        self._keys = keys
        self._sets: list[int] = []
        self._holds_quotes = False
        self._verbatim = quote if dialect.verbatim else ""
        self._stack = [close]
        self._at = _At.KEY
        self._quote = ""
        self._known = 0  # characters of the held text that are known to belong to the atom or space there
        self._is_key = False
        self._fresh = True
        self._out: list[str] = ["{"]
        self._broken = False

    def feed(self, text: str, position: int, sink: Sink) -> int:
        start = position
        self._match = sink.match
        while position < len(text) and self._stack and not self._broken:
            step = self._string if self._at is _At.STRING else self._between
            moved = step(text, position)
            if moved < 0:
                break
            position, self._known = moved, 0
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
        return ""

    def _between(self, text: str, position: int) -> int:
        """Read one step outside strings; return the new position, negative when more text is needed first."""
        found = _SPACE.match(text, position)
        if found is not None and found.end() > position:
            return found.end()
        if self._at is _At.KEY:
            return self._key(text, position)
        if self._at is _At.VALUE:
            return self._value(text, position)
        step = self._assign if self._at is _At.ASSIGN else self._after
        return step(text[position], position)

    def _key(self, text: str, position: int) -> int:
        if text[position] == self._stack[-1]:
            return self._pop(position)
        opened = self._opens_string(text, position)
        if opened:
            return self._begin_string(text, position, is_key=True) if opened > 0 else -1
        end = self._end_of_run(_ATOM, text, position)
        if end <= position:
            return end
        word = text[position:end]
        if not (len(self._stack) == 1 or self._dialect.bare_keys or coercion.NUMBER.match(word)):
            return self._break(position)
        self._add_next(coercion.quoted(word) + ": ")
        self._at = _At.ASSIGN
        return end

    def _end_of_run(self, run: re.Pattern[str], text: str, position: int) -> int:
        """Return the end of the characters of ``run`` at ``position``; negative when more text may belong to them.

        Without any, or with too many, the arguments are broken, and it is ``position``.
        """
        end = run.match(text, position + self._known).end()  # type: ignore[union-attr]
        self._known = end - position
        if not 0 < self._known <= _LONGEST_ATOM:
            return self._break(position)
        return end if end < len(text) else -1

    def _assign(self, character: str, position: int) -> int:
        wanted = self._dialect.assign if len(self._stack) == 1 else ":"
        if character != wanted:
            return self._break(position)
        self._at, self._fresh = _At.VALUE, True
        return position + 1

    def _value(self, text: str, position: int) -> int:
        character = text[position]
        if character == self._stack[-1] and (character in ")]" or self._in_set) and len(self._stack) > 1:
            return self._pop(position)
        opened = self._opens_string(text, position)
        if opened:
            return self._begin_string(text, position, is_key=False) if opened > 0 else -1
        if character in _CLOSERS:
            is_set = character == "{" and self._is_set(text, position)
            if is_set is None:
                return -1
            is_object = character == "{" and not is_set
            self._add_next("{" if is_object else "[")
            self._stack.append(_CLOSERS[character])
            self._sets += [len(self._stack)] if is_set else []
            self._at, self._fresh = (_At.KEY if is_object else _At.VALUE), True
            return position + 1
        return self._atom(text, position)

    @property
    def _in_set(self) -> bool:
        return bool(self._sets) and self._sets[-1] == len(self._stack)

    def _is_set(self, text: str, position: int) -> bool | None:
        """Return whether a Python set begins here (JSON writes it as an array); None while more text decides that."""
        if self._dialect.bare_keys:
            return False
        results = [self._match(pattern, text, position)[0] for pattern in (_NESTED, _FIRST_ITEM)]
        if Match.FULL in results:
            return True
        return None if Match.PARTIAL in results else False

    def _atom(self, text: str, position: int) -> int:
        end = self._end_of_run(_PHRASE if self._dialect.bare_words else _ATOM, text, position)
        if end <= position:
            return end
        json_text = _literal(text[position:end].strip(), self._dialect.bare_words)
        if json_text is None:
            return self._break(position)
        self._add_next(json_text)
        self._at = _At.AFTER
        return end

    def _after(self, character: str, position: int) -> int:
        if character == self._stack[-1]:
            return self._pop(position)
        if character != ",":
            return self._break(position)
        in_object = len(self._stack) == 1 or (self._stack[-1] == "}" and not self._in_set)
        self._at = _At.KEY if in_object else _At.VALUE
        return position + 1

    def _pop(self, position: int) -> int:
        is_set = self._in_set
        closer = self._stack.pop()
        if is_set:
            self._sets.pop()
        self._out.append("}" if (closer == "}" and not is_set) or not self._stack else "]")
        self._at, self._fresh = _At.AFTER, False
        return position + 1

    def _add_next(self, json_text: str) -> None:
        """Add one member or item, with the comma before it. A trailing comma is dropped this way."""
        self._out.append(json_text if self._fresh else ", " + json_text)
        self._fresh = False

    def _opens_string(self, text: str, position: int) -> int:
        """Return 1 when a string opens here, 0 when none does, -1 while more text decides that."""
        if self._verbatim and text.startswith(self._verbatim, position):
            return 1
        if self._verbatim and self._verbatim.startswith(text[position : position + len(self._verbatim)]):
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
        self._quote, self._is_key, self._at, self._holds_quotes = mark, is_key, _At.STRING, False
        self._add_next('"')
        return position + len(mark)

    def _string(self, text: str, position: int) -> int:
        quote = self._quote
        if quote == self._verbatim:
            stop = text.find(quote, position)
        else:
            found = _STRING_BREAKS[quote].search(text, position)
            stop = found.start() if found else -1
        is_cut = stop < 0
        stop = _before_prefix(text, position, quote) if is_cut else stop
        if stop > position:
            self._out.append(coercion.quoted(text[position:stop])[1:-1])
            return stop
        if is_cut:
            return -1
        if not text.startswith(quote, position):
            return self._escaped(text, position)
        if self._dialect.nested_quotes and not self._is_key and len(quote) == 1:
            result = self._ends_string(text, position + 1)
            if result is Match.PARTIAL:
                return -1
            if result is None:
                return self._break(position)
            if result is Match.NONE:
                self._holds_quotes = True
                self._out.append(coercion.quoted(quote)[1:-1])
                return position + 1
        self._out.append('": ' if self._is_key else '"')
        self._at = _At.ASSIGN if self._is_key else _At.AFTER
        return position + len(quote)

    def _ends_string(self, text: str, position: int) -> Match | None:
        """Return whether the quote before ``position`` ends its string, by the text after it; None when ambiguous."""
        if not self._holds_quotes:
            behind = _SPACE.match(text, position + self._known).end()  # type: ignore[union-attr]
            self._known = behind - position
            if self._known >= _LONGEST_ATOM:
                return Match.FULL
            if behind == len(text):
                return Match.PARTIAL
            if text[behind] in _QUOTES:  # Python joins strings that stand side by side
                return None
            return Match.FULL if text[behind] in _FOLLOWERS else Match.NONE
        results = []
        if len(self._stack) <= _MOST_CLOSERS:
            result, found = self._match(_closing(tuple(reversed(self._stack))), text, position)
            results.append(result)
            if found is not None:
                results = [self._match(closer, text, found.end)[0] for closer in self._pair_closers]
        if len(self._stack) == 1:
            result, found = self._match(_NEXT, text, position)
            call, _ = self._match(_NEXT_CALL, text, position)
            is_unknown = found is not None and self._keys and found.slots["name"] not in self._keys
            if call is Match.FULL or is_unknown:
                return None
            results += [result, call]
        return next((each for each in (Match.FULL, Match.PARTIAL) if each in results), Match.NONE)

    def _escaped(self, text: str, position: int) -> int:
        if _CUT_ESCAPE.match(text, position):
            return -1
        found = _ESCAPE.match(text, position)
        if found is None:
            return self._break(position)
        self._out.append(_decoded(found))
        return found.end()

    def _break(self, position: int) -> int:
        self._broken = True
        return position


@lru_cache(maxsize=64)
def _closing(closers: tuple[str, ...]) -> Pattern:
    return Pattern([element for closer in closers for element in (SPACE, Exact(closer))])


def _before_prefix(text: str, position: int, quote: str) -> int:
    """Return the position at the end of ``text`` where a cut ``quote`` may begin."""
    for length in range(min(len(quote) - 1, len(text) - position), 0, -1):
        if quote.startswith(text[-length:]):
            return len(text) - length
    return len(text)


def _decoded(found: re.Match[str]) -> str:
    short, long, byte, octal, other = found.groups()
    if other is not None:
        return coercion.quoted(_PLAIN_ESCAPES.get(other, "\\" + other))[1:-1]
    code = int(octal, 8) if octal else int(short or long or byte, 16)
    if 0xD800 <= code <= 0xDFFF:
        return f"\\u{code:04x}"
    return coercion.quoted(chr(code) if code <= 0x10FFFF else found.group())[1:-1]


def _literal(word: str, bare_words: bool) -> str | None:
    if word in _WORDS:
        return _WORDS[word]
    if coercion.NUMBER.match(word):
        return word
    return coercion.loose_number(word) or (coercion.quoted(word) if bare_words and word else None)
