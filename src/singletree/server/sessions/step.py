"""One request of a session, and how its prompt continues the session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from msgspec import Struct, structs

from singletree.engines.engine import Route
from singletree.engines.outlook import Outlook
from singletree.events import FinishReason
from singletree.owners import owned_id
from singletree.request_options import Change
from singletree.server.sessions.costs import Cost, Fault

Course = Literal["first", "appended", "back", "broken"]
"""How a prompt continues its session. ``first``: it begins a conversation. ``appended``: it contains all of the
recorded prompt and turn. ``back``: it continues an earlier turn. ``broken``: it lacks tokens that it should contain.
"""


@dataclass(frozen=True, slots=True)
class Break:
    """A prefix break: where and why a prompt does not continue the one before.

    Attributes:
        cause: the name of its likely cause; ``reason`` describes it, ``cure`` is what helps.
        message: index of the first message that differs, from 0; None where it is not known.
        role: its role; ``tools`` for the list of tools.
        before: excerpt of the text that both prompts have, up to the break.
        was, now: excerpts of the text after the break, in the earlier prompt and in the new one.
        lost: number of tokens that should have matched and did not.
        headers: number of headers of the assistant's turns before the break; None where they were not counted.
        change: what changed, in the words of the vendors' cache diagnostics.
        fault: through whose fault the tokens behind it are read again.
    """

    cause: str
    reason: str
    cure: str
    message: int | None
    role: str
    before: str
    was: str
    now: str
    lost: int
    headers: int | None = None
    change: Change = "messages"
    fault: Fault = "unknown"


class Step(Struct):
    """One request of a session.

    Attributes:
        session: the session's key.
        at: unix time in seconds.
        record_number: number of its conversation's record in the session, from 1.
        matched: number of tokens in the common prefix of the prompt and its record.
        lost: number of tokens that should have matched and did not.
        explain: finds out why the prompt does not continue the session; None where it does, and once it was asked. It
            takes longer than the comparison, so it runs when somebody reads ``broken``: after the engine was asked.
        cached: number of prompt tokens in the engine's prefix cache; None until the engine reports it.
        route: which of several engines generated it, with how many cached tokens expected; None where there is one.
        first_seconds, seconds: from the request's arrival to its first event, and to its end.
        payer: the session and the agent in it that the request counts for (``CostSums.place``).
        cost: what it cost; None until its end.
        outlook: what its conversation will do next; None where no engine reads it.
        weights: the versions of the model's weights that generated it; empty where the engine reports none.
    """

    session: str
    at: float
    model: str
    record_number: int
    course: Course
    prompt_tokens: int
    matched: int
    lost: int = 0
    explain: Callable[[], Break] | None = None
    generated: int = 0
    cached: int | None = None
    route: Route | None = None
    first_seconds: float | None = None
    seconds: float | None = None
    ended: FinishReason | None = None
    owner: str = ""
    payer: tuple[str, str] = ("", "")
    cost: Cost | None = None
    weights: str = ""
    outlook: Outlook | None = None
    _broken: Break | None = None

    @property
    def broken(self) -> Break | None:
        explain = self.explain
        if explain is not None:
            # In this order: the inspector reads steps in a thread.
            self._broken = explain()
            self.explain = None
        return self._broken

    def without_excerpts(self) -> Step:
        """Return the step without texts of prompts."""
        broken = self.broken
        return (
            self
            if broken is None
            else structs.replace(self, _broken=replace(broken, before="", was="", now=""))
        )

    @property
    def place(self) -> str:
        return owned_id(self.owner, self.session) if self.owner else self.session

    @property
    def new(self) -> int:
        """Return the number of tokens to prefill if the engine has cached all matched tokens."""
        return self.prompt_tokens - self.matched

    def encode_receipt(self) -> dict[str, Any] | None:
        """Return the receipt of the turn as JSON values: for headers, records, reports and the inspector."""
        if self.cost is None:
            return None
        session, agent = self.payer
        worker = self.route.worker if self.route else ""
        who = {"session": session, "agent": agent, "engine": worker, "weight_version": self.weights}
        return {**self.cost.encode(), **{name: value for name, value in who.items() if value}}
