"""The parts of documents that are made from results or from the code, each between marks of its own."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path


def with_parts(path: Path, parts: Mapping[str, str]) -> str:
    """Return the text of the document at ``path`` with each of ``parts`` between the marks of its name.

    Raises ValueError where the document has no such marks: what is made would be in no page.
    """
    document = path.read_text(encoding="utf-8")
    for name, text in parts.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found, rest = document.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{path} has no place for {name}: write {begin} and {end} where it shall stand")
        document = f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"
    return document


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first to the right."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def today() -> str:
    """The date."""
    return datetime.date.today().isoformat()
