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
    document = path.read_text(encoding="utf-8")
    changed = replaced(name, text, document)
    if changed is None:
        raise ValueError(f"{path} has no {_mark(name, 'begin')} … {_mark(name, 'end')}")
    path.write_text(changed, encoding="utf-8")


def replaced(name: str, text: str, document: str) -> str | None:
    """Return ``document`` with ``text`` between the marks of that name; None if it has none."""
    begin, end = _mark(name, "begin"), _mark(name, "end")
    before, found, rest = document.partition(begin)
    _, closed, after = rest.partition(end)
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}" if found and closed else None


def _mark(name: str, side: str) -> str:
    return f"<!-- {name}: {side} -->"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first to the right."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def today() -> str:
    """The date."""
    return datetime.date.today().isoformat()
