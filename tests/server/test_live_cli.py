"""``singletree tail`` and ``singletree top``, over the very answers of a server."""

from __future__ import annotations

import io
from typing import Any
from urllib.parse import quote

import pytest
from rich.console import Console

from singletree.cli import live
from singletree.cli.live import Counts, SessionWatcher, session_table, step_line
from singletree.cli.running_server import fetch

from .test_sessions import Harness, remembering

SESSIONS = "/v1/singletree/sessions"


async def looks(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, Any]]]:
    """What a watcher finds after each of three requests, the last of which broke, and after none."""
    answers: dict[str, bytes] = {}

    def urlopen(request: Any, timeout: float) -> io.BytesIO:
        assert timeout > 0
        return io.BytesIO(answers[request.full_url.removeprefix("http://127.0.0.1:8000")])

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    watcher, found = SessionWatcher("http://127.0.0.1:8000/v1", ""), []
    async with remembering() as served:
        agent = Harness(served, "hi", {"x-session-id": "s\x1b[31m" + "x" * 40})
        for text in ("one", "two", "three"):
            if text == "three":
                agent.said[0]["content"] = "ho"
            await agent.go_on(text)
            for path in (SESSIONS, "/metrics"):
                answers[path] = (await served.client.get(path)).body
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


async def test_the_screen_shows_sessions_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    await looks(monkeypatch)
    values = live._metrics("http://127.0.0.1:8000", "")
    assert values["singletree_tokens_total kind=prompt"] > 0
    later = dict(values)
    later["singletree_tokens_total kind=completion"] += 50
    later["singletree_tokens_total kind=prompt"] += 200
    later["singletree_tokens_total kind=cached"] += 150
    later["singletree_time_to_first_token_seconds_count"] += 2
    later["singletree_time_to_first_token_seconds_sum"] += 1.0
    later["singletree_requests_total status=500"] = 3
    later["singletree_routed_generations_total worker=http://a"] = 4
    later["singletree_model_state model,state=m\0loading"] = 1
    text = "".join(printed(line) for line in Counts(later, 12.0).lines(Counts(values, 10.0)))
    for shown in (
        "0 running",
        "m loading",
        "prompt 100 tokens/s",
        "cached 75%",
        "generated 25 tokens/s",
        "first token 500 ms",
        "between -",
        "3 requests failed",
        "engine http://a: 4 generations",
    ):
        assert shown in text
    sessions = fetch("http://127.0.0.1:8000", "", SESSIONS)["data"]
    table = printed(session_table(sessions, 0))
    assert "\x1b" not in table
    assert "…" in table
    assert "and 4 more" in printed(session_table(sessions * 6, 0, 3))
