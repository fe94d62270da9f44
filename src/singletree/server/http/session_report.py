"""Report how a session's prompts continue one another, on routes of its own.

Only those routes return excerpts of prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from singletree.engines.engine import Route
from singletree.errors import RouteNotFound
from singletree.server.inspect.links import session_link
from singletree.server.sessions.break_causes import Break
from singletree.server.sessions.report_headers import break_location
from singletree.server.sessions.sessions import Session, Sessions, Step

PATH = "/v1/singletree/sessions"


def summarize(sessions: Iterable[Session]) -> list[dict[str, Any]]:
    """Return the summaries of ``sessions``, without their steps."""
    return [_summary(each) for each in sessions]


def encode_summaries(summaries: Iterable[dict[str, Any]]) -> bytes:
    """Encode the summaries of sessions as JSON, the session that was used last first."""
    ordered = sorted(summaries, key=lambda each: float(each["last_at"]), reverse=True)
    return msgspec.json.encode({"object": "list", "data": ordered})


def encode_session(sessions: Sessions, key: str, *, inspected: bool = False) -> bytes:
    """Encode the session ``key`` with its last steps as JSON. Raises RouteNotFound when it is not in memory.

    Args:
        inspected: whether the inspector is on; the report then has the link to the session's page.
    """
    session = sessions.get(key)
    if session is None:
        raise RouteNotFound(
            f"session {key[:128]!a} does not exist; GET {PATH} lists the sessions. Only recent ones are kept "
            "(--session-memory)"
        )
    link = {"inspect": session_link(key)} if inspected else {}
    steps = [_encode_step(step) for step in session.steps]
    return msgspec.json.encode({**_summary(session), **link, "steps": steps})


def _summary(session: Session) -> dict[str, Any]:
    last = session.steps[-1]
    return {
        "object": "session",
        "id": session.key,
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
        "break": None if step.broken is None else _encode_break(step.broken),
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


def _encode_break(broken: Break) -> dict[str, Any]:
    return {
        "cause": broken.cause.name,
        "says": broken.cause.reason,
        "cure": broken.cure,
        "place": break_location(broken),
        "message": broken.message,
        "role": broken.role,
        "before": broken.before,
        "was": broken.was,
        "now": broken.now,
    }
