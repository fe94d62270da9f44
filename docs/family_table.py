"""Make the table of model families, ``docs/families.md``, from what ``singletree families`` prints."""

from __future__ import annotations

import re

from singletree import families
from singletree.cli.inspect import HEADS, family_cells

_HEAD = """# Model families

Made by `make docs`; `singletree families` prints it. *begins*: where a turn begins when the prompt does not decide it.
*sample*: a thought and a call (or an answer) as the model writes them, line breaks as ⏎. How each family is parsed,
case by case: [family-cases.md](family-cases.md).
"""
_TAG = re.compile(r"<[^<>\s]+>")


def markdown_table() -> str:
    """Return the table in Markdown, with tags in code spans: GitHub hides them otherwise."""
    rows = []
    for family in families.table():
        *cells, models, begins, sample = family_cells(family)
        rows.append((*cells, _tags_as_code(models), begins, _code(sample), _tags_as_code(family.source)))
    lines = ((*HEADS, "source"), ("---",) * (len(HEADS) + 1), *rows)
    table = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)
    return "\n".join([_HEAD, *table]) + "\n"


def _code(text: str) -> str:
    """Return a code span, fenced by more backticks than the text contains."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, pad = "`" * (longest + 1), " " if longest or text[:1] == " " else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _tags_as_code(text: str) -> str:
    return _TAG.sub(lambda found: _code(found.group()), text)
