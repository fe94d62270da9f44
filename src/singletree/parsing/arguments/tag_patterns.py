"""Compiles the parameters of a tag family: what opens a parameter, and what ends its value."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from singletree.parsing import patterns
from singletree.parsing.family import SLOT, Form
from singletree.parsing.patterns import Pattern

UNLIKE_JSON = r'"\\\x00-\x1f\udc80-\udcff'
"""The characters that are not themselves in a JSON string, and the codes of special tokens; as a set of a pattern."""

_SPACED = ("key", "type")
"""Slots beside which a model may write white space."""


@dataclass(frozen=True)
class ValueEnd:
    """The end of one parameter's value. ``prefixes`` are its cut forms, ``trigger`` finds their first characters.
    ``breaks`` finds these too, and what is another text as JSON.
    """

    pattern: re.Pattern[str]
    trigger: re.Pattern[str]
    breaks: re.Pattern[str]
    prefixes: frozenset[str]
    longest: int

    def held(self, text: str, position: int) -> int:
        """Return the position of text that could still end the value; the length of ``text`` when there is none."""
        length = len(text)
        found = self.trigger.search(text, max(position, length - self.longest))
        while found is not None:
            if text[found.start() :] in self.prefixes:
                return found.start()
            found = self.trigger.search(text, found.end())
        return length


@dataclass(frozen=True)
class NextParameter:
    """The opener of a parameter at the start of a line, in two parts around its key."""

    head: str
    tail: str

    def find(self, text: str, position: int, keys: Collection[str], *, at_line: bool) -> tuple[int, int]:
        """Find the first opener for one of ``keys`` after ``position``.

        Args:
            text: the text so far.
            position: where to start.
            keys: names of the parameters that are looked for.
            at_line: whether ``position`` is the start of a line.

        Returns:
            The position of the opener, and that of text that could still become one; each the length of ``text`` when
            there is none. The line break before the opener belongs to it.
        """
        head, at = self.head, position
        if not at_line or not text.startswith(head[: len(text) - at], at):
            at = text.find("\n", at)
        while at >= 0:
            begins = at + text.startswith("\n", at)
            if text.startswith(head, begins):
                rest = text[begins + len(head) : begins + len(head) + _LONGEST_KEY]
                if any(rest.startswith(key + self.tail) for key in keys):
                    return at, at
                is_cut = begins + len(head) + len(rest) == len(text)
                if is_cut and any((key + self.tail).startswith(rest) for key in keys):
                    return len(text), at
            elif len(text) - begins < len(head) and head.startswith(text[begins:]):
                return len(text), at
            at = text.find("\n", begins)
        return len(text), len(text)


_LONGEST_KEY = 256


def _next_parameter(parameter: str) -> NextParameter:
    head, _, tail = parameter.partition("{value}")[0].partition("{key}")
    return NextParameter(head, tail.rstrip("\n"))


@dataclass(frozen=True)
class ParameterPatterns:
    """The patterns of one parameter of a tag family.

    Attributes:
        header: opener of a parameter, with its key.
        end: closer of the run of parameters.
        value_end: key -> end of the value.
        trim_break: whether one line break on each side of the value belongs to the format.
        escapes: ``Form.escapes``.
        element: picture of the family's nested elements; empty without them.
        opens: opener of a nested element.
        also: patterns of ``Form.also_parameter``.
        next: opener of the next parameter, in families where it closes a value (``Form.next_closes``).
    """

    header: Pattern
    end: Pattern
    value_end: Callable[[str], ValueEnd]
    trim_break: bool
    escapes: tuple[tuple[str, str], ...]
    element: str
    opens: Pattern | None
    also: tuple[ParameterPatterns, ...]
    next: NextParameter | None


def parameter_patterns(
    form: Form, tail: str, closers: Sequence[str], coded: Callable[[str], str]
) -> ParameterPatterns:
    """Return the patterns of ``form``'s parameters.

    Args:
        form: a form with ``{params}``.
        tail: the call's closing tag.
        closers: the closers of its pair.
        coded: replaces special tokens in a picture by codes.
    """
    also = [replace(form, parameter=picture, also_parameter=()) for picture in form.also_parameter]
    head, _, close = form.parameter.partition("{value}")
    elements: list[patterns._Element] = [patterns.space()]
    for i, part in enumerate(SLOT.split(head.rstrip("\n"))):
        if i % 2:
            elements += patterns.spaced(patterns.slot(part)) if part in _SPACED else [patterns.slot(part)]
        else:
            elements += patterns.literal(coded(part))
    ends = [tail.strip()] if tail.strip() else [c.strip() for c in closers]
    # A model that forgets the closer continues with the end of the call and of its pair. These two tags in a row are
    # too unlikely inside a value to be data.
    after = "\n".join(t for t in (ends[0], closers[0].strip() if tail.strip() else "") if t)

    def value_end(key: str) -> ValueEnd:
        return _value_end(coded(close.replace("{key}", key)), after)

    shared = value_end("")
    return ParameterPatterns(
        header=Pattern(elements),
        end=Pattern(
            [patterns.space(), *(patterns.literal(ends[0]) if len(ends) == 1 else [patterns.either(*ends)])]
        ),
        value_end=lru_cache(maxsize=256)(value_end) if "{key}" in close else lambda key: shared,
        trim_break=close.startswith("\n"),
        escapes=form.escapes,
        element=coded(form.parameter) if form.nested else "",
        opens=Pattern([patterns.space(), *_element_opener(coded(form.parameter))]) if form.nested else None,
        also=tuple(parameter_patterns(each, tail, closers, coded) for each in also),
        next=_next_parameter(coded(form.parameter)) if form.next_closes else None,
    )


def _element_opener(parameter: str) -> list[patterns._Element]:
    before, _, after = parameter.partition("{value}")[0].partition("{key}")
    return [*patterns.literal(before), patterns.slot("element"), *patterns.literal(after)]


def _value_end(close: str, after: str) -> ValueEnd:
    closer, trim = close.strip(), close.startswith("\n")
    lost = (
        # One line break or none, as in ``texts``: everything that this can match has to be held back.
        rf"(?={re.escape(after).replace(re.escape(chr(10)), chr(10) + '?')})" if "\n" in after else r"(?!)"
    )
    texts = [closer, after] if "\n" in after else [closer]
    texts += [s.replace("\n", "") for s in texts]
    if trim:
        texts += ["\n" + s for s in texts]
    firsts = "".join(sorted({s[0] for s in texts}))
    return ValueEnd(
        pattern=re.compile(("\n?" if trim else "") + f"(?:{re.escape(closer)}|{lost})"),
        trigger=re.compile("[" + re.escape(firsts) + "]"),
        breaks=re.compile(f"[{UNLIKE_JSON}{re.escape(firsts)}]"),
        prefixes=frozenset(s[:n] for s in texts for n in range(1, len(s))),
        longest=max(map(len, texts)) - 1,
    )
