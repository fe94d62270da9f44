"""Report how a session's prompts continue one another: as JSON on routes of its own, and in response headers. And make
the receipt of a turn: its ``Cost``, by what the engine, the session and the route tell at its end.

Only those routes return excerpts of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from singletree.engines.engine import Route
from singletree.errors import RouteNotFound
from singletree.events import Usage
from singletree.server.sessions import PATH
from singletree.server.sessions.sessions import Opened, Session, Sessions
from singletree.server.sessions.step import CACHE_BLOCK, Break, Cost, CostSums, Fault, Step, total
from singletree.server.turn.generation import Generation

EXPLAIN_HEADER = "x-singletree-explain"
"""Asks for the headers with the report."""

RECEIPT_HEADER = "x-singletree-receipt"
"""Asks for the receipt as a field of the answer's usage, ``singletree``: headers of a stream come before its end."""

_HEADER_BYTES = 256


def summarize(sessions: Sessions) -> list[dict[str, Any]]:
    """Return the summaries of ``sessions``, without their steps."""
    return [_summary(sessions, each) for each in sessions]


def encode_summaries(summaries: Iterable[dict[str, Any]], keys: Mapping[str, Cost]) -> bytes:
    """Encode the summaries of sessions as JSON, the session that was used last first.

    ``keys`` has what the turns of each owner have cost, those of forgotten sessions included.
    """
    ordered = sorted(summaries, key=lambda each: float(each["last_at"]), reverse=True)
    costs = {owner: cost.encode() for owner, cost in keys.items()}
    return msgspec.json.encode({"object": "list", "data": ordered, "keys": costs})


def encode_session(sessions: Sessions, key: str, link: Callable[[str, str], str] | None = None) -> bytes:
    """Encode the session ``key`` with its last steps as JSON. Raises RouteNotFound when it is not in memory.

    Args:
        link: returns the link to the inspector's page of a session, by its key and its owner; None where that is off.
    """
    session = sessions.find(key)
    if session is None:
        raise RouteNotFound(
            f"session {key[:128]!a} does not exist; GET {PATH} lists the sessions. Only recent ones are kept "
            "(--session-memory)"
        )
    page = {} if link is None else {"inspect": link(session.key, session.owner)}
    steps = [_encode_step(step) for step in session.steps]
    summary = _summary(sessions, session)
    return msgspec.json.encode({**summary, **page, **_agent_costs(sessions, session), "steps": steps})


def _agent_costs(sessions: Sessions, session: Session) -> dict[str, Any]:
    """Return what a session has cost with all of its agents, the main agent under an empty name."""
    root = session.steps[-1].payer[0]
    agents = sessions.costs_of(session.owner).agents(root)
    each = {agent: cost.encode() for agent, cost in agents.items()}
    return {"cost": {"session": root, **total(agents.values()).encode(), "agents": each}}


def _summary(sessions: Sessions, session: Session) -> dict[str, Any]:
    last = session.steps[-1]
    root, agent = last.payer
    cost = sessions.costs_of(session.owner).agents(root).get(agent, Cost())
    return {
        "object": "session",
        "id": sessions.shown_id(session),
        "owner": session.owner,
        "model": last.model,
        "last_at": last.at,
        "requests": session.requests,
        "lines": len(session.records),
        "prompt_tokens": last.prompt_tokens,
        "cached_tokens": last.cached,
        "generated_tokens": sum(step.generated for step in session.steps),
        "first_seconds": _rounded(last.first_seconds),
        "breaks": sum(step.broken is not None for step in session.steps),
        "lost_tokens": sum(step.lost for step in session.steps),
        "cost": {"session": root, "agent": agent, **cost.encode()},
    }


