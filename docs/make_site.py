"""Build the site in build/site: ``make site``. It has the pages of docs/, and the README and its neighbours.

The pages are first copied to build/pages, where links to files outside docs/ are turned into links to their copies.
``llms.txt`` lists all pages for programs. A link that leads nowhere ends the build.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from os.path import normpath, relpath
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
BUILDER = (
    "uv",
    "tool",
    "run",
    "--quiet",
    "--from",
    "zensical==0.0.73",
    "zensical",
    "build",
    "--strict",
    "--clean",
)
NEIGHBOURS = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "report-a-weakness.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
}
"""The pages beside docs/, and their names on the site."""

_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)\s#]+)")


def copy_pages() -> None:
    """Write all pages to ``PAGES``, with links that hold there, and the files to which they link."""
    shutil.rmtree(PAGES, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.py", "__pycache__")
    shutil.copytree(ROOT / "docs", PAGES, ignore=ignored)
    for path in [*(ROOT / name for name in NEIGHBOURS), *(ROOT / "docs").rglob("*.md")]:
        target = PAGES / _place(path)
        target.write_text(_relinked(path, target), encoding="utf-8")


def _place(path: Path) -> str:
    """Return where the site has a file of the repository."""
    name = path.relative_to(ROOT).as_posix()
    return NEIGHBOURS.get(name) or (
        name.removeprefix("docs/") if name.startswith("docs/") else f"files/{name}"
    )


def _relinked(path: Path, target: Path) -> str:
    """Return the text of the page ``path`` with its links as ``target`` needs them; copy files that are no pages."""

    def link(found: re.Match[str]) -> str:
        linked = Path(normpath(path.parent / found[1]))
        if not linked.is_file():
            return found[1]  # the build names it
        place = PAGES / _place(linked)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(linked, place)
        return relpath(place, target.parent)

    return _LINK.sub(link, path.read_text(encoding="utf-8"))


def list_pages() -> str:
    """Return llms.txt: each page of the index, with the line that the index has on it."""
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\): (.+(?:\n  .+)*)", index, re.MULTILINE)
    lines = [f"- [{title}]({_page(link)}): {' '.join(text.split())}" for title, link, text in entries]
    return "\n".join(["# singletree", "", "> Serves open models to agent harnesses.", "", *lines, ""])


def _page(link: str) -> str:
    return re.sub(r"(README)?\.md$", lambda found: "index.html" if found[1] else ".html", link)


def main() -> None:
    """Build the site, and print where it is."""
    copy_pages()
    program = Path(sys.executable).with_name(BUILDER[0])
    done = subprocess.run([program, *BUILDER[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}")
    (SITE / "llms.txt").write_text(list_pages(), encoding="utf-8")
    print(f"the site is in {SITE.relative_to(ROOT)}: open index.html")


if __name__ == "__main__":
    main()
