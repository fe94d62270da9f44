"""Readers of arguments: they convert a model's text into pieces of JSON text, as it arrives.

A reader takes characters from the parser's text and passes on what it read through ``Sink``. Every character that it
takes is in the ``raw`` of exactly one call of a function of the sink.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from singletree.parsing.arguments import coercion, nested_tags
from singletree.parsing.arguments.json_scanner import JsonScanner
from singletree.parsing.arguments.tag_patterns import UNLIKE_JSON, ParameterPatterns
from singletree.parsing.patterns import Match


@dataclass(frozen=True, slots=True)
class Sink:
    """Functions of the parser that a reader of arguments calls.

    Attributes:
        start: (name, id in the format or "", raw): a call begins.
        delta: (JSON text, raw): a piece of its arguments.
        end: its arguments are complete.
        broken: (raw): it is not a call; ``raw`` is the part of its text that was not passed on before.
        hold: (text, position): keep ``text`` from ``position`` on for the next piece; returns the length of ``text``.
    """

    start: Callable[[str, str, str], None]
    delta: Callable[[str, str], None]
    end: Callable[[], None]
    broken: Callable[[str], None]
    hold: Callable[[str, int], int]


FindBreak = Callable[[str], object]
_STRING_BREAKS = re.compile(f"[{UNLIKE_JSON}]")


class ArgumentReader(Protocol):
    """Reader of the arguments of one call."""

    @property
    def find_break(self) -> FindBreak | None:
        """Return, inside a string that is passed on as it comes, the function that finds what may be more than its next
        piece, or another text as JSON; None elsewhere.
        """

    def feed(self, text: str, position: int, sink: Sink) -> int:
        """Read ``text`` from ``position`` on; return the position of the first character that was not taken.

        The reader is finished after it has called ``sink.end`` or ``sink.broken``.
        """

    def close(self) -> str:
        """Return the text that was taken and not passed on yet: the model's text has ended."""


