"""Names are plain words: nothing is told, said or drawn by code."""

from __future__ import annotations

import io
import re
import tokenize

from source import ROOT, tracked_python

ODD = {"said", "told", "say", "tell", "drawn", "draw"}
"""They have stood for too many things: use returned, reported, generated, rendered. An error message "says"."""

OF_OTHERS = {"draw", "DrawFn"}
"""Names of hypothesis."""


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_names_are_plain() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{token.start[0]} {token.string}"
        for path in tracked_python()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        if token.type == tokenize.NAME and token.string not in OF_OTHERS and _words(token.string) & ODD
    }
    assert found == set()
