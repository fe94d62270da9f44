"""Real harnesses do a real task: reason, run a shell command, read a file, answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path

import pytest

from clients.conftest import Workspace
from clients.harness import HARNESSES, Harness, Outcome, Task, run
from clients.scripts import STYLES, Style, think
from clients.served import MODEL, Play, Server

# The shell works it out: its result stands neither in the prompt nor in the call.
COMMAND = "echo product-$((6 * 7))"
PRINTED = "product-42"
ANSWER = "The command printed product-42, and I have read the notes."


class Ran:
    """A task that a harness was given, and what came of it on both sides."""

    def __init__(self, outcome: Outcome, plays: list[Play]) -> None:
        self.outcome = outcome
        self.plays = plays

    def went_well(self, generations: int) -> None:
        """Nobody complained, nothing was asked twice, and the last word is the model's."""
        assert self.outcome.complaints == [], self.outcome.output
        assert [play.finish for play in self.plays] == ["stop"] * generations, self.outcome.output
        assert self.outcome.answer == ANSWER, self.outcome.output

    def came_back(self, harness: Harness) -> None:
        """Each prompt holds the very tokens that were generated on the one before. Where the harness only appends, it
        begins with that one and those: all of an engine's cache is reused.
        """
        for before, after in pairwise(self.plays):
            if harness.appends:
                cached = before.prompt_token_ids + before.token_ids
                assert after.prompt_token_ids[: len(cached)] == cached
            else:
                assert _packed(before.token_ids) in _packed(after.prompt_token_ids)

    def added(self, turn: int) -> str:
        """What ``turn`` was told beyond what it has in common with the turn before it."""
        before, after = self.plays[turn - 1].prompt, self.plays[turn].prompt
        return after[len(commonprefix((before, after))) :]  # noqa: RUF071 (by character is what is meant)


def _packed(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


@pytest.fixture
def ran(
    server: Callable[[Style], Server], workspace: Workspace, installed: Path, tmp_path: Path
) -> Callable[[Harness, Style, Sequence[str]], Ran]:
    """Runs a harness while the model says ``turns``, one a request."""

    def of(harness: Harness, style: Style, turns: Sequence[str]) -> Ran:
        serving = server(style)
        names = [f"{secrets.token_hex(4)}-{number}" for number in range(len(turns))]
        for name, text in zip(names, turns, strict=True):
            (serving.scripts / f"{name}.txt").write_text(text, encoding="utf-8")
        prompt = f"Run the command, read notes.txt, then answer. [[script:{','.join(names)}]]"
        home = tmp_path / "home"
        home.mkdir()
        task = Task(serving.url, MODEL, prompt, home, workspace.folder)
        outcome = run(harness, task)
        # Side requests, such as for a title, quote the prompt and so play the script too; they have no tools.
        return Ran(outcome, [play for play in serving.plays(names) if "<tools>" in play.prompt])

    return of


Run = Callable[[Harness, Style, Sequence[str]], Ran]

every_harness = pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.title)
every_style = pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)


@every_harness
@every_style
def test_one_call_a_turn(ran: Run, harness: Harness, style: Style, workspace: Workspace) -> None:
    turns = (
        think("I run the command first.") + style.call(*harness.shell(COMMAND)),
        think("Now the notes.") + "I read the notes.\n" + style.call(*harness.read(workspace.notes)),
        think("I know both.") + ANSWER,
    )
    done = ran(harness, style, turns)
    done.went_well(generations=3)
    done.came_back(harness)
    assert PRINTED in done.added(1)
    assert workspace.secret in done.added(2)


@every_harness
@every_style
def test_two_calls_and_two_thoughts_in_one_turn(
    ran: Run, harness: Harness, style: Style, workspace: Workspace
) -> None:
    first = think("I run the command first.") + style.call(*harness.shell(COMMAND))
    second = think("And read the notes.") + style.call(*harness.read(workspace.notes))
    done = ran(harness, style, (f"{first}\n{second}", think("I know both.") + ANSWER))
    done.went_well(generations=2)
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
