"""Feeding a parser in every way that a stream may be cut."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence

from singletree.conversation import Tool, Turn
from singletree.events import Event, fold
from singletree.parsing.family import Family
from singletree.parsing.parser import Parser

TOKEN = re.compile(r"<[|/]?[\w:▁｜|]+[|｜]?>|\s?\w{1,6}|\s+|[^\w\s]{1,2}")
"""Text in pieces of about a token, its tags whole."""

EXAMPLES = int(os.environ.get("SINGLETREE_EXAMPLES", "50"))
"""How many examples a property is tried with, each on every family; more for a night's run."""

_RANDOM_CUTS = max(3, EXAMPLES // 16)


def read(family: Family, pieces: Sequence[str], tools: Sequence[Tool] = (), tail: str = "") -> list[Event]:
    """The events of ``pieces``, checked to cover the input byte for byte."""
    parser = Parser(family, tools, tail)
    events = [e for piece in pieces for e in parser.feed(piece)] + parser.close()
    assert "".join(e.raw for e in events) == "".join(pieces)
    return events


def turn(family: Family, pieces: Sequence[str], tools: Sequence[Tool] = (), tail: str = "") -> Turn:
    """What ``pieces`` say."""
    return fold(read(family, pieces, tools, tail))


def cuts(text: str, *, places: Iterable[int] | None = None) -> Iterator[list[str]]:
    """``text`` char by char, at each two-way cut (of ``places``), and at random cuts of up to 16 characters.

    The text seeds the random cuts, so that texts which begin alike are not all cut alike.
    """
    yield list(text)
    for i in range(len(text) + 1) if places is None else places:
        yield [text[:i], text[i:]]
    rng = random.Random(text)
    for _ in range(_RANDOM_CUTS):
        pieces, at = [], 0
        while at < len(text):
            size = rng.randint(1, 16)
            pieces.append(text[at : at + size])
            at += size
        yield pieces
