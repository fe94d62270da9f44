"""A budget that is used up in the middle of a task: the harness tells its user why it ended, and does not ask again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clients.codex import WEBSOCKETS, Codex
from clients.conftest import Flags, Perform, Workspace
from clients.harness import CLAUDE, FEWER, Harness
from clients.scripts import HERMES, Style
from clients.served import Server
from clients.turns import shell, text_for_user, thought

MADE = "made-by-the-call"
TURNS = (
    (thought("I make the file."), shell(f"touch {MADE}")),
    (text_for_user("All is done."),),
)


@pytest.mark.parametrize("harness", FEWER, ids=lambda harness: harness.title)
def test_a_harness_ends_and_says_why(ran: Perform, harness: Harness, workspace: Workspace) -> None:
    done = ran(harness, HERMES, TURNS, ("--session-budget", "generated=1"))
    assert "the budget of this session is used up: generated" in done.outcome.output
    status = "402" if harness.speaks == "messages" else "400"
    # OpenCode asks for a title besides, in the same session, which may use the budget up before.
    most = 2 if harness.name == "opencode" else 1
    assert list(done.refused) == [status], done.refused
    assert done.refused[status] <= most, "it asks again and again"
    assert done.outcome.answer != "All is done."
    if harness.name != "opencode":
        assert done.turns == [0]
        assert (workspace.folder / MADE).exists(), "the call of the turn that used it up is made"


def test_claude_code_takes_receipts_and_lowers_its_budget(ran: Perform, workspace: Workspace) -> None:
    """By headers of its own; the budget is large enough."""
    asked = "x-singletree-receipt: 1\nx-singletree-budget: generated=1M"
    done = ran(CLAUDE, HERMES, TURNS, settings={"ANTHROPIC_CUSTOM_HEADERS": asked})
    done.went_well("All is done.", generations=2)


def test_codex_ends_over_a_websocket_too(
    server: Callable[[Style, Flags], Server], workspace: Workspace, tmp_path: Path
) -> None:
    codex = Codex(server(HERMES, ("--session-budget", "generated=1")), workspace, tmp_path / "home")
    codex.home.mkdir()
    call = HERMES.call("exec_command", {"cmd": f"touch {MADE}"})
    done = codex.run(f"Make the file. {codex.script(call, 'All is done.')}", *WEBSOCKETS)
    assert "the budget of this session is used up: generated" in done.outcome.output
    assert done.paths("POST") == [], "it does not try the other way"
    assert len(done.requests) == 2, "it does not ask again"
    assert (workspace.folder / MADE).exists()