def _encode_step(step: Step) -> dict[str, Any]:
    return {
        "at": step.at,
        "model": step.model,
        "line": step.record_number,
        "course": step.course,
        "prompt_tokens": step.prompt_tokens,
        "matched_tokens": step.matched,
        "new_tokens": step.new,
        "cached_tokens": step.cached,
        "generated_tokens": step.generated,
        "lost_tokens": step.lost,
        "first_seconds": _rounded(step.first_seconds),
        "seconds": _rounded(step.seconds),
        "ended": step.ended,
        "route": None if step.route is None else _encode_route(step.route),
        "break": None if step.broken is None else encode_break(step.broken),
        "receipt": step.encode_receipt(),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _encode_route(route: Route) -> dict[str, Any]:
    return {
        "worker": route.worker or None,
        "predicted_cached_tokens": route.predicted_cached_tokens,
        "reason": route.reason,
        "failovers": route.failovers,
        "waited_seconds": round(route.waited_seconds, 3),
    }


def encode_break(broken: Break) -> dict[str, Any]:
    """Return the report on a break as JSON values, with its excerpts of prompts."""
    return {
        "cause": broken.cause,
        "says": broken.reason,
        "cure": broken.cure,
        "place": break_location(broken),
        "message": broken.message,
        "role": broken.role,
        "before": broken.before,
        "was": broken.was,
        "now": broken.now,
    }


def report_headers(step: Step, cached: Callable[[], int | None]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers that report how the prompt of ``step`` continues the session.

    Args:
        cached: returns the number of prompt tokens in the engine's cache, or None; called when the headers are sent.
    """
    values: dict[str, object] = {
        "session": step.session,
        "course": step.course,
        "prompt-tokens": step.prompt_tokens,
        "matched-tokens": step.matched,
        "new-tokens": step.new,
        "cached-tokens": cached(),
        "lost-tokens": step.lost,
        "break": None if step.broken is None else f"{step.broken.cause}; {break_location(step.broken)}",
        "receipt": _in_a_line(step.encode_receipt()),
    }
    for name, value in values.items():
        if value is not None:
            yield f"x-singletree-{name}".encode(), ascii(str(value))[1:-1].encode()[:_HEADER_BYTES]


def _in_a_line(receipt: Mapping[str, Any] | None) -> str | None:
    """Return what of a receipt is not zero: ``prompt_tokens=900; reread_tokens=300; eviction=300; ...``"""
    if receipt is None:
        return None
    plain = {**receipt, **receipt["reread_by_fault"], "reread_by_fault": None}
    return "; ".join(f"{name}={value}" for name, value in plain.items() if value)


def break_location(broken: Break) -> str:
    """Return a description of the message that ``broken`` is in."""
    if broken.message is None:
        return broken.role or "head"
    return f"message {broken.message} ({broken.role})"


def add_cost(
    opened: Opened, generation: Generation, usage: Usage, asked: float, ended: float, sums: CostSums
) -> Cost:
    """Add to the step what it cost, and the weights of its generation. The arguments are those of ``cost_of``."""
    if generation.weight_versions:
        opened.step.weights = ", ".join(str(each.version) for each in generation.weight_versions)
    opened.step.cost = cost = cost_of(opened, generation, usage, asked, ended, sums)
    return cost


def cost_of(
    opened: Opened, generation: Generation, usage: Usage, asked: float, ended: float, sums: CostSums
) -> Cost:
    """Return what a turn cost, whose step has what the engine reported.

    Args:
        generation: the first one of the answer.
        usage: the counts of the whole answer, as the client and the metrics get them.
        asked, ended: when its generation began and ended, on the clock of ``perf_counter``.
        sums: what this process has charged before.
    """
    step, first = opened.step, generation.first_token_at
    if step.route is not None:
        asked += step.route.waited_seconds
    prompt, cached, generated = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
    if not first:
        if step.cached is None:
            # A client that left has kept the engine busy; an engine that failed has not worked.
            seconds = 0.0 if step.ended == "error" else max(0.0, ended - asked)
            return Cost(1, prompt, 0, 0, prompt, generated, seconds)
        first = ended
    if asked > first:  # It did not wait as long as its route says.
        asked = first
    cost = Cost(1, prompt, cached, prompt - cached, 0, generated, first - asked, ended - first)
    had = step.cached
    if (
        had is not None
        and not step.lost
        and opened.compared is not None
        and step.matched - had <= CACHE_BLOCK
    ):
        return cost
    in_place = step.matched or _replayed(opened, generation)
    if had is None:
        cost = cost._replace(new=cost.new - in_place, unreported=in_place)
        had = in_place
    elif in_place - had > CACHE_BLOCK:
        cost = _with_fault(cost, _engine_fault(opened, generation, sums), in_place - had)
    if step.lost:
        # Behind the break as far as the last prompt went; what the engine had of it was not read again.
        behind = step.prompt_tokens - max(in_place, had)
        cost = _with_fault(
            cost, "unknown" if step.broken is None else step.broken.fault, min(step.lost, behind)
        )
    return cost


def raw_cost(generation: Generation, usage: Usage, asked: float, ended: float) -> Cost:
    """Return what an answer to raw prompts cost, which have no session: nobody knows what was read before.

    The arguments are those of ``cost_of``.
    """
    prompt, cached, first = usage.prompt_tokens, usage.cached_tokens, generation.first_token_at
    if not first:
        return Cost(1, prompt, 0, 0, prompt, usage.completion_tokens)
    counts = (prompt, cached, prompt - cached, 0, usage.completion_tokens)
    return Cost(1, *counts, max(0.0, first - asked), ended - first)


def _with_fault(cost: Cost, fault: Fault, tokens: int) -> Cost:
    """Return ``cost`` with ``tokens`` of the new ones, as far as there are so many, as read again."""
    again = max(0, min(tokens, cost.new))
    return cost._replace(**{"new": cost.new - again, fault: getattr(cost, fault) + again})


def _replayed(opened: Opened, generation: Generation) -> int:
    """Return how many tokens of the first prompt of a session were generated or read before: where turns of it came
    back by their own tokens, from a file, from another server or from the client.
    """
    prompt = generation.prompt
    return prompt.piece_ends[-1] if opened.compared is None and prompt.replayed and prompt.piece_ends else 0


def _engine_fault(opened: Opened, generation: Generation, sums: CostSums) -> Fault:
    """Return why the engine did not have tokens that were in place."""
    before: Step | None = None if opened.compared is None else opened.compared.step
    if before is None:
        return "eviction" if sums.agents(opened.step.payer[0]) else "restart"
    route, earlier = generation.route, before.route
    if route is not None and (route.failovers or (earlier is not None and earlier.worker != route.worker)):
        return "router"
    ended = before.at + (before.seconds or 0.0)
    return "restart" if generation.model.engine.info().started_at > ended else "eviction"
