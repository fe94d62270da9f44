"""A real harness's session is recorded, and sent again as a load test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.trace_records import read_records

from clients.conftest import Flags, Perform
from clients.harness import HARNESSES, Harness
from clients.scenarios import ANSWER, COMMAND
from clients.scripts import HERMES, Style
from clients.served import Server
from clients.turns import shell, text_for_user, thought
from source import ROOT

RECORDED = tuple(harness for harness in HARNESSES if harness.title in ("pi-chat", "codex"))


@pytest.mark.parametrize("harness", RECORDED, ids=lambda harness: harness.title)
def test_a_session_is_recorded_and_sent_again(
    ran: Perform, server: Callable[[Style, Flags], Server], harness: Harness, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    flags = ("--trace-path", str(path))
    turns = ((thought("I run the command."), shell(COMMAND)), (thought("I know it."), text_for_user(ANSWER)))
    ran(harness, HERMES, turns, flags).went_well(ANSWER, generations=2)
    running = server(HERMES, flags)

    records = read_records([path])
    assert sum(record.request is not None for record in records) >= 2
    assert sum(record.tool is not None for record in records) == 1, "the shell ran once"

    command = [
        sys.executable,
        "-m",
        "benchmarks.trace_replay",
        str(path),
        "--base-url",
        running.url,
        "--speed",
        "100",
        "--json",
    ]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True, cwd=ROOT)
    found = json.loads(done.stdout)
    assert found["errors"] == {}
    assert found["requests"] >= 2
    assert found["prompt_tokens"] >= 0.8 * found["recorded"]["prompt_tokens"]
