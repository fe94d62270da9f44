"""The samples of every family, and tests that run over them: one case a family, one subtest a sample."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from singletree.conversation import Tool

SAMPLES = Path(__file__).parent / "samples"
NAMES = sorted(path.stem for path in SAMPLES.glob("*.toml"))

EVERY_PLACE = "SINGLETREE_EXAMPLES" in os.environ
Row = dict[str, Any]
Tools = tuple[Tool, ...]
Check = Callable[[str, Row, Tools], None]

_SEEN: set[tuple[object, ...]] = set()


@cache
def rows(name: str) -> tuple[tuple[Row, Tools], ...]:
    """Return the samples of the family ``name``, each with the tools that its request declares."""
    file = tomllib.loads((SAMPLES / f"{name}.toml").read_text(encoding="utf-8"))
    tools = tuple(Tool(t["name"], parameters=t["parameters"]) for t in file.get("tools", ()))
    return tuple((row, tools) for row in file["sample"])


@cache
def places(name: str, before: int, after: int) -> dict[str, list[int]]:
    """Return the places in each text of the family's samples beside which something is new.

    A place is left out if an earlier one has the same ``before`` characters before it and ``after`` after it:
    samples of a family repeat its markers and the same few calls. With ``SINGLETREE_EXAMPLES`` none is left out.
    """
    seen: set[tuple[str, str]] = set()
    found: dict[str, list[int]] = {}
    for row, _ in rows(name):
        text = row["text"]
        beside = [(text[max(at - before, 0) : at], text[at : at + after]) for at in range(len(text) + 1)]
        new = [at for at, each in enumerate(beside) if each not in seen or EVERY_PLACE]
        found.setdefault(text, new)
        seen.update(beside)
    return found


def is_new(by: str, name: str, events: Iterable[object]) -> bool:
    """Return whether no earlier sample of the family had events of the same kinds in a row, for the test ``by``.

    What an API makes of events does not depend on the markers that they come from. With ``SINGLETREE_EXAMPLES`` all
    are new.
    """
    key = by, name, *(kind for kind, _ in groupby(events, type))
    new = key not in _SEEN or EVERY_PLACE
    _SEEN.add(key)
    return new


def all_rows() -> Iterator[tuple[str, Row, Tools]]:
    """Yield every sample with the name of its family and its tools."""
    return ((name, row, tools) for name in NAMES for row, tools in rows(name))


def each_sample(check: Check) -> Callable[..., None]:
    """Make a test that runs ``check(name, row, tools)`` on every sample."""

    @pytest.mark.parametrize("name", NAMES)
    def test(name: str, subtests: pytest.Subtests) -> None:
        for row, tools in rows(name):
            with subtests.test(row["case"]):
                check(name, row, tools)

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test
