"""``singletree tail``, over the very answers of a server."""

from __future__ import annotations

import io
from typing import Any
from urllib.parse import quote

import pytest
from rich.console import Console

from singletree.cli.running_server import RunningServer
from singletree.cli.session_commands import SessionWatcher, step_line

from .test_sessions import Harness, remembering

SESSIONS = "/v1/singletree/sessions"


async def looks(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, Any]]]:
    """What a watcher finds after each of three requests, the last of which broke, and after none."""
    answers: dict[str, bytes] = {}

    def urlopen(request: Any, timeout: float) -> io.BytesIO:
        assert timeout > 0
        return io.BytesIO(answers[request.full_url.removeprefix("http://127.0.0.1:8000")])

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    watcher, found = SessionWatcher(RunningServer(base_url="http://127.0.0.1:8000/v1")), []
    async with remembering() as served:
        agent = Harness(served, "hi", {"x-session-id": "s\x1b[31m" + "x" * 40})
        for text in ("one", "two", "three"):
            if text == "three":
                agent.messages[0]["content"] = "ho"
            await agent.go_on(text)
            answers[SESSIONS] = (await served.client.get(SESSIONS)).body
            for session in served.service.sessions:
                path = f"{SESSIONS}/{quote(session.key, safe='/')}"
                answers[path] = (await served.client.get(path)).body
            found.append(list(watcher.new_steps()))
    found.append(list(watcher.new_steps()))
    return found


def printed(value: Any) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(value)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


async def test_each_request_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await looks(monkeypatch)
    assert [len(steps) for steps in found] == [1, 1, 1, 0]
    lines = [printed(step_line(*steps[0])) for steps in found[:3]]
    assert "first" in lines[0]
    assert "appended" in lines[1]
    assert "broken" in lines[2]
    assert "lost" in lines[2]
    assert all("took" in line for line in lines)
    assert "\x1b" not in "".join(lines)
    assert all(line.count("\n") == 1 for line in lines)
