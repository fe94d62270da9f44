"""Real harnesses on Responses show what the model thinks, and send none of it back as words."""

from __future__ import annotations

import pytest

from clients.conftest import Perform
from clients.harness import HARNESSES, Harness
from clients.scenarios import ANSWER, COMMAND
from clients.scripts import HERMES
from clients.turns import shell, text_for_user, thought

THOUGHT = "Nobody else would run this command first."
ON_RESPONSES = [harness for harness in HARNESSES if harness.speaks == "responses"]
SHOW_THOUGHTS = ("codex", "copilot-responses", "pi-responses")
"""Those that ask for a summary and print it, and Copilot. OpenClaw asks and prints none; the others do not ask."""


@pytest.mark.parametrize("harness", ON_RESPONSES, ids=lambda harness: harness.title)
def test_a_thought_is_shown_as_a_thought(ran: Perform, harness: Harness) -> None:
    turns = ((thought(THOUGHT), shell(COMMAND)), (thought("I know it."), text_for_user(ANSWER)))
    done = ran(harness, HERMES, turns)
    done.went_well(ANSWER, generations=2)
    done.came_back(harness)
    assert THOUGHT not in done.outcome.answer
    assert (THOUGHT in done.outcome.output) == (harness.title in SHOW_THOUGHTS), done.outcome.output
