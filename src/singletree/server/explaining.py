"""What the server tells about a session's prompts: in the headers of an answer, and on paths of its own.

Excerpts of prompts are told on those paths alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from singletree.errors import RouteNotFound
from singletree.server.causes import Break
from singletree.server.sessions import Session, Sessions, Step

EXPLAIN_HEADER = "x-singletree-explain"
PATH = "/v1/singletree/sessions"

_YES = ("1", "true", "on", "yes")
_HEADER_BYTES = 256


def is_asked(headers: Mapping[str, str]) -> bool:
    """Whether a request wants to be told how its prompt goes on; header names in lower case."""
    return headers.get(EXPLAIN_HEADER, "").strip().lower() in _YES


def explaining(step: Step, cached: Callable[[], int | None]) -> Iterator[tuple[bytes, bytes]]:
    """The headers that tell it; ``cached`` is asked when they leave."""
    told: dict[str, object] = {
        "session": step.session,
        "course": step.course,
        "prompt-tokens": step.prompt_tokens,
        "matched-tokens": step.matched,
        "new-tokens": step.new,
        "cached-tokens": cached(),
        "lost-tokens": step.lost,
        "break": None if step.broken is None else f"{step.broken.cause.name}; {place(step.broken)}",
    }
    for name, value in told.items():
        if value is not None:
            yield f"x-singletree-{name}".encode(), _printable(str(value))


def _printable(text: str) -> bytes:
    return ascii(text)[1:-1].encode()[:_HEADER_BYTES]


def place(broken: Break) -> str:
    """Which message a break is in."""
    if broken.message is None:
        return broken.role or "head"
    return f"message {broken.message} ({broken.role})"


def encode_sessions(sessions: Iterable[Session]) -> bytes:
    """All sessions, the one used last first, without their steps."""
    return msgspec.json.encode({"object": "list", "data": [_summary(each) for each in sessions]})


def encode_session(sessions: Sessions, key: str) -> bytes:
    """One session with its last steps. Raises RouteNotFound when nothing is kept of it."""
    session = sessions.get(key)
    if session is None:
        raise RouteNotFound(
            f"no session {key[:128]!a} is known; GET {PATH} lists those that are. Only the last ones are kept "
            "(--session-memory)"
        )
    return msgspec.json.encode({**_summary(session), "steps": [_told(step) for step in session.steps]})


def _summary(session: Session) -> dict[str, Any]:
    last = session.steps[-1]
    return {
        "object": "session",
        "id": session.key,
        "model": last.model,
        "last_at": last.at,
        "requests": session.requests,
        "lines": len(session.lines),
        "prompt_tokens": last.prompt_tokens,
        "breaks": sum(step.broken is not None for step in session.steps),
        "lost_tokens": sum(step.lost for step in session.steps),
    }


def _told(step: Step) -> dict[str, Any]:
    return {
        "at": step.at,
        "model": step.model,
        "line": step.line,
        "course": step.course,
        "prompt_tokens": step.prompt_tokens,
        "matched_tokens": step.matched,
        "new_tokens": step.new,
        "cached_tokens": step.cached,
        "generated_tokens": step.generated,
        "lost_tokens": step.lost,
        "break": None if step.broken is None else _told_break(step.broken),
    }


def _told_break(broken: Break) -> dict[str, Any]:
    return {
        "cause": broken.cause.name,
        "says": broken.cause.says,
        "cure": broken.cause.cure,
        "place": place(broken),
        "message": broken.message,
        "role": broken.role,
        "before": broken.before,
        "was": broken.was,
        "now": broken.now,
    }
