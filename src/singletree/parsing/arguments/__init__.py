"""Reads arguments as models write them, and passes them on as pieces of JSON text, as they arrive.

A reader takes characters from the parser's text and passes on what it read through ``Sink``. Every character that it
takes is in the ``raw`` of exactly one call of a function of the sink. ``compile_arguments`` of each notation's module
returns what makes its readers for a form: ``end`` is the closing tag or bracket of a call, ``closers`` are those of its
pair, ``pair_closers`` their patterns, and ``coded`` replaces special tokens by codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from singletree.parsing.patterns import Found, Match, Pattern

LONGEST_VALUE = 1 << 20
"""Maximum length of what is held until it is whole, in characters. A longer call is text, a longer value a string."""

FindBreak = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Sink:
    """Functions of the parser that a reader of arguments calls.

    Attributes:
        start: (name, id in the format or "", raw): a call begins.
        delta: (JSON text, raw): a piece of its arguments.
        end: its arguments are complete.
        broken: (raw): it is not a call; ``raw`` is the part of its text that was not passed on before.
        hold: (text, position): keep ``text`` from ``position`` on for the next piece; returns the length of ``text``.
        match: (pattern, text, position): match text that may be kept and come again (``patterns.Matching``).
    """

    start: Callable[[str, str, str], None]
    delta: Callable[[str, str], None]
    end: Callable[[], None]
    broken: Callable[[str], None]
    hold: Callable[[str, int], int]
    match: Callable[[Pattern, str, int], tuple[Match, Found | None]]


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


Coded = Callable[[str], str]
MakeReader = Callable[[Mapping[str, Any] | None], ArgumentReader]
"""Makes the reader for one call, from the schema of the tool's parameters, if it is known."""
