"""The page of the inspector as it is committed: small, self-contained, and what its sources build."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from source import ROOT

SOURCES = ROOT / "inspector"
PAGE = ROOT / "src" / "singletree" / "inspector" / "page"
LARGEST = 200_000


def text(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def test_the_page_is_three_small_files() -> None:
    assert sorted(path.name for path in PAGE.iterdir()) == ["index.html", "inspector.css", "inspector.js"]
    assert sum(path.stat().st_size for path in PAGE.iterdir()) < LARGEST


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert re.findall(r'(?:src|href)="([^"]*)"', text("index.html")) == [
        "data:,",
        "/inspect/page/inspector.css",
        "/inspect/page/inspector.js",
    ]
    assert re.findall(r"url\((?!data:)|@import|@font-face", text("inspector.css")) == []
    # Names of XML namespaces are no addresses.
    assert re.findall(r"https?://(?!www\.w3\.org/)[^\s\"'`]+", text("inspector.js")) == []
    assert re.findall(r"\bimport\s*[({\"']|\bfrom\s*\"", text("inspector.js")) == []


def test_a_strict_policy_holds() -> None:
    assert "<script>" not in text("index.html")
    assert "style=" not in text("index.html")
    script = text("inspector.js")
    for forbidden in ("eval(", "new Function", "insertAdjacentHTML", "document.write", "</script", "<!--"):
        assert forbidden not in script.lower() if forbidden.islower() else forbidden not in script
    for path in (SOURCES / "src").glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|dangerouslySet", path.read_text(encoding="utf-8")), (
            path.name
        )


def test_the_lock_file_names_no_index() -> None:
    lock = json.loads((SOURCES / "package-lock.json").read_text(encoding="utf-8"))
    assert [name for name, package in lock["packages"].items() if "resolved" in package] == []


@pytest.mark.browser
def test_the_page_is_what_the_sources_build() -> None:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if not (SOURCES / "node_modules" / "esbuild").is_dir():
        pytest.skip("the page's libraries are not installed: make browser")
    built = subprocess.run(
        ["node", "build.mjs", "--check"], cwd=SOURCES, capture_output=True, text=True, check=False, timeout=60
    )
    assert built.returncode == 0, built.stderr