class JsonArguments:
    """Reader of one JSON object, which is passed on as the model's own bytes."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()

    @property
    def find_break(self) -> FindBreak | None:
        """Implement ``ArgumentReader``."""
        return _STRING_BREAKS.search if self._scanner.in_string else None

    def feed(self, text: str, position: int, sink: Sink) -> int:
        """Implement ``ArgumentReader``."""
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
        """Implement ``ArgumentReader``."""
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

    def feed(self, text: str, position: int, sink: Sink) -> int:
        """Implement ``ArgumentReader``."""
        end = self._scanner.scan(text, position)
        self._pieces.append(text[position:end])
        if self._scanner.broken:
            sink.broken(self.close())
        elif self._scanner.done:
            self._emit_call(sink)
        return end

    def close(self) -> str:
        """Implement ``ArgumentReader``."""
        held = self._opener + "".join(self._pieces)
        self._opener, self._pieces = "", []
        return held

    def _emit_call(self, sink: Sink) -> None:
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
    return text if text.startswith("{") and coercion.is_json(text) else None


class TagParameters:
    """Reader of a run of parameters between tags, which is converted to one JSON object.

    Strings are passed on character by character; other types at the end of their parameter, when it is known whether
    they fit the schema. Inside a value only the value's own closer counts (house rule H4).

    Args:
        patterns: the patterns of the parameters.
        parameters: the tool's schema; None when it is not known.
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
        self._missing = coercion.property_names(parameters) if patterns.next else frozenset()
        self._at_line = False

    @property
    def find_break(self) -> FindBreak | None:
        """Implement ``ArgumentReader``."""
        in_string = self._types is not None and self._value is None
        settled = not (self._fresh or self._untyped or self._raw or (self._missing and self._at_line))
        return self._end.breaks.search if in_string and settled else None

    def feed(self, text: str, position: int, sink: Sink) -> int:
        """Implement ``ArgumentReader``."""
        self._done = False
        while position < len(text) and not self._done:
            step = self._between if self._types is None else self._inside
            position = step(text, position, sink)
        return position

    def close(self) -> str:
        """Implement ``ArgumentReader``."""
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
        if found is not None and end is Match.NONE:
            self._open_parameter(found.groupdict(), sink, found.group())
            return found.end()
        if Match.PARTIAL in (header, end):
            return sink.hold(text, position)
        sink.broken(self.close())
        self._done = True
        return position

    def _header(self, text: str, position: int) -> tuple[Match, re.Match[str] | None]:
        for also in self._all.also:
            result, found = also.header.match(text, position)
            if result is not Match.NONE:
                self._patterns = also
                return result, found
        self._patterns = self._all
        return self._all.header.match(text, position)

    def _open_parameter(self, slots: Mapping[str, str], sink: Sink, raw: str) -> None:
        key = unescaped(slots["key"].strip(), self._patterns.escapes)
        declared = coercion.parameter_types(self._schema, key)
        wire = slots.get("string")
        if "type" in slots:
            named = coercion.named_types(slots["type"])
            wire = "true" if named == {"string"} else "false"
            self._types = named & coercion.ANY or coercion.ANY
        elif wire == "false" and not declared:
            self._types = coercion.ANY
        else:
            self._types = declared
        if wire == "true":
            self._types = frozenset()
        text = wire != "false" and coercion.is_string(self._types)
        self._untyped = text and self._patterns.opens is not None and not self._types
        self._key, self._value = key, None if text else []
        self._missing -= {key}
        self._depth = self._checked = 0
        self._end = self._patterns.value_end(slots["key"])
        self._fresh = self._patterns.trim_break
        lead = "{" if self._first else ", "
        quote = '"' if text and not self._untyped else ""
        sink.delta(f"{lead}{coercion.quoted(key)}: {quote}", self._raw + raw)
        self._raw, self._first = "", False

    def _inside(self, text: str, position: int, sink: Sink) -> int:
        if self._fresh:
            self._fresh = False
            self._at_line = text[position] == "\n"
            if self._at_line:
                self._raw += "\n"
                return position + 1
        if self._untyped and not self._begins(text, position, sink):
            return sink.hold(text, position)
        found = self._end.pattern.search(text, position)
        end = found.start() if found is not None else self._end.held(text, position)
        if self._missing and self._patterns.next is not None:
            opens, held = self._patterns.next.find(text, position, self._missing, at_line=self._at_line)
            at_line, self._at_line = self._at_line, False
            if opens < end:
                self._add_text(text[position:opens], sink)
                closer = "\n" if text[opens] == "\n" else ""
                return self._close_parameter(sink, closer, opens + len(closer))
            if found is None:
                end = min(end, held)
                self._at_line = at_line and end == position
        if found is not None:
            self._add_text(text[position:end], sink)
            return self._close_parameter(sink, found.group(), found.end())
        self._add_text(text[position:end], sink)
        return sink.hold(text, end) if end < len(text) else end

    def _begins(self, text: str, position: int, sink: Sink) -> bool:
        """Decide what a value without a declared type is: elements if it begins with one, else text.

        Returns False while more text is needed.
        """
        assert self._patterns.opens is not None
        result, _ = self._patterns.opens.match(text, position)
        if result is Match.PARTIAL:
            return False
        self._untyped = False
        if result is Match.FULL:
            self._value = []
        else:
            sink.delta('"', "")
        return True

    def _is_balanced(self, element: str) -> bool:
        """Return whether every element of the parameter's own name inside its value is closed."""
        assert self._value is not None
        self._depth += nested_tags.depth(element, self._key, "".join(self._value[self._checked :]))
        self._checked = len(self._value)
        return not self._depth

    def _add_text(self, piece: str, sink: Sink) -> None:
        if not piece:
            return
        if self._value is None:
            sink.delta(coercion.quoted(piece)[1:-1], self._raw + piece)
            self._raw = ""
        else:
            self._value.append(piece)
            self._pieces.append(piece)

    def _close_parameter(self, sink: Sink, closer: str, position: int) -> int:
        element = self._patterns.element
        if self._value is not None and element:
            if not self._is_balanced(element):
                self._add_text(closer, sink)
                return position
            value = "".join(self._value)
            declared = coercion.property_schemas(self._schema, self._schema, self._key)
            json_text = nested_tags.nested_to_json(element, value, declared, self._schema)
        else:
            json_text = (
                '"' if self._value is None else coercion.to_json("".join(self._value), self._types or ())
            )
        sink.delta(json_text, self.close() + closer)
        self._types, self._value = None, None
        return position


def unescaped(text: str, escapes: Iterable[tuple[str, str]]) -> str:
    """Return a name or key with its attribute escapes undone; ``escapes`` are (character, escape) pairs."""
    for character, escape in escapes:
        text = text.replace(escape, character)
    return text
