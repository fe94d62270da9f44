"""docs/benchmarks.md and docs/prefix.md: what the benchmarks measured, between marks of their own."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

_DOCS = Path(__file__).resolve().parent.parent / "docs"
PATH = _DOCS / "benchmarks.md"
PREFIX = _DOCS / "prefix.md"


def replace(name: str, text: str, path: Path = PATH) -> None:
    """Put ``text`` between the marks of that name. ValueError when the document has none."""
    begin, end = (f"<!-- {name}: {side} -->" for side in ("begin", "end"))
    document = path.read_text(encoding="utf-8")
    before, found, rest = document.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} has no {begin} … {end}")
    path.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first to the right."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def today() -> str:
    """The date."""
    return datetime.date.today().isoformat()
