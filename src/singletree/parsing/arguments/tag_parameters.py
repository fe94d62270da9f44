"""Reads arguments that are written as parameters between tags: what opens a parameter, and what ends its value.

In some formats a value is made of elements inside the parameter's own: an object of named ones, an array of repeated
ones. The ``pattern`` of an element is that of a parameter, with ``{key}`` and ``{value}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, product
from typing import Any

from singletree.parsing import patterns
from singletree.parsing.arguments import LONGEST_VALUE, Coded, FindBreak, MakeReader, Sink, coercion
from singletree.parsing.family import ITEM, SLOT, Form
from singletree.parsing.patterns import SPACE, Either, Element, Found, Match, Pattern, TextSearch

_SPACED = ("key", "type")
"""Slots beside which a model may write white space."""
_LONGEST_KEY = 256
_WORD = "\0"  # the first letter of a name, in the text behind a value


@dataclass(frozen=True)
class NextParameter:
    """The opener of a parameter at the start of a line, in two parts around its key."""

    head: str
    tail: str

    def find(
        self, text: str, position: int, limit: int, keys: Collection[str], *, at_line: bool
    ) -> tuple[int, int]:
        """Find the first opener that begins between ``position`` and ``limit``, for one of the parameters ``keys``.

        ``at_line``: whether ``position`` is the start of a line.

        Returns:
            The position of the opener, and that of text that could still become one; each the length of ``text`` when
            there is none. The line break before the opener belongs to it.
        """
        head, at = self.head, position
        if not at_line or not text.startswith(head[: len(text) - at], at):
            at = text.find("\n", at, limit)
        while at >= 0:
            begins = at + text.startswith("\n", at)
            if text.startswith(head, begins):
                rest = text[begins + len(head) : begins + len(head) + _LONGEST_KEY]
                if self._names_one(rest, keys):
                    return at, at
                is_cut = begins + len(head) + len(rest) == len(text)
                if is_cut and any((key + self.tail).startswith(rest) for key in keys):
                    return len(text), at
            elif len(text) - begins < len(head) and head.startswith(text[begins:]):
                return len(text), at
            at = text.find("\n", begins, limit)
        return len(text), len(text)

    def _names_one(self, rest: str, keys: Collection[str]) -> bool:
        ends = rest.find(self.tail)
        while ends >= 0 and rest[:ends] not in keys:
            ends = rest.find(self.tail, ends + 1)
        return ends >= 0


def compile_arguments(
    form: Form, end: str, closers: Sequence[str], pair_closers: Sequence[Pattern], coded: Coded
) -> MakeReader:
    """Return what makes a reader of the parameters of one call of ``form``."""
    return partial(TagParameters, parameter_patterns(form, coded(end), closers, coded))


@dataclass(frozen=True)
class ParameterPatterns:
    """The patterns of one parameter of a tag family.

    Attributes:
        header: opener of a parameter, with its key.
        end: closer of the run of parameters.
        value_end: key -> search for the end of the value; its ``breaks`` finds what is another text as JSON, too.
        trim_break: whether one line break on each side of the value belongs to the format.
        element: pattern of the family's nested elements; empty without them.
        opens: opener of a nested element.
        also: patterns of ``Form.also_parameter``.
        next: opener of the next parameter, in families where it closes a value (``Form.next_closes``).
    """

    form: Form
    header: Pattern
    end: Pattern
    value_end: Callable[[str], TextSearch]
    trim_break: bool
    element: str
    opens: Pattern | None
    also: tuple[ParameterPatterns, ...]
    next: NextParameter | None


def parameter_patterns(
    form: Form, tail: str, closers: Sequence[str], coded: Callable[[str], str]
) -> ParameterPatterns:
    """Return the patterns of ``form``'s parameters.

    ``tail`` is the call's closing tag, ``closers`` are those of its pair; ``coded`` replaces special tokens by codes.
    """
    also = [replace(form, parameter=each, also_parameter=()) for each in form.also_parameter]
    head, _, close = form.parameter.partition("{value}")
    elements: list[Element] = [SPACE]
    for i, part in enumerate(SLOT.split(head.rstrip("\n"))):
        if i % 2:
            slot = patterns.slot(part)
            elements += [SPACE, slot, SPACE] if part in _SPACED else [slot]
        else:
            elements += patterns.literal(coded(part))
    ends = [e.strip() for e in (tail, *(closers if form.pair_ends or not tail.strip() else ())) if e.strip()]
    # Behind a forgotten closer the call ends, then the pair ends or a call begins: in a row, too unlikely in a value.
    own, rest = bool(tail.strip()), coded(form.call.partition("{params}")[2])[len(tail) :].strip()
    again = coded(("" if own else form.calls[0]) + SLOT.split(form.call)[0]).strip()
    more = bool(form.calls[0] and again and not (own and form.wrap_each))
    follows = (closers[0].strip() * own, (again + _WORD) * more)
    after = ["\n".join(t for t in (ends[0], rest, each) if t) for each in follows if each]

    def value_end(key: str) -> TextSearch:
        return _value_end(coded(close.replace("{key}", key)), after)

    shared = value_end("")
    before, _, behind = coded(head).partition("{key}")
    child = [SPACE, *patterns.literal(before), patterns.slot("element"), *patterns.literal(behind)]
    return ParameterPatterns(
        form=form,
        header=Pattern(elements),
        end=Pattern([SPACE, *(patterns.literal(ends[0]) if len(ends) == 1 else [Either(tuple(ends))])]),
        value_end=lru_cache(maxsize=256)(value_end) if "{key}" in close else lambda key: shared,
        trim_break=close.startswith("\n"),
        element=coded(form.parameter) if form.nested else "",
        opens=Pattern(child) if form.nested else None,
        also=tuple(parameter_patterns(each, tail, closers, coded) for each in also),
        next=NextParameter(before, SLOT.split(behind)[0].rstrip("\n")) if form.next_closes else None,
    )


def _value_end(close: str, after: Sequence[str]) -> TextSearch:
    closer, trim = close.strip(), close.startswith("\n")
    # One line break or none, as in ``texts``: everything that this can match has to be held back.
    lost = "|".join(map(re.escape, after)).replace("\\\n", "\n?").replace(re.escape(_WORD), r"\w") or r"(?!)"
    written = ("\n" * trim + closer, *("\n" + text for text in after))
    ways = chain.from_iterable(product(*((c, "")[: 1 + (c == "\n")] for c in text)) for text in written)
    texts = ["".join(each) for each in ways]
    pattern = ("\n?" if trim else "") + rf"{re.escape(closer)}|\n?(?={lost})"
    return TextSearch.of(texts, pattern, coercion.UNLIKE_JSON)


class TagParameters:
    """Reader of a run of parameters between tags, which is converted to one JSON object.

    Strings are passed on character by character; other types at the end of their parameter, when it is known whether
    they fit the schema, ``parameters``. Inside a value only the value's own closer counts (house rule H4).
    """

    def __init__(self, compiled: ParameterPatterns, parameters: Mapping[str, Any] | None) -> None:
        self._all = self._patterns = compiled
        self._schema = parameters
        self._types: frozenset[str] | None = None
        self._value: list[str] | None = None  # the text so far, of a value that is no string
        self._key = ""
        self._end = compiled.value_end("")
        self._first, self._fresh, self._untyped = True, False, False
        self._depth = self._checked = self._length = 0
        self._raw = ""
        self._missing = coercion.property_names(parameters) if compiled.next else frozenset()
        self._at_line = False

    @property
    def find_break(self) -> FindBreak | None:
        in_string = self._types is not None and self._value is None
        settled = not (self._fresh or self._untyped or self._raw or (self._missing and self._at_line))
        return self._end.breaks.search if in_string and settled else None

    def feed(self, text: str, position: int, sink: Sink) -> int:
        self._done = False
        while position < len(text) and not self._done:
            step = self._between if self._types is None else self._inside
            position = step(text, position, sink)
        return position

    def close(self) -> str:
        raw = self._raw + "".join(self._value or ())
        self._raw, self._value = "", None
        return raw

    def _between(self, text: str, position: int, sink: Sink) -> int:
        end, found = sink.match(self._patterns.end, text, position)
        if found is not None:
            sink.delta("{}" if self._first else "}", self._raw + text[position : found.end])
            sink.end()
            self._raw, self._done = "", True
            return found.end
        header, found = self._header(text, position, sink)
        if found is not None and end is Match.NONE:
            self._open_parameter(found.slots, sink, text[position : found.end])
            return found.end
        if Match.PARTIAL in (header, end):
            return sink.hold(text, position)
        sink.broken(self.close())
        self._done = True
        return position

    def _header(self, text: str, position: int, sink: Sink) -> tuple[Match, Found | None]:
        for also in self._all.also:
            result, found = sink.match(also.header, text, position)
            if result is not Match.NONE:
                self._patterns = also
                return result, found
        self._patterns = self._all
        return sink.match(self._all.header, text, position)

    def _open_parameter(self, slots: Mapping[str, str], sink: Sink, raw: str) -> None:
        key = self._patterns.form.unescaped(slots["key"].strip())
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
        self._depth = self._checked = self._length = 0
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
            opens, held = self._patterns.next.find(text, position, end, self._missing, at_line=self._at_line)
            at_line, self._at_line = self._at_line, False
            if opens < end:
                self._add_text(text[position:opens], sink)
                closer = "\n" if text[opens] == "\n" else ""
                return self._close_parameter(sink, closer, opens + len(closer))
            if found is None:
                end = min(end, held)
                self._at_line = at_line and end == position
        self._add_text(text[position:end], sink)
        if found is not None:
            return self._close_parameter(sink, found.group(), found.end())
        return sink.hold(text, end) if end < len(text) else end

    def _begins(self, text: str, position: int, sink: Sink) -> bool:
        """Decide what a value without a declared type is: elements if it begins with one, else text.

        Returns False while more text is needed.
        """
        assert self._patterns.opens is not None
        result, _ = sink.match(self._patterns.opens, text, position)
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
        self._depth += depth(element, self._key, "".join(self._value[self._checked :]))
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
            self._length += len(piece)
            if self._length > LONGEST_VALUE:
                sink.delta(coercion.quoted("".join(self._value))[:-1], self.close())

    def _close_parameter(self, sink: Sink, closer: str, position: int) -> int:
        element = self._patterns.element
        if self._value is not None and element:
            if closer and not self._is_balanced(element):
                self._add_text(closer, sink)
                return position
            value = "".join(self._value)
            declared = coercion.property_schemas(self._schema, self._schema, self._key)
            json_text = nested_to_json(element, value, declared, self._schema)
        elif self._value is None:
            json_text = '"'
        else:
            json_text = coercion.to_json("".join(self._value), self._types or ())
        sink.delta(json_text, self.close() + closer)
        self._types = None
        return position


_SPACE = re.compile(r"\s*")
_DEPTH = 64


@lru_cache(maxsize=64)
def _opening(pattern: str) -> re.Pattern[str]:
    head, _, tail = pattern.partition("{value}")[0].partition("{key}")
    return re.compile(rf"{re.escape(head)}([^<>/\s]+){re.escape(tail)}")


def depth(pattern: str, key: str, text: str) -> int:
    """Return the number of elements ``key`` that ``text`` opens, minus the number that it closes."""
    head, _, tail = (p.replace("{key}", key) for p in pattern.partition("{value}"))
    return text.count(head) - text.count(tail)


def nested_to_json(pattern: str, text: str, declared: list[Any], root: Any, depth: int = 0) -> str:
    """Return the content of an element as JSON text.

    ``declared`` are the schemas of the value, ``root`` is what their ``$ref`` refers to, and ``depth`` is the number of
    elements around this one.
    """
    types = frozenset(t for d in declared for t in coercion.types_of(d, root))
    children = None if coercion.is_string(types) and types else _children(pattern, text)
    if not children or depth > _DEPTH:
        return _leaf(text, types)
    if ("array" in types and "object" not in types) or all(name == ITEM for name, _ in children):
        items = [s for d in declared for s in coercion.item_schemas(d, root)]
        return _array([nested_to_json(pattern, inner, items, root, depth + 1) for _, inner in children])
    members: dict[str, list[str]] = {}
    for name, inner in children:
        below = [s for d in declared for s in coercion.property_schemas(d, root, name)]
        members.setdefault(name, []).append(nested_to_json(pattern, inner, below, root, depth + 1))
    written = (f"{coercion.quoted(k)}: {v[0] if len(v) == 1 else _array(v)}" for k, v in members.items())
    return "{" + ", ".join(written) + "}"


def _array(items: list[str]) -> str:
    return "[" + ", ".join(items) + "]"


def _leaf(text: str, types: frozenset[str]) -> str:
    if not text.strip() and "string" not in types and types & {"object", "array"}:
        return "{}" if "object" in types else "[]"
    return coercion.to_json(text, types)


def _children(pattern: str, text: str) -> list[tuple[str, str]] | None:
    """Return the elements that ``text`` consists of; None when there is anything else in it."""
    opening, close = _opening(pattern), pattern.partition("{value}")[2]
    children: list[tuple[str, str]] = []
    position = _SPACE.match(text).end()  # type: ignore[union-attr]
    while position < len(text):
        found = opening.match(text, position)
        if found is None:
            return None
        closer = close.replace("{key}", found[1])
        end = _closing(text, found, closer)
        if end < 0:
            return None
        children.append((found[1], text[found.end() : end]))
        position = _SPACE.match(text, end + len(closer)).end()  # type: ignore[union-attr]
    return children


def _closing(text: str, found: re.Match[str], closer: str) -> int:
    """Return the position of the closer of the element that ``found`` opens; elements of its name may be inside."""
    opener, position, inside = found.group(), found.end(), 1
    while True:
        end = text.find(closer, position)
        if end < 0:
            return end
        inside += text.count(opener, position, end) - 1
        if not inside:
            return end
        position = end + len(closer)
