"""``singletree sessions cost``, over the very answers of a server."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from singletree.cli import main
from singletree.prompts.replay.turn_memory import TurnMemory

from .agent_traffic import CALL, LAYOUT, Agent
from .serving import serving

SESSIONS = "/v1/singletree/sessions"


@pytest.fixture
async def reports(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a server answers after a session with two agents, whose last request broke."""
    async with serving({"main": CALL, "sub": "Found."}, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        agent = Agent(served, "[[script:main]] Go.", {"x-claude-code-session-id": "s"})
        await agent.ask()
        await Agent(served, "[[script:sub]] Look.", agent.headers | {"x-claude-code-agent-id": "a1"}).ask()
        agent.messages[0]["content"] = "[[script:main]] Go on."
        await agent.ask()
        answers = {path: await served.client.get(path) for path in (SESSIONS, f"{SESSIONS}/s")}

    def urlopen(request: Any, timeout: float) -> io.BytesIO:
        return io.BytesIO(answers[request.full_url.removeprefix("http://127.0.0.1:8000")].body)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    return {path: answer.json for path, answer in answers.items()}


def test_the_sums_are_printed(reports: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    main(["sessions", "cost"])
    head, whole, *agents, everything = capsys.readouterr().out.splitlines()
    cost = reports[f"{SESSIONS}/s"]["cost"]
    assert head.split()[:3] == ["turns", "prompt", "cached"]
    assert whole.split()[:2] == ["3", f"{cost['prompt_tokens']:,}"]
    assert whole.endswith("  s")
    assert {line.rpartition("  ")[2] for line in agents} == {"main agent", "a1"}
    assert everything.split()[:2] == whole.split()[:2]


def test_a_session_is_printed_with_what_was_read_again(
    reports: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["sessions", "cost", "s"])
    lines = capsys.readouterr().out.splitlines()
    again = reports[f"{SESSIONS}/s"]["cost"]["reread_by_fault"]["harness"]
    assert f"tokens read again, by fault: harness {again}" in lines
    assert lines[-1] == f"  request 2 of this agent: harness {again} (message_changed)"


def test_as_json(reports: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    main(["sessions", "cost", "s", "--json"])
    assert json.loads(capsys.readouterr().out) == reports[f"{SESSIONS}/s"]["cost"]
    main(["sessions", "cost", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["sessions"]) == ["s"]
    assert printed["keys"] == reports[SESSIONS]["keys"]
