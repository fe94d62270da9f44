"""One request of a session, how its prompt continues the session, and what turns cost: in tokens and seconds, with the
sums over each session, each of its agents, and each API key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import add
from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct, structs

from singletree.conversation import AgentContext
from singletree.engines.engine import Outlook, Route
from singletree.events import FinishReason
from singletree.lru import LruCache
from singletree.owners import owned_id
from singletree.request_options import Change

Fault = Literal["harness", "template", "router", "eviction", "restart", "unknown"]
"""Through whose fault tokens were read again; `docs/serving.md` has the rules."""

FAULTS: tuple[Fault, ...] = get_args(Fault)

CACHE_BLOCK = 128
"""An engine caches whole blocks, and reads the last token again: so many missing tokens are nobody's fault."""

_SESSIONS = 4096
"""Sessions with sums of their own; older ones stay in the sum of their key."""
_AGENTS = 256
"""Agents of a session with sums of their own; the sum of further ones has an empty name, as the main agent's has."""
MAIN = ""
"""The name of a session's main agent."""


class Cost(NamedTuple):
    """What one turn cost, or several together.

    Attributes:
        prompt: tokens of the prompt: the sum of ``cached``, ``new``, ``unreported``, and those of all faults.
        cached: repeated from the engine's prefix cache.
        new: read for the first time, or within a block behind the end of what was cached.
        unreported: in place since an earlier turn, but the engine did not report whether it had them; all tokens of a
            turn that ended before the engine reported anything.
        generated: tokens of the answer.
        prefill_seconds: from the start of the generation to its first token, without waiting for a place.
        decode_seconds: from its first token to its end.
        harness, template, router, eviction, restart, unknown: tokens read again, by fault.
    """

    turns: float = 0
    prompt: float = 0
    cached: float = 0
    new: float = 0
    unreported: float = 0
    generated: float = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    harness: float = 0
    template: float = 0
    router: float = 0
    eviction: float = 0
    restart: float = 0
    unknown: float = 0

    @property
    def reread(self) -> dict[str, float]:
        """Return the tokens that were read again, by fault; only faults that had some."""
        return {fault: tokens for fault in FAULTS if (tokens := getattr(self, fault))}

    @property
    def prefilled(self) -> float:
        """Return the tokens of prompts that the engine read."""
        return self.new + sum(self.reread.values())

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    def encode(self) -> dict[str, Any]:
        reread = self.reread
        return {
            "turns": self.turns,
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "new_tokens": self.new,
            "reread_tokens": sum(reread.values()),
            "reread_by_fault": reread,
            "unreported_tokens": self.unreported,
            "generated_tokens": self.generated,
            "prefill_seconds": round(self.prefill_seconds, 3),
            "decode_seconds": round(self.decode_seconds, 3),
        }


def total(costs: Iterable[Iterable[float]]) -> Cost:
    """Return the sum of ``costs``."""
    columns = zip(Cost(), *costs, strict=True)
    return Cost._make(map(sum, columns))


Sums = dict[str, list[float]]
"""The sums of a session by agent: lists, whose numbers are replaced, of those of a ``Cost``."""


def charged(agents: Sums, agent: str, cost: Iterable[float]) -> Sums:
    """Return the sums of a session, with ``cost`` added to those of one of its agents."""
    if agent not in agents:
        agent = agent if len(agents) < _AGENTS else MAIN
        agents.setdefault(agent, [*Cost()])
    agents[agent][:] = map(add, agents[agent], cost)
    return agents


class CostSums:
    """The sums over the turns of one owner; ``all`` has those of all turns, also of sessions that are forgotten.

    ``stopped`` has where loops were stopped. ``kept`` makes what the entries of a name are kept in.
    """

    def __init__(self, kept: Callable[[str], Any] = lambda name: LruCache(entries=_SESSIONS)) -> None:
        self._sessions, self._roots, self.stopped = kept("costs"), kept("roots"), kept("loops")
        self.all = [*Cost()]

    @property
    def spent(self) -> Cost:
        return Cost._make(self.all)

    def place(self, session: str, agent: AgentContext) -> tuple[str, str]:
        """Return the session and the agent in it that pay for a request; sessions below another one are its agents.

        Args:
            session: the key of the request's own session.
        """
        own = agent.session_id or session
        if not agent.parent_session_id or agent.parent_session_id == own:
            return own, agent.trajectory_id
        root = self._roots.get(agent.parent_session_id) or agent.parent_session_id
        self._roots.put(own, root)
        return root, agent.trajectory_id or own

    def charge(self, root: str, agent: str, cost: Cost) -> None:
        agents = self._sessions.peek(root)
        if agents is not None and agent in agents:
            agents[agent][:] = map(add, agents[agent], cost)
        else:
            self._sessions.put(root, charged(agents or {}, agent, cost))
        self.all[:] = map(add, self.all, cost)

    def agents(self, root: str) -> dict[str, Cost]:
        """Return the sums of a session by agent, the main agent's under an empty name; empty for an unknown one."""
        return {agent: Cost._make(sums) for agent, sums in (self._sessions.peek(root) or {}).items()}


Course = Literal["first", "appended", "back", "broken"]
"""How a prompt continues its session. ``first``: it begins a conversation. ``appended``: it contains all of the
recorded prompt and turn. ``back``: it continues an earlier turn. ``broken``: it lacks tokens that it should contain."""


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
