"""Real harnesses do a real task: reason, run a shell command, read a file, answer."""

from __future__ import annotations

import pytest

from clients.conftest import Perform, Workspace
from clients.harness import HARNESSES, Harness
from clients.scenarios import ANSWER, COMMAND, PRINTED
from clients.scripts import STYLES, Style
from clients.turns import read, shell, text_for_user, thought

every_harness = pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.title)
every_style = pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)


@every_harness
@every_style
def test_one_call_a_turn(ran: Perform, harness: Harness, style: Style, workspace: Workspace) -> None:
    turns = (
        (thought("I run the command first."), shell(COMMAND)),
        (thought("Now the notes."), text_for_user("I read the notes."), read()),
        (thought("I know both."), text_for_user(ANSWER)),
    )
    done = ran(harness, style, turns)
    done.went_well(ANSWER, generations=3)
    done.came_back(harness)
    assert PRINTED in done.added(1)
    assert workspace.secret in done.added(2)


@every_harness
@every_style
def test_two_calls_and_two_thoughts_in_one_turn(
    ran: Perform, harness: Harness, style: Style, workspace: Workspace
) -> None:
    calls = (
        thought("I run the command first."),
        shell(COMMAND),
        thought("And read the notes."),
        read(),
    )
    done = ran(harness, style, (calls, (thought("I know both."), text_for_user(ANSWER))))
    done.went_well(ANSWER, generations=2)
    done.came_back(harness)
    in_order = [
        "I run the command first.",
        COMMAND,
        "And read the notes.",
        "notes.txt",
        PRINTED,
        workspace.secret,
    ]
    added = done.added(1)
    assert sorted(in_order, key=added.index) == in_order, added
