"""``singletree explain``, over the very answers of a server."""

from __future__ import annotations

import io
import json
from email.message import Message
from typing import Any
from urllib.error import HTTPError

import pytest

from singletree.cli import main
from singletree.server.settings.config import Config

from .memory import Client, Reply
from .test_sessions import Harness, remembering

SESSIONS = "/v1/singletree/sessions"


async def answers(client: Client, key: dict[str, str]) -> dict[str, Reply]:
    paths = [SESSIONS, f"{SESSIONS}/s", f"{SESSIONS}/gone", f"{SESSIONS}/"]
    return {path: await client.get(path, headers=key) for path in paths}


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody answers at the default address as a server does after three requests, the last of which broke."""
    async with remembering(config=Config(api_key=("k",))) as served:
        main = Harness(served, "hi", {"x-session-id": "s", "x-api-key": "k"})
        await main.go_on("one\x1b[31m")
        await main.go_on("two")
        main.messages[0]["content"] = "h\x1b[31mo"
        await main.go_on("three")
        known = await answers(served.client, {"x-api-key": "k"})
        refused = await answers(served.client, {})

    def urlopen(request: Any, timeout: float) -> io.BytesIO:
        assert timeout > 0
        url, bearer = request.full_url, request.get_header("Authorization")
        path = url.removeprefix("http://127.0.0.1:8000").split("?")[0]
        reply = (known if bearer == "Bearer k" else refused)[path]
        if reply.status != 200:
            raise HTTPError(url, reply.status, "", Message(), io.BytesIO(reply.body))
        return io.BytesIO(reply.body)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)


def run(*arguments: str) -> int:
    try:
        main(
            ["explain", *arguments, "--api-key", "k"]
            if "--api-key" not in arguments
            else ["explain", *arguments]
        )
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.mark.usefixtures("served")
def test_sessions_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["last", "requests", "tokens", "breaks", "lost", "session"]
    assert (line.split()[1], line.split()[3], line.split()[-1]) == ("3", "1", "s")


@pytest.mark.usefixtures("served")
def test_a_session_is_reported_turn_by_turn(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("s") == 0
    printed = capsys.readouterr().out
    assert "session s, model org/test-model: 3 requests" in printed
    assert "a new conversation" in printed
    assert "continues the last prompt and turn completely" in printed
    assert "BREAK in message 0 (user)" in printed
    assert "message_changed" in printed
    assert "was     i<|im_end|>" in printed
    assert "is      \\x1b[31mo<|im_end|>" in printed
    assert "\x1b" not in printed


@pytest.mark.usefixtures("served")
def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("s", "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert [step["course"] for step in value["steps"]] == ["first", "appended", "broken"]
    assert value["steps"][-1]["break"]["now"].startswith("\x1b[31mo")


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gone"], "session 'gone' does not exist"),
        (["s", "--api-key", "wrong"], "give --api-key"),
        (["s", "--url", "nowhere"], "--base-url 'nowhere' is not a URL"),
    ],
)
def test_what_is_wrong_is_reported(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b'{"data": 5}', b"\xff", b'{"data": [{}]}', b'{"data": [{"last_at": "x"}]}']
)
def test_an_answer_of_somebody_else(
    body: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: io.BytesIO(body))
    assert run() == 1
    assert "singletree" in capsys.readouterr().err
