"""``singletree inspect``, over the very answers of a server."""

from __future__ import annotations

import asyncio
import io
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from singletree.cli import main
from singletree.inspector.turn_record import session_id

from .inspecting import API, InspectedHarness, inspected
from .memory import Client, Reply
from .serving import serving

ID = session_id("s")
PATHS = (
    f"{API}/server",
    f"{API}/export?session=s&texts=1",
    f"{API}/export?session=s&texts=0",
    f"{API}/export?session=gone&texts=1",
    "/v1/singletree/sessions/s",
)


async def _known(client: Client) -> dict[str, Reply]:
    return {path: await client.get(path) for path in PATHS}


async def _on() -> dict[str, Reply]:
    async with inspected() as served:
        await InspectedHarness(served.client).ask("cardamom")
        return await _known(served.client)


async def _off() -> dict[str, Reply]:
    async with serving({}) as served:
        return await _known(served.client)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs that the browser was told to open."""
    urls: list[str] = []
    monkeypatch.setattr("webbrowser.get", lambda: None)
    monkeypatch.setattr("webbrowser.open", urls.append)
    return urls


def _serve(monkeypatch: pytest.MonkeyPatch, known: dict[str, Reply]) -> None:
    def urlopen(request: Any, timeout: float) -> io.BytesIO:
        assert timeout > 0
        reply = known[request.full_url.removeprefix("http://127.0.0.1:8000")]
        if reply.status != 200:
            raise HTTPError(request.full_url, reply.status, "", Message(), io.BytesIO(reply.body))
        return io.BytesIO(reply.body)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)


def run(command: str, *arguments: str) -> int:
    try:
        main([command, *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_page_is_opened(
    monkeypatch: pytest.MonkeyPatch, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _serve(monkeypatch, asyncio.run(_on()))
    assert [run("inspect"), run("inspect", "s"), run("inspect", ID, "--no-open")] == [0, 0, 0]
    start = "http://127.0.0.1:8000/inspect#/sessions"
    assert opened == [start, f"{start}/{ID}"]
    assert capsys.readouterr().out.split() == [start, f"{start}/{ID}", f"{start}/{ID}"]
    assert run("inspect", "--api-key", "secret") == 0
    printed = capsys.readouterr()
    assert "the page asks for the API key" in printed.err
    assert "secret" not in printed.out + printed.err + str(opened)
    assert run("explain", "s") == 0
    assert f"inspect {start}/{ID}" in capsys.readouterr().out


def test_a_session_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _serve(monkeypatch, asyncio.run(_on()))
    file = tmp_path / "a.html"
    assert run("inspect", "--export", "s", "-o", str(file)) == 0
    assert "cardamom" in file.read_text(encoding="utf-8")
    assert run("inspect", "--export", "s", "-o", str(file), "--without-texts") == 0
    assert "cardamom" not in file.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert run("inspect", "--export", "s") == 0
    assert (tmp_path / f"singletree-{ID}.html").is_file()
    assert run("inspect", "--export", "gone") == 1
    assert "is not kept" in capsys.readouterr().err
    assert run("inspect", "--export", "s", "-o", str(tmp_path)) == 1
    assert "give a path that can be used" in capsys.readouterr().err
    assert run("inspect", "-o", "x") == 1
    assert "belong to --export" in capsys.readouterr().err


def test_a_server_without_it_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _serve(monkeypatch, asyncio.run(_off()))
    assert run("inspect") == 1
    assert "singletree serve --inspect" in capsys.readouterr().err
    assert opened == []
