"""Links between the documents lead to files and headings that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from source import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_FENCED = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def _slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@cache
def _anchors(page: Path) -> frozenset[str]:
    headings = _HEADING.findall(_FENCED.sub("", page.read_text(encoding="utf-8")))
    return frozenset(map(_slug, headings))


def _broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    # The site makes one dash of several in an anchor, GitHub keeps them.
    return (
        "--" in anchor
        or not target.exists()
        or bool(anchor and target.suffix == ".md" and anchor not in _anchors(target))
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = _CODE.sub("", _FENCED.sub("", page.read_text(encoding="utf-8")))
    assert [link for link in _LINK.findall(text) if _broken(page, link)] == []


def test_each_page_is_reached_from_the_index() -> None:
    def linked(page: Path) -> set[Path]:
        links = _LINK.findall(page.read_text(encoding="utf-8"))
        return {(page.parent / link.partition("#")[0]).resolve() for link in links}

    docs = ROOT / "docs"
    lists = [docs / "index.md", docs / "problems" / "README.md", docs / "decisions" / "README.md"]
    reached = {page for each in lists for page in linked(each)} | set(lists)
    assert {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} == {
        page.relative_to(docs).as_posix()
        for page in reached
        if page.is_relative_to(docs) and page.suffix == ".md"
    }
