"""A real harness's session is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.conftest import Perform
from clients.harness import HARNESSES, Harness
from clients.scenarios import ANSWER, COMMAND
from clients.scripts import HERMES
from clients.turns import shell, text_for_user, thought

RECORDED = tuple(harness for harness in HARNESSES if harness.title in ("pi-chat", "codex"))


@pytest.mark.parametrize("harness", RECORDED, ids=lambda harness: harness.title)
def test_a_session_is_recorded(ran: Perform, harness: Harness, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    flags = ("--trace-path", str(path))
    turns = ((thought("I run the command."), shell(COMMAND)), (thought("I know it."), text_for_user(ANSWER)))
    ran(harness, HERMES, turns, flags).went_well(ANSWER, generations=2)
    kinds = [json.loads(line)["event_type"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert kinds.count("request_end") >= 2
    assert kinds.count("tool_end") == 1, "the shell ran once"
