"""Print the table of model families, for a terminal or for docs/families.md."""

from __future__ import annotations

import re
from collections.abc import Sequence

from singletree import families
from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.parsing.family import Family
from singletree.parsing.render_turn import render_turn

_HEADS = ("name", "reads", "also called", "models", "begins", "sample", "source")
_HEAD = """# Model families

Made by `singletree families --markdown`. *begins*: where a turn begins when the prompt does not decide it. *sample*: a
thought and a call (or an answer) as the model writes them, line breaks as ⏎. How each family is parsed, case by case:
[family-cases.md](family-cases.md).
"""
_TAG = re.compile(r"<[^<>\s]+>")


def markdown() -> str:
    """Return the table in Markdown, with tags in code spans: GitHub hides them otherwise."""
    rows = [
        (*_cells(family), _code(_sample(family)), _tags_as_code(family.source)) for family in families.table()
    ]
    lines = (_HEADS, ("---",) * len(_HEADS), *rows)
    return "\n".join(
        [_HEAD, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)]
    )


def show() -> None:
    """Print the table to a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text as Plain

    table = Table(box=None, pad_edge=False)
    for head in _HEADS[:-1]:
        table.add_column(head, overflow="fold")
    for family in families.table():
        table.add_row(*map(Plain, (*_cells(family, code=False), _sample(family))))
    Console().print(table)


def _cells(family: Family, *, code: bool = True) -> Sequence[str]:
    models = ", ".join(family.models)
    begins = "in reasoning" if family.starts_open else ""
    return family.name, family.kind, _aliases(family), _tags_as_code(models) if code else models, begins


def _aliases(family: Family) -> str:
    halves = [(n, "tools") for n in family.tool_aliases] + [
        (n, "reasoning") for n in family.reasoning_aliases
    ]
    return ", ".join([*sorted(family.aliases), *(f"{name} ({half} only)" for name, half in sorted(halves))])


def _sample(family: Family) -> str:
    last: Part = ToolCall("get_weather", '{"city": "Paris"}', "abcdefghi") if family.forms else Text("Hi")
    parts: list[Part] = [Reasoning("plan"), last] if family.reasoning else [last]
    return render_turn(family, parts).replace("\n", "⏎")


def _code(text: str) -> str:
    """Return a code span, fenced by more backticks than the text contains."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, pad = "`" * (longest + 1), " " if longest or text[:1] == " " else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _tags_as_code(text: str) -> str:
    return _TAG.sub(lambda found: _code(found.group()), text)
