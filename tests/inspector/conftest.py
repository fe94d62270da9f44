"""What the tests of the inspector's page share: a server with sessions in it, and a real Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from clients.conftest import TOKENIZER, installed
from clients.served import Server, serving
from inspector import install, traffic

__all__ = ["installed"]

CONTENT = ("--inspect", "--inspect-content", "--default-thinking", "on")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}

OpenPage = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    if reason := install.missing():
        pytest.skip(reason)
    with install.playwright().sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=install.chromium(), args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def start_server(
    installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[tuple[str, ...]], Server]]:
    """Starts servers with flags; each is started once."""
    started: dict[tuple[str, ...], Server] = {}
    with ExitStack() as running:

        def start(flags: tuple[str, ...]) -> Server:
            if flags not in started:
                serve = serving(installed / TOKENIZER, tmp_path_factory.mktemp("inspected"), flags)
                started[flags] = running.enter_context(serve)
            return started[flags]

        yield start


@pytest.fixture(scope="session")
def server(start_server: Callable[[tuple[str, ...]], Server]) -> Server:
    """A server that keeps texts."""
    return start_server(CONTENT)


@pytest.fixture(scope="session")
def sessions(server: Server) -> Mapping[str, str]:
    """The ids of recorded sessions by name: ``broken`` with a break and a sub-agent, ``good``, ``hostile``."""
    traffic.session_with_break(server, "broken")
    agent = traffic.Agent(server, "good")
    traffic.work(agent, 8)
    agent.close()
    traffic.hostile_session(server, "hostile")
    names = ("broken", "good", "hostile", "broken/helper-1")
    return {name: traffic.session_id(server, name) for name in names}


@pytest.fixture
def open_page(browser: Any, server: Server) -> Iterator[OpenPage]:
    """Opens an address of the page; no page may log an error, violate its policy or open a dialog."""
    problems: list[str] = []
    with ExitStack() as opened:

        def open_at(address: str = "#/sessions", *, at: str = "", expected: str = "", **options: Any) -> Any:
            context = browser.new_context(viewport=options.pop("viewport", DESKTOP), **options)
            opened.callback(context.close)
            context.set_default_timeout(15_000)
            page = context.new_page()

            def log(message: Any) -> None:
                if message.type in ("error", "warning") and not (expected and expected in message.text):
                    problems.append(message.text)

            page.on("console", log)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("dialog", lambda dialog: problems.append(f"dialog {dialog.message}"))
            page.goto(f"{at or server.url + '/inspect'}{address}")
            return page

        yield open_at
    assert problems == []
