"""The argument codecs: what a model writes as arguments, to pieces of JSON text, as it arrives.

A codec reads from the parser's text and tells it, through ``Sink``, what it read. Every character it takes is in the
``raw`` of exactly one thing it tells.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from singletree.parsing import elements, schema
from singletree.parsing.json_scanner import JsonScanner
from singletree.parsing.parameters import ParameterPatterns
from singletree.parsing.picture import Verdict


class Sink(Protocol):
    """What the parser offers to a codec."""

    def start(self, name: str, wire_id: str, raw: str) -> None:
        """A call begins."""

    def delta(self, json_text: str, raw: str) -> None:
        """More of its arguments."""

    def end(self) -> None:
        """Its arguments are complete."""

    def broken(self, raw: str) -> None:
        """It is none; ``raw`` has not been told yet."""

    def hold(self, text: str, position: int) -> int:
        """Keep ``text`` from ``position`` for the next piece; returns the length of ``text``."""


class Codec(Protocol):
    """Reads the arguments of one call."""

    def feed(self, text: str, position: int, sink: Sink) -> int:
        """Read on; the position of the first character not taken. It is done after ``sink.end`` or ``sink.broken``."""

    def close(self) -> str:
        """The text ended here. What was taken and not told yet."""


class JsonArguments:
    """One JSON object: the model's own bytes."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()

    def feed(self, text: str, position: int, sink: Sink) -> int:
        """See ``Codec``."""
        scanner = self._scanner
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
        """See ``Codec``."""
        return ""


class JsonCall:
    """A whole call as one JSON object whose keys come in an unusual order or with unusual values.

    Held until it has closed, since its name may be its last word. ``arguments`` may be an object, a string that
    holds one, null or missing; anything else is no call.
    """

    _NAMES = ("name", "tool_name", "function")
    _ARGUMENTS = ("arguments", "parameters", "args")

    def __init__(self, opener: str) -> None:
        self._scanner = JsonScanner()
        self._opener = opener
        self._pieces: list[str] = []

    def feed(self, text: str, position: int, sink: Sink) -> int:
        """See ``Codec``."""
        end = self._scanner.scan(text, position)
        self._pieces.append(text[position:end])
        if self._scanner.broken:
            sink.broken(self.close())
        elif self._scanner.done:
            self._tell(sink)
        return end

    def close(self) -> str:
        """See ``Codec``."""
        held = self._opener + "".join(self._pieces)
        self._opener, self._pieces = "", []
        return held

    def _tell(self, sink: Sink) -> None:
        source = "".join(self._pieces)
        raw = self.close()
        spans = _members(source)
        name = next((v for k in self._NAMES if isinstance(v := _value(spans.get(k)), str)), "")
        arguments = _arguments(next((spans[k] for k in self._ARGUMENTS if k in spans), "null"))
        if not name or arguments is None:
            sink.broken(raw)
            return
        wire_id = _value(spans.get("id") or spans.get("tool_call_id"))
        sink.start(name, wire_id if isinstance(wire_id, str) else "", raw)
        sink.delta(arguments, "")
        sink.end()


_WHITE = " \t\n\r"


def _members(source: str) -> dict[str, str]:
    """The members of a JSON object, each value as the text it was written in."""
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
    while source[at] in _WHITE:
        at += 1
    return at


def _value(text: str | None) -> Any:
    return json.loads(text) if text is not None else None


def _arguments(text: str) -> str | None:
    if text.startswith('"'):
        text = json.loads(text).strip() or "{}"
    if text == "null":
        return "{}"
    return text if text.startswith("{") and schema.is_json(text) else None


