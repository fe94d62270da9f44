"""Installs what the tests of the inspector's page need: ``python tests/inspector/install.py``.

Playwright for Python (170 MB) goes to ``$SINGLETREE_CACHE/inspector``, by default ``~/.cache/singletree/inspector``,
once for each version of it and of Python. The browser is the system's own Chromium: Debian's package ``chromium``,
which is installed where apt-get may do so. No browser is downloaded from elsewhere. npm installs what the page is
built with.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[2] / "inspector"
PLAYWRIGHT = "1.65.2"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def folder() -> Path:
    """Return where Playwright is, or will be."""
    cache = os.environ.get("SINGLETREE_CACHE") or Path.home() / ".cache" / "singletree"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Path(cache) / "inspector" / f"playwright-{PLAYWRIGHT}-python{python}"


def chromium() -> str | None:
    """Return the path of the system's Chromium; None where there is none."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def missing() -> str:
    """Return why no test can run, with the cure; empty when all is there."""
    if chromium() is None:
        return "no Chromium in the PATH: apt-get install chromium"
    if not (folder() / ".installed").exists():
        return "Playwright is not installed: python tests/inspector/install.py, or make browser"
    return ""


def playwright() -> Any:
    """Return the module ``playwright.sync_api`` of the installation."""
    if str(folder()) not in sys.path:
        sys.path.append(str(folder()))
    return importlib.import_module("playwright.sync_api")


def _install_chromium() -> None:
    if chromium() is not None or shutil.which("apt-get") is None or os.geteuid() != 0:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "chromium"]):
        subprocess.run(["apt-get", *command], env=environment, stdout=subprocess.DEVNULL, check=True)


def _install_playwright() -> None:
    target = folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if (target / ".installed").exists():
            return
        shutil.rmtree(target, ignore_errors=True)
        print(f"Installing Playwright {PLAYWRIGHT} into {target} ...", flush=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "--target", str(target), f"playwright=={PLAYWRIGHT}"], check=True)
        (target / ".installed").touch()


def _install_libraries() -> None:
    """Install what the page is built with, so that the committed page can be compared with its sources."""
    if (npm := shutil.which("npm")) is not None:
        options = ("--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
        subprocess.run([npm, "install", *options], cwd=SOURCES, stdout=subprocess.DEVNULL, check=True)


def main() -> int:
    """Install all of it."""
    try:
        _install_libraries()
        _install_chromium()
        _install_playwright()
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(map(str, error.cmd))} ended with status {error.returncode}")
        return 1
    if reason := missing():
        print(f"The tests of the inspector's page will be skipped: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
