"""Tables in documents, each between marks of its own."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

_PREFIX = Path(__file__).resolve().parent.parent / "docs" / "prefix.md"


def replace_in_prefix(name: str, text: str) -> None:
    """Put ``text`` between the marks of that name in docs/prefix.md."""
    changed = replaced(name, text, _PREFIX.read_text(encoding="utf-8"))
    assert changed is not None, f"docs/prefix.md has no marks of {name}"
    _PREFIX.write_text(changed, encoding="utf-8")


def replaced(name: str, text: str, document: str) -> str | None:
    """Return ``document`` with ``text`` between the marks of that name; None if it has none."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = document.partition(begin)
    _, closed, after = rest.partition(end)
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}" if found and closed else None


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first to the right."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def today() -> str:
    """The date."""
    return datetime.date.today().isoformat()
