"""Budgets: how many tokens and seconds may be spent, how often a call may be repeated in vain, and who has to stop.

A request is checked before the engine is asked. A turn that runs is never cut: the first request after the budget was
used up is refused, so no call is half sent.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from singletree.conversation import Request, ToolCall, ToolResult, Turn
from singletree.errors import BadConfiguration, BudgetSpent, InvalidRequest
from singletree.lru import LruCache
from singletree.owners import owned_id
from singletree.server.sessions.request_headers import SESSION_BUDGET, SUBAGENT_BUDGET
from singletree.server.sessions.sessions import NAMELESS, Opened
from singletree.server.sessions.step import Cost, total
from singletree.server.settings.config import Config

if TYPE_CHECKING:
    from singletree.server.http.service import Service

LOG = logging.getLogger("singletree.budgets")

UNITS = {"prefill": "tokens", "generated": "tokens", "seconds": "s"}
"""What can be spent, and its unit for messages."""

LOOPS = "loops"
_FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kMG]?)")
_LONGEST_PERIOD = 8
"""Calls that a loop may have before it begins again."""

WARN_SHARE = 0.8
_KNOWN = 4096
"""Sessions of which is kept that they were warned."""

_PARTS = "each process of the server counts its part of this session, which has no name; send x-session-id"


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that may be spent, and the flag or header that sets it."""

    most: float
    source: str


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits by what they limit: ``prefill``, ``generated``, ``seconds``, ``loops``."""

    limits: dict[str, Limit] = field(default_factory=dict)

    def lowered(self, other: Budget) -> Budget:
        """Return this budget with those limits of ``other`` that are lower, or for which this one has none."""
        lower = {
            name: limit
            for name, limit in other.limits.items()
            if name not in self.limits or limit.most < self.limits[name].most
        }
        return Budget({**self.limits, **lower})

    def used(self, spent: Cost) -> Iterator[tuple[str, float, Limit]]:
        """Yield for each limit but that of loops what it limits, how much of it was spent, and the limit."""
        values = {"prefill": spent.prefilled, "generated": spent.generated, "seconds": spent.seconds}
        for name, limit in self.limits.items():
            if name in values:
                yield name, values[name], limit


def read_budget(text: str, source: str, *, loops: bool = True) -> Budget:
    """Return the budget that ``text`` describes, such as ``prefill=2M,generated=200k,seconds=3600,loops=5``.

    Args:
        source: the flag or header, for messages.
        loops: whether it may limit loops.

    Raises ValueError with a message for the user.
    """
    limits: dict[str, Limit] = {}
    known = [*UNITS, *([LOOPS] if loops else [])]
    for entry in filter(None, map(str.strip, text.split(","))):
        name, _, number = entry.partition("=")
        found = _NUMBER.fullmatch(number.strip())
        if name.strip() not in known or found is None:
            raise ValueError(
                f"{source}: {entry[:64]!a} is not a limit; give some of {'=N, '.join(known)}=N, separated by commas; "
                "a number may end in k, M or G"
            )
        limits[name.strip()] = Limit(float(found[1]) * _FACTORS[found[2]], source)
    return Budget(limits)


Round = tuple[str, str, tuple[Any, ...]]
"""A call and its result: the name of the tool, the arguments, and the parts of the result."""


def rounds_of(turns: Sequence[Turn]) -> list[Round]:
    """Return the calls of a conversation that have results, in order, with their results."""
    calls = {
        part.id: part
        for turn in turns
        if turn.role == "assistant"
        for part in turn.parts
        if isinstance(part, ToolCall)
    }
    return [
        (call.name, call.arguments, part.parts)
        for turn in turns
        for part in turn.parts
        if isinstance(part, ToolResult) and (call := calls.get(part.call_id)) is not None
    ]


def repetitions(rounds: Sequence[Round]) -> int:
    """Return how many times the last rounds are the same: one call, or some calls in the same order."""
    most = min(len(rounds), 1)
    for period in range(1, min(_LONGEST_PERIOD, len(rounds) // 2) + 1):
        last, count, end = rounds[-period:], 1, len(rounds) - period
        while end >= period and rounds[end - period : end] == last:
            count, end = count + 1, end - period
        most = max(most, count)
    return most


class Budgets:
    """The budgets of one server. Raises BadConfiguration for a flag that is no budget."""

    def __init__(self, config: Config) -> None:
        self._session = _of_flag(config, "session_budget")
        self._subagent = _of_flag(config, "subagent_budget")
        self._key = _of_flag(config, "key_budget", loops=False)
        self._logged: LruCache[tuple[str, str, bool], bool] = LruCache(entries=_KNOWN)

    def __call__(
        self,
        service: Service,
        opened: Opened | None,
        request: Request,
        headers: Mapping[str, str],
        key_budget: Budget | None = None,
    ) -> list[str]:
        """Check a request, and return warnings for its client.

        Args:
            opened: its place in its session; None for raw prompts, which count for their key only.
            key_budget: the budget that the file of keys gives its key, in place of that of the flag; None for none.

        Raises BudgetSpent where a budget is used up, InvalidRequest for a header that is no budget.
        """
        sums, warnings = service.sessions.costs, []
        budgets = [("API key", key_budget or self._key, sums.spent)]
        root = agent = ""
        if opened is not None:
            root, agent = sums.place(opened.step.session, request.agent)
            session = self._session.lowered(_of_header(headers, SESSION_BUDGET))
            budgets.insert(0, ("session", session, total(sums.agents(root).values())))
            if session.limits and service.others is not None and root.startswith(NAMELESS):
                warnings.append(_PARTS)
        if agent:
            own = self._subagent.lowered(_of_header(headers, SUBAGENT_BUDGET))
            budgets.append(("sub-agent", own, sums.agents(root).get(agent, Cost())))
        place = owned_id(service.owner, f"{root}/{agent}" if agent else root)
        for of, budget, spent in budgets:
            for what, used, limit in budget.used(spent):
                if used >= WARN_SHARE * limit.most:
                    words = f"{what} {used:,.0f} of {limit.most:,.0f} {UNITS[what]}"
                    self._log(place, words, is_spent=used >= limit.most)
                    if used >= limit.most:
                        raise _spent(f"the budget of this {of} is used up: {words}", of, limit)
                    warnings.append(f"the budget of this {of} is nearly used up: {words}")
            if LOOPS in budget.limits:
                self._stop_loop(sums.stopped, place, request, of, budget.limits[LOOPS])
        return warnings

    def _stop_loop(
        self, stopped: LruCache[str, tuple[int, int]], place: str, request: Request, of: str, limit: Limit
    ) -> None:
        """Raise BudgetSpent where the last calls and results are repeated too often, once: then the user may go on."""
        turns = request.conversation.turns
        rounds = rounds_of(turns)
        counted, length = stopped.get(place) or (0, 0)
        # Where somebody wrote behind the rounds that were refused, those count no more.
        times = repetitions(rounds[counted:] if len(turns) > length else rounds)
        if times >= limit.most:
            stopped.put(place, (len(rounds), len(turns)))
            words = f"the same call came back with the same result {times} times"
            self._log(place, words, is_spent=True)
            raise _spent(f"this {of} is in a loop: {words}", of, limit)

    def _log(self, place: str, words: str, *, is_spent: bool) -> None:
        key = (place, words.partition(" ")[0], is_spent)
        if self._logged.get(key) is None:
            self._logged.put(key, True)
            LOG.warning("session %a: %s%s", place, words, "; refused" if is_spent else "")


def _of_flag(config: Config, name: str, *, loops: bool = True) -> Budget:
    try:
        return read_budget(getattr(config, name) or "", "--" + name.replace("_", "-"), loops=loops)
    except ValueError as error:
        raise BadConfiguration(str(error)) from None


def _of_header(headers: Mapping[str, str], name: str) -> Budget:
    try:
        return read_budget(headers.get(name, ""), name)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _spent(reason: str, of: str, limit: Limit) -> BudgetSpent:
    cure = "use another key" if of == "API key" else f"start a new {of}"
    return BudgetSpent(f"{reason}; {cure}, or raise {limit.source}")
