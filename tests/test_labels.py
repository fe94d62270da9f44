"""Every label of a rule or a case (H6, C39) that the repository refers to is explained in ``docs``."""

from __future__ import annotations

import re

from source import ROOT, tracked_python

RULES = ROOT / "docs" / "house-rules.md"
CASES = ROOT / "docs" / "cases.md"


def _explained() -> set[str]:
    pages = RULES.read_text(encoding="utf-8") + CASES.read_text(encoding="utf-8")
    return set(re.findall(r"^\| ([CH]\d+) \|", pages, flags=re.MULTILINE))


def test_pages_explain_every_label_once() -> None:
    assert _explained() == {f"H{n}" for n in range(1, 13)} | {f"C{n}" for n in range(1, 45)}


def test_every_label_in_use_is_explained() -> None:
    used = {
        label
        for path in tracked_python()
        for comment in re.findall(r"#[^\n]*|\([^()\n]*\bH\d+\)", path.read_text(encoding="utf-8"))
        for label in re.findall(r"\b[CH]\d{1,2}\b", comment)
    }
    assert used - _explained() == set()


def test_no_reference_to_a_list_outside_of_the_repository() -> None:
    elsewhere = re.compile(r"\b(?:FORMATS|CASES|CLIENTS|DESIGN|HOUSE|PEERS|FIELD)\.md\b")
    files = [*tracked_python(), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        if path.name != "test_labels.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if elsewhere.search(line)
    ]
    assert found == []
