"""``pip install .`` without extras installs the library."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
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

COMMAND = r"""
import sys
sys.path.insert(0, sys.argv[1])
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from singletree.cli import main
main(sys.argv[3:])
"""
NOBODY = "http://127.0.0.1:9"
REFUSED = rf"singletree: no server at {NOBODY} \(.+\); start one with `singletree serve`\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    install = [*PIP, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    return folder


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        packed = {name for name in opened.namelist() if ".dist-info/" not in name}
    written = {
        f"singletree/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == written


def test_the_installed_library_parses_with_no_dependency_at_hand(installed: Path) -> None:
    # -I and -S keep this environment's own packages, and our source, out of reach.
    run = [sys.executable, "-I", "-S", "-c", PROGRAM, str(installed)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 'I look. ls {"path": "."}\n'


def of_extras() -> set[str]:
    """The modules of the packages that only extras bring, but for those that the library's packages need themselves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    wanted = [plain_name(each) for name, extra in extras if name != "dev" for each in extra]
    names = {*wanted} - {"huggingface-hub", "singletree"}
    distributions = packages_distributions().items()
    return {module for module, owners in distributions if names & {*map(plain_name, owners)}}


def plain_name(requirement: str) -> str:
    return re.split(r"[\[<>=;]", requirement)[0].lower().replace("_", "-")


@pytest.mark.parametrize(
    ("command", "status", "printed"),
    [
        (["explain", "--base-url", NOBODY], 1, REFUSED),
        (["tail", "--base-url", NOBODY], 1, REFUSED),
        (["sessions", "cost", "--base-url", NOBODY], 1, REFUSED),
        (["sessions", "drain", "a", "--to", "b", "--base-url", NOBODY], 1, REFUSED),
        (["sessions", "list", "."], 0, "id +tokens .+\n"),
        (["key", "alice"], 0, r'\["alice"\]\nsha256 = \["[0-9a-f]{64}"\]\n\nkey +st-\S+\n'),
        (["completion", "bash"], 0, r"# Bash completion for singletree\n(.*\n)+"),
        (["serve", "--help"], 0, r"Usage: singletree serve (.*\n)+"),
        (["serve"], 1, r"singletree: this command needs the package \w+: pip install 'singletree\[all\]'\n"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_without_extras_a_command_works_or_names_what_to_install(
    command: list[str], status: int, printed: str, installed: Path, tmp_path: Path
) -> None:
    assert {"starlette", "prometheus_client", "httptools", "uvicorn"} <= of_extras()
    run = [sys.executable, "-c", COMMAND, str(installed), " ".join(of_extras()), *command]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert re.fullmatch(printed, done.stdout + done.stderr), done.stdout + done.stderr
