"""The table of families: all of them, all their names, and no markup that a page would hide."""

from __future__ import annotations

import re

import pytest

from family_table import markdown_table
from parsing.reading import turn
from singletree import families
from singletree.cli.inspect import list_families
from singletree.conversation import Reasoning, Text
from singletree.parsing.family import Family

ROWS = [line for line in markdown_table().splitlines() if line.startswith("| ")][2:]
CELL = re.compile(r"(?<!\\) \| ")
CODE = re.compile(r"(`+)(?!`)(.*?)(?<!`)\1(?!`)")


@pytest.mark.parametrize(
    ("family", "line"), list(zip(families.table(), ROWS, strict=True)), ids=lambda x: getattr(x, "name", "")
)
def test_row(family: Family, line: str) -> None:
    cells = CELL.split(line.removeprefix("| ").removesuffix(" |"))
    assert len(cells) == 7
    assert cells[0] == family.name
    for name in (*family.aliases, *family.tool_aliases, *family.reasoning_aliases):
        assert name in cells[2]
    assert cells[4] == ("in reasoning" if family.starts_open else "")
    assert "<" not in CODE.sub("", line)
    (span,) = [found[2] for found in CODE.finditer(cells[5])]
    sample = span.strip(" ") if span[:1] == " " and not family.message_header else span.removeprefix(" ")
    parts = turn(
        family, [sample.replace("⏎", "\n").replace("\\|", "|")], (), family.message_header or "x"
    ).parts
    expected = [*([Reasoning("plan")] if family.reasoning else []), *([] if family.forms else [Text("Hi")])]
    assert [p for p in parts if isinstance(p, Reasoning | Text)][: len(expected)] == expected


def test_it_prints_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    list_families()
    assert "qwen3_coder" in capsys.readouterr().out
