"""``singletree sessions fork``, ``compare`` and ``drain``, on a server in memory."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest

from singletree.checking.returned_turns import PROTOCOLS, as_given
from singletree.cli import main

from .test_changed_model import Harness, Stage, stage

Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command against a stage, and returns its exit status and what it printed."""
    monkeypatch.setenv("COLUMNS", "100")

    async def command(served: Stage, *arguments: str) -> tuple[int, str]:
        loop = asyncio.get_running_loop()

        def urlopen(request: Any, timeout: float) -> io.BytesIO:
            path = urlsplit(request.full_url).path
            asked = served.client.request(request.get_method(), path, request.data or b"")
            reply = asyncio.run_coroutine_threadsafe(asked, loop).result()
            if reply.status != 200:
                raise HTTPError(request.full_url, reply.status, "", Message(), io.BytesIO(reply.body))
            return io.BytesIO(reply.body)

        def work() -> int:
            try:
                main(["sessions", *arguments])
            except SystemExit as stop:
                return int(stop.code or 0)
            return 0

        monkeypatch.setattr("urllib.request.urlopen", urlopen)
        status = await asyncio.to_thread(work)
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return command


async def test_a_fork_is_shown_and_compared(run: Run, tmp_path: Path) -> None:
    async with stage(tmp_path, 3) as served:
        harness = Harness(PROTOCOLS[0], as_given, 3)
        for _ in range(3):
            await harness.go_on(served.client, "alpha")
        status, printed = await run(served, "fork", "task", "--at", "0", "--model", "beta")
        assert (status, "at is 0; the session has turns 1 to" in printed) == (1, True)
        status, printed = await run(served, "fork", "task", "--at", "2", "--model", "beta")
        assert status == 0, printed
        assert "(Thought 1.)\nWords 1.\nweather {" in printed
        assert "singletree sessions compare task task@2:beta" in printed
        status, printed = await run(served, "compare", "task", "task@2:beta")
        assert status == 0, printed
        lines = printed.splitlines()
        assert lines[0].split() == ["task", "|", "task@2:beta"]
        assert "alpha: turns 3, requests 3; 376 tokens of" in lines[1]
        assert "| beta: turns 2, requests 1; 506 tokens of" in lines[1]
        assert "tokens of prefill" in printed
        assert printed.count("Words 1.") == 2
        assert printed.count("Words 2.") == 1
        status, printed = await run(served, "compare", "task", "task@2:beta", "--json")
        one, two = json.loads(printed)
        assert [len(each["turns"]["data"]) for each in (one, two)] == [3, 2]
        assert (await run(served, "fork", "task", "--model", "gamma", "--json"))[0] == 0
        # The same fork once more: its first run counts for no other turn.
        await run(served, "fork", "task", "--at", "2", "--model", "beta")
        status, printed = await run(served, "compare", "task", "task@2:beta")
        assert "| beta: turns 2, requests 1; " in printed.splitlines()[1]


async def test_a_session_and_a_model_are_moved(run: Run, tmp_path: Path) -> None:
    async with stage(tmp_path, 4) as served:
        harness = Harness(PROTOCOLS[1], as_given, 4)
        await harness.go_on(served.client, "alpha")
        assert await run(served, "fork", "task", "--model", "beta", "--from-now") == (
            0,
            "beta answers the requests of session task from now on\n",
        )
        await harness.go_on(served.client, "alpha")
        assert await run(served, "drain", "beta", "--to", "gamma") == (
            0,
            "gamma answers the requests for beta from now on\n",
        )
        await harness.go_on(served.client, "alpha")
        assert await run(served, "drain", "beta") == (0, "beta answers the requests for beta from now on\n")
        await harness.go_on(served.client, "alpha")
        assert [step["model"] for step in await served.steps()] == ["alpha", "beta", "gamma", "beta"]


async def test_errors_have_the_cure(run: Run, tmp_path: Path) -> None:
    async with stage(tmp_path, 1) as served:
        status, printed = await run(served, "fork", "task", "--model", "beta")
        assert (status, "does not exist" in printed) == (1, True)
        status, printed = await run(served, "fork", "task", "--model", "beta", "--at", "1", "--from-now")
        assert (status, "give --at or --from-now" in printed) == (1, True)
        status, printed = await run(served, "fork", "nameless-1", "--model", "beta", "--from-now")
        assert (status, "x-session-id" in printed) == (1, True)
        status, printed = await run(served, "drain", "nope", "--to", "beta")
        assert (status, "nope" in printed) == (1, True)
