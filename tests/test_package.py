"""``pip install .`` without extras installs the library."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from source import PACKAGE, ROOT

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]

PROGRAM = r"""
import sys
sys.path.insert(0, sys.argv[1])
from singletree import families, parse
text = 'I look. <tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>'
turn = parse(families.get("hermes"), text)
call = turn.tool_calls[0]
print(turn.text.strip(), call.name, call.arguments)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        packed = {name for name in opened.namelist() if ".dist-info/" not in name}
    written = {
        f"singletree/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == written


def test_the_installed_library_parses_with_no_dependency_at_hand(wheel: Path, tmp_path: Path) -> None:
    install = [*PIP, "install", "--no-deps", "--no-index", "--target", str(tmp_path), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    # -I and -S keep this environment's own packages, and our source, out of reach.
    run = [sys.executable, "-I", "-S", "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 'I look. ls {"path": "."}\n'
