"""The documents that are generated from the code are current."""

from __future__ import annotations

import re
import subprocess

import pytest

from make_docs import DOCS, DOCUMENTS

_FOLDERS = ("src", "tests", "docs", "benchmarks")
_OF_OTHERS = {"docs/codex-catalog.md: calc.py"}
"""Files of a harness's task."""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_is_current(name: str) -> None:
    path = DOCS / name
    assert path.exists(), f"docs/{name} is missing: make it with `make docs`"
    assert path.read_text(encoding="utf-8") == DOCUMENTS[name](), "run `make docs` and review what changed"


def test_each_variable_of_the_environment_is_in_a_page() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (DOCS.parent / "src").rglob("*.py"))
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    names = set(re.findall(r'"(SINGLETREE_[A-Z_]*[A-Z])"', code))
    assert "SINGLETREE_CACHE" in names
    assert {name for name in names if name not in pages} == set()


def test_each_module_that_a_page_names_exists() -> None:
    root = DOCS.parent
    source = root / "src" / "singletree"
    pages = [*root.glob("*.md"), *DOCS.rglob("*.md"), *source.rglob("README.md")]
    missing = []
    for page in pages:
        bases = (root, source, source / "engines", source / "server", page.parent)
        for line in page.read_text(encoding="utf-8").splitlines():
            named = re.findall(r"`((?:[\w.-]+/)*[\w.-]+\.py)`", line)
            # A record of a decision names programs of its day.
            if named and "as of" not in line:
                missing += [
                    f"{page.relative_to(root)}: {name}"
                    for name in named
                    if not any((base / name).exists() for base in bases)
                    and ("/" in name or not any(any((root / folder).rglob(name)) for folder in _FOLDERS))
                ]
    assert set(missing) <= _OF_OTHERS


def test_each_commit_that_a_page_names_is_in_the_history() -> None:
    root = DOCS.parent

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)

    shallow = git("rev-parse", "--is-shallow-repository").stdout.strip()
    if shallow != "false":
        pytest.skip("the history is not here: this is a shallow clone or an archive")
    named = {
        (page.relative_to(root).as_posix(), commit)
        for page in DOCS.rglob("*.md")
        for commit in re.findall(r"(?:as of |\()([0-9a-f]{7})\b", page.read_text(encoding="utf-8"))
    }
    assert ("docs/decisions/parser.md", "f6c1e9e") in named
    lost = {
        (page, commit)
        for page, commit in named
        if git("merge-base", "--is-ancestor", commit, "HEAD").returncode
    }
    assert lost == set()
