"""No harness runs a tool call that is not complete: each incomplete call would make a file, and none does.

``singletree launch`` gives live arguments to some of the harnesses; the others see calls that are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from clients.conftest import Perform, Workspace
from clients.harness import FEWER, HARNESSES, Harness
from clients.scripts import HERMES, STYLES, Style
from clients.turns import (
    Fault,
    Turn,
    broken_shell,
    cut_in_name,
    cut_shell,
    shell,
    text_for_user,
    thought,
)

ANSWER = "All is done."
MOST_GENERATIONS = 12
"""What a harness may ask for: each turn, and the retries of those that were cut."""

_LIMITED = frozenset({"length", "first_of_two"})
NOT_RUN = {"openclaw": _LIMITED, "pi": _LIMITED, "pi-messages-0.74.2": frozenset[str]()}
"""Files of complete calls that a harness does not run, by name or title: none of an answer that the limit cut."""

MADE, UNMADE = "complete-{}", "incomplete-{}"


def complete(name: str) -> Turn:
    """A call that makes its file."""
    return (shell(f"touch {MADE.format(name)}"),)


def cut(name: str) -> Turn:
    """A call that ends inside its arguments."""
    return (cut_shell(f"touch {UNMADE.format(name)}"),)


def broken(name: str) -> Turn:
    """A call whose arguments break."""
    return (broken_shell(f"touch {UNMADE.format(name)}"),)


class Case(NamedTuple):
    """What the model says behind its first turn, which makes ``complete-first``.

    Attributes:
        made: what is made besides.
        may_be_made: what some harnesses never come to, as they end at an error or at a cut answer.
    """

    name: str
    turns: Sequence[Turn]
    made: tuple[str, ...] = ()
    may_be_made: tuple[str, ...] = ()


ENDING: Turn = (text_for_user(ANSWER),)
IN_ONE_RUN = Case(
    "in_one_run",
    (
        (thought("Two."), *complete("broken"), *broken("broken")),
        (thought("Three."), *complete("length"), *cut("length"), Fault.LENGTH),
        # Asked for again, the turn ends where the engine died, as if the model had no more to say.
        (thought("Four."), *complete("dies"), *cut("dies"), Fault.FAIL),
        ENDING,
    ),
    ("broken", "length"),
    ("dies",),
)
EACH = (
    Case("broken", ((thought("Now."), *broken("call")), ENDING)),
    Case("broken_then_complete", ((*broken("call"), *complete("second")), ENDING), ("second",)),
    Case("length", ((thought("Now."), *cut("call"), Fault.LENGTH), ENDING)),
    Case("length_in_name", ((thought("Now."), cut_in_name(), Fault.LENGTH), ENDING)),
    Case("length_between", ((*complete("first_of_two"), Fault.LENGTH), ENDING), ("first_of_two",)),
    Case("stop", ((thought("Now."), *cut("call")), ENDING)),
    Case("dies", ((thought("Now."), *cut("call"), Fault.FAIL), ENDING)),
)


def made(folder: Path) -> set[str]:
    """The files that calls made."""
    return {file.name for file in folder.iterdir() if file.name.startswith(("complete-", "incomplete-"))}


def check(ran: Perform, style: Style, harness: Harness, case: Case, folder: Path) -> None:
    done = ran(harness, style, [complete("first"), *case.turns])
    not_run = NOT_RUN.get(harness.title, NOT_RUN.get(harness.name, frozenset()))
    expected = {MADE.format(name) for name in ("first", *case.made) if name not in not_run}
    possible = expected | {MADE.format(name) for name in case.may_be_made}
    assert expected <= made(folder) <= possible, done.outcome.output
    assert len(done.plays) <= MOST_GENERATIONS, "it gives up, or goes on"


@pytest.mark.parametrize("harness", FEWER, ids=lambda harness: harness.title)
def test_no_harness_runs_an_incomplete_call(
    ran: Perform, harness: Harness, workspace: Workspace
) -> None:  # C15
    check(ran, HERMES, harness, IN_ONE_RUN, workspace.folder)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
@pytest.mark.parametrize("case", [IN_ONE_RUN, *EACH], ids=lambda case: case.name)
@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.title)
def test_none_runs_one_however_it_is_cut(
    ran: Perform, harness: Harness, case: Case, style: Style, workspace: Workspace
) -> None:
    check(ran, style, harness, case, workspace.folder)
