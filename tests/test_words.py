"""Names are plain words: nothing is told, said or drawn by code."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from source import ROOT, tracked_python

ODD = {"said", "told", "say", "tell", "drawn", "draw"}
"""They have stood for too many things: use returned, reported, generated, rendered. An error message "says"."""

OF_OTHERS = {"draw", "DrawFn"}
"""Names of hypothesis."""


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def _is_odd(name: str) -> bool:
    return name not in OF_OTHERS and not _words(name).isdisjoint(ODD)


def _tokens(path: Path) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens of a file; none if no odd word is in it, not even in a comment, where it may stand."""
    text = path.read_text(encoding="utf-8")
    if any(map(_is_odd, set(re.findall(r"\w*(?:say|said|tell|told|draw)\w*", text, re.IGNORECASE)))):
        yield from tokenize.generate_tokens(io.StringIO(text).readline)


def test_names_are_plain() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{token.start[0]} {token.string}"
        for path in tracked_python()
        for token in _tokens(path)
        if token.type == tokenize.NAME and _is_odd(token.string)
    }
    assert found == set()
