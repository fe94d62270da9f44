"""A real harness's session is recorded, becomes a timeline, and is sent again as a load test."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.conftest import Flags, Perform
from clients.harness import HARNESSES, SINGLETREE, Harness
from clients.scenarios import ANSWER, COMMAND
from clients.scripts import HERMES, Style
from clients.served import Server
from clients.turns import said, shell, thought

RECORDED = tuple(harness for harness in HARNESSES if harness.title in ("pi-chat", "codex"))


@pytest.mark.parametrize("harness", RECORDED, ids=lambda harness: harness.title)
def test_a_session_is_recorded_and_sent_again(
    ran: Perform, server: Callable[[Style, Flags], Server], harness: Harness, tmp_path: Path
) -> None:
    path, out = tmp_path / "trace.jsonl", tmp_path / "timeline.json"
    flags = ("--trace-path", str(path))
    turns = ((thought("I run the command."), shell(COMMAND)), (thought("I know it."), said(ANSWER)))
    ran(harness, HERMES, turns, flags).went_well(ANSWER, generations=2)
    running = server(HERMES, flags)

    subprocess.run(
        [str(SINGLETREE), "trace", "perfetto", str(path), "--output", str(out)], check=True, timeout=60
    )
    events = json.loads(out.read_text())["traceEvents"]
    assert sum(event.get("cat") == "request" for event in events) >= 2
    assert sum(event["ph"] == "b" for event in events) == 1, "the shell ran once"

    command = [
        str(SINGLETREE),
        "trace",
        "replay",
        str(path),
        "--base-url",
        running.url,
        "--speed",
        "100",
        "--json",
    ]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["errors"] == {}
    assert found["requests"] >= 2
    assert found["prompt_tokens"] >= 0.8 * found["recorded"]["prompt_tokens"]