class TagParameters:
    """A run of parameters between tags, told as one JSON object.

    Strings leave character by character; other types at their parameter's end, once they are known to be what the
    schema says. Inside a value only the value's own closer counts (FORMATS.md, H4).
    """

    def __init__(self, patterns: ParameterPatterns, parameters: Mapping[str, Any] | None) -> None:
        self._all = self._patterns = patterns
        self._schema = parameters
        self._types: frozenset[str] | None = None
        self._value: list[str] | None = None
        self._pieces: list[str] = []
        self._key = ""
        self._end = patterns.value_end("")
        self._first = True
        self._fresh = False
        self._untyped = False
        self._depth = self._checked = 0
        self._raw = ""

    def feed(self, text: str, position: int, sink: Sink) -> int:
        """See ``Codec``."""
        self._done = False
        while position < len(text) and not self._done:
            step = self._between if self._types is None else self._inside
            position = step(text, position, sink)
        return position

    def close(self) -> str:
        """See ``Codec``."""
        raw = self._raw + "".join(self._pieces)
        self._raw, self._pieces = "", []
        return raw

    def _between(self, text: str, position: int, sink: Sink) -> int:
        end, found = self._patterns.end.match(text, position)
        if found is not None:
            sink.delta("{}" if self._first else "}", self._raw + found.group())
            sink.end()
            self._raw, self._done = "", True
            return found.end()
        header, found = self._header(text, position)
        if found is not None and end is Verdict.NO:
            self._open(found.groupdict(), sink, found.group())
            return found.end()
        if Verdict.MAYBE in (header, end):
            return sink.hold(text, position)
        sink.broken(self.close())
        self._done = True
        return position

    def _header(self, text: str, position: int) -> tuple[Verdict, re.Match[str] | None]:
        also = self._all.also
        if also is not None:
            self._patterns = also
            verdict, found = also.header.match(text, position)
            if verdict is not Verdict.NO:
                return verdict, found
        self._patterns = self._all
        return self._all.header.match(text, position)

    def _open(self, slots: Mapping[str, str], sink: Sink, raw: str) -> None:
        key = unescaped(slots["key"].strip(), self._patterns.escapes)
        wire = slots.get("string") or {None: None, "string": "true"}.get(slots.get("type"), "false")
        declared = schema.parameter_types(self._schema, key)
        if wire == "true":
            self._types = frozenset()
        elif wire == "false" and (not declared or "type" in slots):
            self._types = (
                frozenset([slots["type"]]) & schema.ANY or schema.ANY if "type" in slots else schema.ANY
            )
        else:
            self._types = declared
        text = wire != "false" and schema.is_string(self._types)
        self._untyped = text and self._patterns.opens is not None and not self._types
        self._key, self._value = key, None if text else []
        self._depth = self._checked = 0
        self._end = self._patterns.value_end(slots["key"])
        self._fresh = self._patterns.trim_break
        lead = "{" if self._first else ", "
        quote = '"' if text and not self._untyped else ""
        sink.delta(f"{lead}{schema.quoted(key)}: {quote}", self._raw + raw)
        self._raw, self._first = "", False

    def _inside(self, text: str, position: int, sink: Sink) -> int:
        if self._fresh:
            self._fresh = False
            if text[position] == "\n":
                self._raw += "\n"
                return position + 1
        if self._untyped and not self._begins(text, position, sink):
            return sink.hold(text, position)
        found = self._end.pattern.search(text, position)
        if found is not None:
            self._say(text[position : found.start()], sink)
            return self._shut(sink, found.group(), found.end())
        end = self._end.held(text, position)
        self._say(text[position:end], sink)
        return sink.hold(text, end) if end < len(text) else end

    def _begins(self, text: str, position: int, sink: Sink) -> bool:
        """What a value without a declared type is: elements if it begins with one, else text. False when unknown."""
        assert self._patterns.opens is not None
        verdict, _ = self._patterns.opens.match(text, position)
        if verdict is Verdict.MAYBE:
            return False
        self._untyped = False
        if verdict is Verdict.YES:
            self._value = []
        else:
            sink.delta('"', "")
        return True

    def _is_balanced(self, element: str) -> bool:
        """Whether every element of the parameter's own name inside its value is closed."""
        assert self._value is not None
        self._depth += elements.depth(element, self._key, "".join(self._value[self._checked :]))
        self._checked = len(self._value)
        return not self._depth

    def _say(self, piece: str, sink: Sink) -> None:
        if not piece:
            return
        if self._value is None:
            sink.delta(schema.quoted(piece)[1:-1], self._raw + piece)
            self._raw = ""
        else:
            self._value.append(piece)
            self._pieces.append(piece)

    def _shut(self, sink: Sink, closer: str, position: int) -> int:
        element = self._patterns.element
        if self._value is not None and element:
            if not self._is_balanced(element):
                self._say(closer, sink)
                return position
            value = "".join(self._value)
            declared = schema.property_schemas(self._schema, self._schema, self._key)
            json_text = elements.typed(element, value, declared, self._schema)
        else:
            json_text = '"' if self._value is None else schema.typed("".join(self._value), self._types or ())
        sink.delta(json_text, self.close() + closer)
        self._types, self._value = None, None
        return position


def unescaped(text: str, escapes: Iterable[tuple[str, str]]) -> str:
    """A name or key with its attribute escapes undone."""
    for character, spelling in escapes:
        text = text.replace(spelling, character)
    return text
