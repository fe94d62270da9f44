"""Counts the work of a parser: the calls that it makes, and the characters at which its regular expressions look."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from singletree.parsing import compiled, emitter, family, parser, patterns
from singletree.parsing.arguments import coercion, json_arguments, literal_arguments, tag_parameters

MODULES = (
    coercion,
    compiled,
    emitter,
    family,
    emitter,
    json_arguments,
    parser,
    patterns,
    literal_arguments,
    tag_parameters,
)


HERE = (lambda: None).__code__.co_filename
"""The calls of this file are no work of a parser."""


class Count:
    """What was counted, and the patterns that were used.

    Attributes:
        calls: of functions of Python and C.
        characters: from where a pattern was tried to where it stopped.
        used: pattern -> names of its methods that were called.
    """

    def __init__(self) -> None:
        self.calls = self.characters = 0
        self.used: dict[re.Pattern[str], set[str]] = {}

    @property
    def work(self) -> int:
        return self.calls + self.characters

    @contextmanager
    def running(self) -> Iterator[None]:
        def count(frame: FrameType, event: str, argument: Any) -> None:
            if (event == "c_call" or event == "call") and frame.f_code.co_filename != HERE:
                self.calls += 1

        self.calls = self.characters = 0
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(before)


class CountedPattern:
    """A regular expression that is counted where it is used."""

    def __init__(self, pattern: re.Pattern[str], count: Count) -> None:
        self.counted, self._count = pattern, count

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.counted, name)
        used = self._count.used.setdefault(self.counted, set())

        def call(text: str, *limits: int) -> Any:
            used.add(name)
            start = min(limits[0] if limits else 0, len(text))
            found = method(text, *limits)
            # A match that failed stopped at the first character that did not fit (``test_linear``).
            fails_at = start + 1 if name in ("match", "fullmatch") else len(text)
            ends = found.end() if isinstance(found, re.Match) else fails_at
            self._count.characters += max(ends - start, 0)
            return found

        found = call if callable(method) else method
        setattr(self, name, found)  # it is asked for once
        return found


class CountedRe:
    """The module ``re``, whose patterns are counted."""

    def __init__(self, count: Count) -> None:
        self._count = count

    def compile(self, pattern: str, flags: int = 0) -> CountedPattern:
        return CountedPattern(re.compile(pattern, flags), self._count)

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)


def count_patterns(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Count the patterns of all modules that read a model's text, for as long as ``monkeypatch`` lasts."""
    count = Count()
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if isinstance(value, re.Pattern):
                monkeypatch.setattr(module, name, CountedPattern(value, count))
            elif isinstance(value, dict) and any(isinstance(each, re.Pattern) for each in value.values()):
                known = {key: CountedPattern(each, count) for key, each in value.items()}
                monkeypatch.setattr(module, name, known)
            elif value is re:
                monkeypatch.setattr(module, name, CountedRe(count))
    return count
