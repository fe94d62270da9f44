"""The built packages, installed without a checkout: on each Python of this machine, with each extra that serves."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from source import ROOT

pytestmark = pytest.mark.deploy

UV = Path(sys.executable).with_name("uv")
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
_MESSAGE = {
    "model": "scripted",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "[[echo:It serves.]]"}],
}


def uv(*arguments: str | Path, timeout: float = 600) -> str:
    done = subprocess.run([UV, *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of a release."""
    folder = tmp_path_factory.mktemp("packages")
    runpy.run_path(str(ROOT / "deploy" / "release.py"))["build"](folder)
    return folder


def test_a_release_lists_its_packages_and_has_checksums(packages: Path) -> None:
    (listed,) = packages.glob("*.cdx.json")
    bom = json.loads(listed.read_bytes())
    assert bom["metadata"]["component"]["name"] == "singletree"
    found = {(each["name"], each["version"]) for each in bom["components"]}
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert all(f"{name}=={version} " in lock for name, version in found)
    assert {"msgspec", "starlette", "xllamacpp"} <= {name for name, _ in found}
    assert "pytest" not in {name for name, _ in found}
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=packages, check=True)


def python(version: str) -> str:
    """Return the path of a Python of ``version``, on the PATH or of pyenv; skip where this machine has none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python3")))]
    for each in found:
        # A shim of pyenv is on the PATH for versions that are not chosen, too.
        if each and subprocess.run([each, "--version"], capture_output=True, check=False).returncode == 0:
            return each
    pytest.skip(f"this machine has no Python {version}")


def install(version: str, package: Path, extra: str, folder: Path) -> Path:
    """Install ``package`` with ``extra`` in a new environment, and return the folder of its commands."""
    uv("venv", "--quiet", "--python", python(version), folder / "environment")
    commands = folder / "environment" / "bin"
    uv(
        "pip",
        "install",
        "--quiet",
        "--python",
        commands / "python",
        f"singletree{extra} @ {package.as_uri()}",
    )
    return commands


@contextmanager
def serving(commands: Path, folder: Path) -> Iterator[str]:
    """Start the scripted engine in ``folder``, and give the URL at which it is ready."""
    command = [str(commands / "singletree"), "serve", "--engine", "scripted", "--port", "0"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            assert server.stdout is not None
            printed = []
            for line in server.stdout:
                printed.append(line)
                if found := re.match(r"ready +(http://\S+)", line):
                    break
            else:
                pytest.fail("".join(printed))
            yield found[1]
        finally:
            server.terminate()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("extra", ["[serve]", "[all]"])
def test_an_installed_wheel_serves(version: str, extra: str, packages: Path, tmp_path: Path) -> None:
    (wheel,) = packages.glob("*.whl")
    commands = install(version, wheel, extra, tmp_path)
    with serving(commands, tmp_path) as url:
        request = urllib.request.Request(
            f"{url}/v1/messages", json.dumps(_MESSAGE).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["content"][0]["text"] == "It serves."
        card = subprocess.run(
            [commands / "singletree", "check", url], capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert card.returncode == 0, card.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_without_an_extra_the_library_is_installed_and_says_what_serves(
    version: str, packages: Path, tmp_path: Path
) -> None:
    (source,) = packages.glob("*.tar.gz")
    commands = install(version, source, "", tmp_path)
    first = subprocess.run(
        [commands / "singletree"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "pip install 'singletree[all]'" in first.stdout
    (tmp_path / "turn").write_text('<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>')
    parsed = subprocess.run(
        [commands / "singletree", "parse", "--family", "hermes", "--json", "turn"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert json.loads(parsed.stdout)["parts"][0]["name"] == "ls"
    for command in (["key", "alice"], ["completion", "bash"], ["sessions", "list", "."], ["serve", "--help"]):
        subprocess.run([commands / "singletree", *command], capture_output=True, cwd=tmp_path, check=True)


def test_one_line_starts_it_and_one_line_removes_it(packages: Path, tmp_path: Path) -> None:
    folders = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    environment = {**os.environ, **folders}

    def tool(*arguments: str) -> str:
        command = [str(UV), "tool", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout

    assert tool("run", "--find-links", str(packages), "singletree[all]", "--version").strip()
    tool("install", "--find-links", str(packages), "singletree[all]")
    assert shutil.which("singletree", path=folders["UV_TOOL_BIN_DIR"])
    tool("uninstall", "singletree")
    assert not any((tmp_path / "bin").iterdir())
