"""What a check is, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from singletree.checking.endpoint import Endpoint
from singletree.checking.returned_turns import TurnProtocol

Verdict = Literal["pass", "fail", "not applicable", "undecided"]
ALL = ("messages", "chat", "responses")


class Inconclusive(Exception):
    """Ends a check with ``verdict`` and a reason."""

    verdict: Verdict


class Failed(Inconclusive):
    """The endpoint has the fault."""

    verdict = "fail"


class NotApplicable(Inconclusive):
    """The endpoint lacks what is checked, and nobody asks for it."""

    verdict = "not applicable"


class Undecided(Inconclusive):
    """It cannot be told from outside."""

    verdict = "undecided"


Run = Callable[[Endpoint, TurnProtocol], str]
"""Returns what was seen if the check passes, and raises an Inconclusive otherwise."""


@dataclass(frozen=True, slots=True)
class Check:
    """One demand on an endpoint.

    Attributes:
        name: for ``--only`` and ``--skip``.
        title: what has to hold.
        users: what users see when it does not.
        reference: the page, the client or the issue that asks for it.
        protocols: where it is checked; with ``once`` on the first of them that the endpoint has.
    """

    name: str
    title: str
    users: str
    reference: str
    run: Run
    protocols: tuple[str, ...] = ALL
    once: bool = False


def demand(
    users: str, reference: str, protocols: tuple[str, ...] = ALL, *, once: bool = False
) -> Callable[[Run], Check]:
    """Make a check of a function: its name without ``check_``, and its docstring as what has to hold."""

    def make(run: Run) -> Check:
        name = run.__name__.removeprefix("check_").replace("_", "-")
        title = (run.__doc__ or "").rstrip(".")
        return Check(name, title[:1].lower() + title[1:], users, reference, run, protocols, once)

    return make
