"""The parameters of a tag family, compiled: what opens one, and what ends its value."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from singletree.parsing import picture
from singletree.parsing.family import SLOT, Form
from singletree.parsing.picture import Pattern


@dataclass(frozen=True)
class ValueEnd:
    """What ends one parameter's value. ``prefixes`` are the cut spellings of it, which begin with ``trigger``."""

    pattern: re.Pattern[str]
    trigger: re.Pattern[str]
    prefixes: frozenset[str]
    longest: int

    def held(self, text: str, position: int) -> int:
        """Where the text begins that could still end the value; the length of ``text`` when none could."""
        length = len(text)
        found = self.trigger.search(text, max(position, length - self.longest))
        while found is not None:
            if text[found.start() :] in self.prefixes:
                return found.start()
            found = self.trigger.search(text, found.end())
        return length


@dataclass(frozen=True)
class ParameterPatterns:
    """How one parameter of a tag family is read.

    ``element`` is the picture of the family's nested elements, ``opens`` what one begins with.
    """

    header: Pattern
    end: Pattern
    value_end: Callable[[str], ValueEnd]
    trim_break: bool
    escapes: tuple[tuple[str, str], ...]
    element: str
    opens: Pattern | None
    also: ParameterPatterns | None


def parameter_patterns(
    form: Form, tail: str, closers: Sequence[str], coded: Callable[[str], str]
) -> ParameterPatterns:
    """The patterns of ``form``'s parameters.

    ``tail`` is the call's closing tag, ``closers`` are those of its pair, ``coded`` puts codes in pictures.
    """
    also = replace(form, parameter=form.also_parameter or form.parameter, also_parameter="")
    head, _, close = form.parameter.partition("{value}")
    elements: list[picture._Element] = [picture.space()]
    for i, part in enumerate(SLOT.split(head.rstrip("\n"))):
        elements += [picture.slot(part)] if i % 2 else picture.literal(coded(part))
    ends = [tail.strip()] if tail.strip() else [c.strip() for c in closers]
    # A model that forgets the closer goes on with the call's own end and what stands around it; that pair of tags
    # is too unlikely inside a value to be data.
    after = "\n".join(t for t in (ends[0], closers[0].strip() if tail.strip() else "") if t)

    def value_end(key: str) -> ValueEnd:
        return _value_end(coded(close.replace("{key}", key)), after)

    shared = value_end("")
    return ParameterPatterns(
        header=Pattern(elements),
        end=Pattern(
            [picture.space(), *(picture.literal(ends[0]) if len(ends) == 1 else [picture.either(*ends)])]
        ),
        value_end=lru_cache(maxsize=256)(value_end) if "{key}" in close else lambda key: shared,
        trim_break=close.startswith("\n"),
        escapes=form.escapes,
        element=coded(form.parameter) if form.nested else "",
        opens=Pattern([picture.space(), *_element_opener(coded(form.parameter))]) if form.nested else None,
        also=parameter_patterns(also, tail, closers, coded) if form.also_parameter else None,
    )


def _element_opener(parameter: str) -> list[picture._Element]:
    before, _, after = parameter.partition("{value}")[0].partition("{key}")
    return [*picture.literal(before), picture.slot("element"), *picture.literal(after)]


def _value_end(close: str, after: str) -> ValueEnd:
    closer, trim = close.strip(), close.startswith("\n")
    lost = (
        rf"(?={re.escape(after).replace(re.escape(chr(10)), chr(92) + 's*')})" if "\n" in after else r"(?!)"
    )
    spelled = [closer, after] if "\n" in after else [closer]
    spelled += [s.replace("\n", "") for s in spelled]
    if trim:
        spelled += ["\n" + s for s in spelled]
    firsts = "".join(sorted({s[0] for s in spelled}))
    return ValueEnd(
        pattern=re.compile(("\n?" if trim else "") + f"(?:{re.escape(closer)}|{lost})"),
        trigger=re.compile("[" + re.escape(firsts) + "]"),
        prefixes=frozenset(s[:n] for s in spelled for n in range(1, len(s))),
        longest=max(map(len, spelled)) - 1,
    )
