"""What turns cost, in tokens and seconds, and the sums over each session, each of its agents, and each API key."""

from __future__ import annotations

from collections.abc import Iterable
from operator import add
from typing import Any, Literal, NamedTuple, get_args

from singletree.conversation import AgentContext
from singletree.lru import LruCache

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
        """Return the cost as JSON values."""
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


class CostSums:
    """The sums over the turns of one owner; ``all`` has those of all turns, also of sessions that are forgotten."""

    def __init__(self) -> None:
        self._sessions: LruCache[str, Sums] = LruCache(entries=_SESSIONS)
        self._roots: LruCache[str, str] = LruCache(entries=_SESSIONS)
        self.all = [*Cost()]

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
        """Add what a turn cost."""
        agents = self._sessions.peek(root)
        if agents is None or agent not in agents:
            self.add(root, agent, cost)
        else:
            agents[agent][:] = map(add, agents[agent], cost)
        self.all[:] = map(add, self.all, cost)

    def add(self, root: str, agent: str, cost: Iterable[float]) -> None:
        """Add ``cost`` to the sums of one session, but not to that of all."""
        agents = self._sessions.peek(root)
        if agents is None:
            agents = {}
            self._sessions.put(root, agents)
        if agent not in agents:
            agent = agent if len(agents) < _AGENTS else MAIN
            agents.setdefault(agent, [*Cost()])
        sums = agents[agent]
        sums[:] = map(add, sums, cost)

    def take(self, root: str, agent: str) -> list[float] | None:
        """Remove the sums of an agent and return them, for another process; None where there are none."""
        return (self._sessions.peek(root) or {}).pop(agent, None)

    def agents(self, root: str) -> dict[str, Cost]:
        """Return the sums of a session by agent, the main agent's under an empty name; empty for an unknown one."""
        return {agent: Cost._make(sums) for agent, sums in (self._sessions.peek(root) or {}).items()}
