"""The first command of a newcomer: what the installation prints, also when it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from source import ROOT

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

PYTHON = """#!/bin/sh
# Stands in for Python and for pip, which is configured with further indexes and warns on each of them.
case "$*" in
  "-c "*) exit ${OLD:-0} ;;
  "-m venv .venv")
    test -z "$NO_VENV" || { echo "Error: ensurepip is not available" >&2; exit 1; }
    mkdir -p .venv/bin && cp "$0" .venv/bin/python
    printf '#!/bin/sh\\necho ready\\n' > .venv/bin/singletree && chmod +x .venv/bin/singletree ;;
  "-m pip install "*)
    echo "pip $*"
    for i in $(seq 80); do echo "WARNING: index $i is not trusted" >&2; done
    test -z "$NO_PIP" || { echo "ERROR: No matching distribution found for msgspec" >&2; exit 1; } ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def make(clone: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``make serve`` in a fresh clone."""
    command = ["make", "--no-print-directory", "serve", f"PYTHON={clone / 'python'}"]
    known = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ARGS"))}
    return subprocess.run(
        command, cwd=clone, env={**known, **environment}, capture_output=True, text=True, check=False
    )


@needs_make
def test_the_first_screen_is_ours_alone(clone: Path) -> None:
    done = make(clone)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "Installing into .venv (about a minute) ...",
        ".venv/bin/singletree serve ",
        "ready",
    ]
    assert (clone / ".venv" / "install.log").read_text().count("is not trusted") == 160
    assert "Installing" not in make(clone).stdout


@needs_make
@pytest.mark.parametrize(
    ("broken", "says"),
    [("NO_PIP", "ERROR: No matching distribution found for msgspec"), ("NO_VENV", "Error: ensurepip is not available")],
)  # fmt: skip
def test_a_failed_installation_names_its_log_and_its_reason(clone: Path, broken: str, says: str) -> None:
    done = make(clone, **{broken: "1"})
    assert done.returncode != 0
    lines = (done.stdout + done.stderr).splitlines()
    assert says in lines
    assert any("see .venv/install.log" in line for line in lines)
    assert len(lines) < 8
    assert "ready" not in lines
    assert "ready" in make(clone).stdout.splitlines()  # to start again is all that it takes


@needs_make
def test_an_old_python_is_named(clone: Path) -> None:
    done = make(clone, OLD="1")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stdout


def stand_in(path: Path, version: str, seconds: float) -> Path:
    """A Python that answers at once with the time that it took."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\necho {version} {seconds} "$0"\n')
    path.chmod(0o755)
    return path


def choose(*folders: Path) -> tuple[str, str]:
    """What is chosen with these folders as PATH, and what is said of it."""
    command = [sys.executable, str(ROOT / "deploy" / "choose_python.py")]
    environment = {"PATH": os.pathsep.join([*map(str, folders), "/bin"])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr.strip()


def test_a_clearly_faster_python_of_the_same_version_is_chosen(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    first = stand_in(own / "python3", "7 11", 0.30)
    assert choose(own) == (str(first), "")
    stand_in(other / "python3", "7 12", 0.01)
    stand_in(other / "python7.11", "7 11", 0.29)
    assert choose(own, other) == (str(first), ""), "another version, and one that is as fast"
    faster = stand_in(other / "python7.11", "7 11", 0.20)
    chosen, written = choose(own, other)
    assert chosen == str(faster)
    assert written.startswith(f"{faster} runs code 1.5 times as fast as {first}")


def test_a_python_that_does_not_answer_is_not_chosen(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    first = stand_in(own / "python3", "7 11", 0.30)
    stand_in(other / "python3", "7 11", 0.01).write_text("#!/bin/sh\nexit 1\n")
    assert choose(own, other) == (str(first), "")
    first.write_text("#!/bin/sh\nexit 1\n")
    assert choose(own) == ("python3", "")


def test_the_public_workflows_run_our_own_targets() -> None:
    yaml = pytest.importorskip("yaml")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert len(workflows) == 3
    for path in workflows:
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
            commands = [step["run"] for step in job.get("steps", ()) if "run" in step]
            matrix = job.get("strategy", {}).get("matrix", {}).get("target", [])
            made = [command.split()[1] for command in commands if command.startswith("make ")]
            assert {*made, *matrix} - {"${{"} <= targets, path.name
    for path in (*(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"), ROOT / ".pre-commit-config.yaml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8")), path.name
    assert json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
