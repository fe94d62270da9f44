"""A release: what is refused, where the version goes, and what the changelog becomes."""

from __future__ import annotations

import runpy
import subprocess
import tomllib
from datetime import date
from pathlib import Path

import pytest

from source import ROOT

RELEASE = runpy.run_path(str(ROOT / "deploy" / "release.py"))
CHANGELOG = """# Changelog

## [Unreleased]

### What changes for you

- Nothing.

## [0.0.9] - 2026-01-02

- Before.
"""


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "x")
    git(tmp_path, "init", "--quiet")
    for name in RELEASE["PLACES"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "Begin")
    return tmp_path


def test_a_release_is_one_commit_with_the_version_in_all_places(clone: Path) -> None:
    RELEASE["prepare"](clone, "0.7.0rc1", date(2026, 2, 3))
    assert git(clone, "status", "--porcelain") == ""
    assert git(clone, "log", "-1", "--format=%s") == "Release 0.7.0rc1"
    project = tomllib.loads((clone / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == "0.7.0rc1"
    for name in ("Chart.yaml", "compose.yaml"):
        (place,) = [clone / each for each in RELEASE["PLACES"] if each.endswith(name)]
        assert "0.7.0rc1" in place.read_text(encoding="utf-8")
    changed = (clone / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]\n\n## [0.7.0rc1] - 2026-02-03\n\n### What" in changed
    assert RELEASE["notes"](changed, "0.7.0rc1") == "### What changes for you\n\n- Nothing.\n"
    assert RELEASE["notes"](changed, "0.0.9") == "- Before.\n"


@pytest.mark.parametrize("case", ["no version", "not clean", "tagged", "nothing for users"])
def test_what_is_not_ready_is_refused(case: str, clone: Path) -> None:
    if case == "not clean":
        (clone / "new").write_text("")
    if case == "tagged":
        git(clone, "tag", "v0.7.0")
    if case == "nothing for users":
        (clone / "CHANGELOG.md").write_text(CHANGELOG.replace("What changes for you", "Added"))
        git(clone, "commit", "--quiet", "--all", "--message", "Forget")
    reasons = {
        "no version": "v7 is no version: give one such as 0.2.0",
        "not clean": "commit or stash",
        "tagged": "v0.7.0 is tagged already",
        "nothing for users": 'write "### What changes for you" under Unreleased',
    }
    before = git(clone, "rev-parse", "HEAD")
    with pytest.raises(SystemExit, match=reasons[case]):
        RELEASE["prepare"](clone, "v7" if case == "no version" else "0.7.0", date(2026, 2, 3))
    assert git(clone, "rev-parse", "HEAD") == before


def test_the_changelog_is_ready_for_a_release() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = RELEASE["notes"](changelog, "Unreleased")
    assert section == "\n" or RELEASE["FOR_USERS"] in section
