"""Prepare a release, and build its files.

    python deploy/release.py 0.2.0     # make release VERSION=0.2.0: sets the version, commits, builds
    python deploy/release.py           # make release: builds what is checked out, as the workflow of a tag does

The files in ``dist`` are the wheel, the source package, a list of what the extra ``all`` brings with it (CycloneDX) and
their checksums; ``build/release-notes.md`` is the section of the changelog. No tag is set, and nothing is published.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SBOM = "cyclonedx-bom==7.5.0"
FOR_USERS = "### What changes for you"
PLACES = {
    "pyproject.toml": r'(?m)^(version = ")[^"]+',
    "deploy/helm/singletree/Chart.yaml": r"(?m)^((?:appV|v)ersion: ).+",
    "deploy/compose.yaml": r"(image: singletree:)\S+",
}
"""Where the version is written. The program itself reads that of the installed package."""


def prepare(root: Path, version: str, day: datetime.date) -> None:
    """Set the version, give the changelog's entries its heading, and commit both.

    Raises:
        SystemExit: the version is none, is tagged, the tree is not clean, or the changelog is not ready.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise SystemExit(f"{version} is no version: give one such as 0.2.0 or 0.2.0rc1")
    if changed := _git(root, "status", "--porcelain"):
        raise SystemExit(f"commit or stash what has changed first:\n{changed}")
    if _git(root, "tag", "--list", f"v{version}"):
        raise SystemExit(f"v{version} is tagged already: choose the next version")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    if FOR_USERS not in notes(text, "Unreleased"):
        raise SystemExit(
            f'CHANGELOG.md: write "{FOR_USERS}" under Unreleased: what users have to do or will notice'
        )
    heading = "## [Unreleased]\n"
    changelog.write_text(text.replace(heading, f"{heading}\n## [{version}] - {day}\n", 1), encoding="utf-8")
    for name, pattern in PLACES.items():
        path = root / name
        found = re.sub(pattern, rf"\g<1>{version}", path.read_text(encoding="utf-8"))
        path.write_text(found, encoding="utf-8")
    _git(root, "commit", "--quiet", "--message", f"Release {version}", "--", "CHANGELOG.md", *PLACES)


def notes(changelog: str, version: str) -> str:
    """Return the section of ``version`` in a changelog, without its heading.

    Raises:
        SystemExit: there is none.
    """
    found = re.search(rf"^## \[{re.escape(version)}\].*\n(?s:(.*?))(?=^## \[|\Z)", changelog, re.MULTILINE)
    if found is None:
        raise SystemExit(
            f"CHANGELOG.md has no section [{version}]: `make release VERSION={version}` makes it"
        )
    return found[1].strip() + "\n"


def build(folder: Path) -> str:
    """Build wheel, source package, list of packages and checksums into an empty ``folder``; return the version."""
    uv = Path(sys.executable).with_name("uv")
    _run(
        uv, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder, ROOT
    )
    (wheel,) = folder.glob("*.whl")
    version = wheel.name.split("-")[1]
    needed = _run(sys.executable, ROOT / "deploy" / "runtime_requirements.py")
    command: list[str | Path] = [
        uv,
        "tool",
        "run",
        "--quiet",
        "--from",
        SBOM,
        "cyclonedx-py",
        "requirements",
        "-",
    ]
    output: list[str | Path] = [
        "--output-reproducible",
        "--output-file",
        folder / f"singletree-{version}.cdx.json",
    ]
    _run(*command, "--pyproject", ROOT / "pyproject.toml", "--mc-type", "application", *output, given=needed)
    (folder / ".gitignore").unlink(missing_ok=True)  # uv's
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir())
    ]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="ascii")
    return version


def _git(root: Path, *arguments: str) -> str:
    return _run("git", "-C", root, *arguments).strip()


def _run(*command: str | Path, given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Prepare the version that is given, and build the files."""
    version = sys.argv[1] if len(sys.argv) > 1 else ""
    if version:
        prepare(ROOT, version, datetime.date.today())
    dist, about = ROOT / "dist", ROOT / "build" / "release-notes.md"
    shutil.rmtree(dist, ignore_errors=True)
    built = build(dist)
    print(*sorted(path.relative_to(ROOT).as_posix() for path in dist.iterdir()), sep="\n")
    section = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version or built)
    about.parent.mkdir(exist_ok=True)
    about.write_text(section, encoding="utf-8")
    print(f"{about.relative_to(ROOT)}\nlook at them, then: git tag --sign v{built} && git push --follow-tags")


if __name__ == "__main__":
    main()
