"""Report how a session's prompts continue one another: as JSON on routes of its own, and in response headers.

Only those routes return excerpts of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from singletree.engines.engine import Route
from singletree.errors import RouteNotFound
from singletree.server.sessions.costs import Cost, total
from singletree.server.sessions.sessions import Session, Sessions
from singletree.server.sessions.step import Break, Step

PATH = "/v1/singletree/sessions"

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
