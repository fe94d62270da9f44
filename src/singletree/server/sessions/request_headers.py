"""What the headers of a request say: its session, its agent, settings, and whether it repeats another request.

The names of ``headers`` are in lower case.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from singletree.conversation import AgentContext, Request

SESSION_BUDGET, SUBAGENT_BUDGET = "x-singletree-budget", "x-singletree-subagent-budget"
BUDGET_HEADERS = frozenset((SESSION_BUDGET, SUBAGENT_BUDGET))
"""Headers of a request that lower the budget of its session, and of its sub-agent."""


@dataclass(frozen=True, slots=True)
class SessionHeader:
    """A header in which clients name their session.

    Attributes:
        name: name of the header in lower case.
        within: headers that distinguish parallel work in the session: sub-agents, threads.
        repeats: whether the client that sends it is known to send a request again while the first one still runs, and
            never sends two equal requests on purpose.
    """

    name: str
    within: tuple[str, ...] = ()
    repeats: bool = False


SESSION_HEADERS: tuple[SessionHeader, ...] = (
    SessionHeader("x-singletree-session"),
    SessionHeader("x-dynamo-session-id"),
    # Claude Code, whose requests time out after 300 s in Bun and after 600 s in itself (alltuner/tale#3396).
    SessionHeader("x-claude-code-session-id", ("x-claude-code-agent-id",), repeats=True),
    # Codex: one session, a thread for each agent.
    SessionHeader("session-id", ("thread-id",), repeats=True),
    SessionHeader("thread-id"),
    # pi
    SessionHeader("session_id", repeats=True),
    # Grok Build
    SessionHeader("x-grok-session-id", ("x-grok-conv-id",)),
    SessionHeader("x-grok-conv-id"),
    SessionHeader("agent-session-id"),
    SessionHeader("x-session-id"),
    # OpenCode, which sends the header above as well; it runs on Bun.
    SessionHeader("x-session-affinity", repeats=True),
    SessionHeader("x-affinity"),
)
"""Session headers, the most specific first: the first one that a request has names its session."""

_HEADER_NAMES = frozenset(header.name for header in SESSION_HEADERS)

_SUBAGENT_HEADERS = frozenset({"x-claude-code-agent-id", "x-openai-subagent"})
"""Headers that Claude Code and Codex send in the requests of their sub-agents only."""

_LONGEST_KEY = 256


def session_key(headers: Mapping[str, str], request: Request) -> str | None:
    """Return the client's name of the session that ``request`` belongs to: from a header, else from a field of the
    body (``prompt_cache_key``, ``metadata.user_id`` …); None when it has neither.
    """
    return _key(_named_session(headers), request.session)


def header_session(headers: Mapping[str, str]) -> str:
    """Return the client's name of its session in ``headers``, with lower-case names; empty for none."""
    return "/".join(_named_session(headers))[:_LONGEST_KEY]


def identify(
    headers: Mapping[str, str], agent: AgentContext, session: str | None
) -> tuple[AgentContext, str | None]:
    """Return ``agent`` with the session and the run that the session headers name, where it has none, and the session's
    ``session_key``.

    Args:
        session: the client's name of the session in the body, which counts where no header names one.
    """
    parts = _named_session(headers)
    key = _key(parts, session)
    parts = parts or [session or ""]
    named = agent.session_id or parts[0][:_LONGEST_KEY]
    run = agent.trajectory_id or (parts[1][:_LONGEST_KEY] if len(parts) > 1 else "")
    if named == agent.session_id and run == agent.trajectory_id:
        return agent, key
    return replace(agent, session_id=named, trajectory_id=run), key


def _key(parts: Sequence[str], session: str | None) -> str | None:
    return "/".join(parts)[:_LONGEST_KEY] or (session[:_LONGEST_KEY] if session else None)


def _named_session(headers: Mapping[str, str]) -> list[str]:
    """Return what the first session header that a request has names: the session, and the work within it."""
    if _HEADER_NAMES.isdisjoint(headers):
        return []
    for header in SESSION_HEADERS:
        if headers.get(header.name, "").strip():
            parts = dict.fromkeys(headers.get(name, "").strip() for name in (header.name, *header.within))
            return [part for part in parts if part]
    return []


def is_subagent(headers: Mapping[str, str], agent: AgentContext) -> bool:
    """Tell whether a sub-agent sent a request: by its headers, with lower-case names, or since it has a parent."""
    if agent.parent_session_id or agent.parent_trajectory_id:
        return True
    return not _SUBAGENT_HEADERS.isdisjoint(headers) and any(
        headers.get(name, "").strip() for name in _SUBAGENT_HEADERS
    )


def client_repeats(headers: Mapping[str, str]) -> bool:
    """Tell whether the session header is that of a client that sends a request again while the first one still runs."""
    if _HEADER_NAMES.isdisjoint(headers):
        return False
    return any(header.repeats and headers.get(header.name, "").strip() for header in SESSION_HEADERS)


_VALUES = dict.fromkeys(("1", "true", "on", "yes"), True) | dict.fromkeys(("0", "false", "off", "no"), False)


def flag_of(headers: Mapping[str, str], name: str, default: bool) -> bool:
    """Return the value of the header ``name``, or ``default`` where it is absent or not a known value."""
    given = headers.get(name)
    return default if given is None else _VALUES.get(given.strip().lower(), default)


Cancel = Callable[[], object]

SOONEST_REPETITION = 1.0
"""Shortest time in seconds between a request and its repetition. Parallel agents with one task send equal requests
within a shorter time; a client that gives up a request has waited longer."""

_IDEMPOTENCY_KEY = "idempotency-key"


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Identifies requests that may be repetitions of each other; an equal one certainly is where it is ``certain``."""

    digest: bytes
    certain: bool = False


@dataclass(eq=False, slots=True)
class _Running:
    cancel: Cancel
    since: float


class InFlight:
    """The requests in flight that may be sent again.

    A client that gives up a request sends it again, and behind a proxy the server does not see that it disconnected.
    Then both requests run, each more slowly, until the client gives up the second one as well (alltuner/tale#3396:
    Bun's fetch after 300 s).

    Two equal requests do not prove this: a program that samples several answers to one prompt also sends them with one
    session name, and waits for all of them. So the first request is cancelled only where the second is known to be a
    repetition: both have the same idempotency key, or the client is one that repeats (``SessionHeader.repeats``), has
    no other equal request in flight, and sent the first one long enough ago to have given it up.

    Attributes:
        repeat_elsewhere: called with each request that repeats none here and has no equal one here, so that those of
            other processes are looked at; None where there are none.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._held: dict[bytes, list[_Running]] = {}
        self._now = now
        self.repeat_elsewhere: Callable[[RequestKey], None] | None = None

    @contextmanager
    def guard(self, identity: RequestKey, cancel: Cancel) -> Iterator[None]:
        """Register a request while the context lasts, and cancel an earlier request that it repeats."""
        this = _Running(cancel, self._now())
        running = self._held.setdefault(identity.digest, [])
        ages = [this.since - each.since for each in running]
        repeated = running[0] if is_repetition(identity, ages) else None
        if not running and self.repeat_elsewhere is not None:
            self.repeat_elsewhere(identity)
        running.append(this)
        if repeated is not None:
            running.remove(repeated)
            repeated.cancel()
        try:
            yield
        finally:
            if this in running:
                running.remove(this)
            if not running and self._held.get(identity.digest) is running:
                del self._held[identity.digest]

    def starts(self, digest: bytes) -> list[float]:
        """Return when each request with ``digest`` came, by the clock that all processes of a machine have."""
        return [each.since for each in self._held.get(digest, ())]

    def cancel(self, digest: bytes) -> None:
        """Cancel the request with ``digest``, if there is exactly one: it is repeated in another process."""
        running = self._held.get(digest, [])
        if len(running) == 1:
            running.pop().cancel()


def is_repetition(identity: RequestKey, ages: Sequence[float]) -> bool:
    """Return whether a request that arrives now repeats an equal one.

    Args:
        ages: for how many seconds each equal request has run; negative for one that came later.
    """
    return len(ages) == 1 and ages[0] >= (0 if identity.certain else SOONEST_REPETITION)


def request_key(headers: Mapping[str, str], path: str, body: bytes) -> RequestKey | None:
    """Return the identity of a request; None where an equal request is not a repetition.

    A session's name in the body (``prompt_cache_key``, ``metadata.user_id``) is ignored: programs that sample several
    answers send it in all of their requests.

    Args:
        headers: with lower-case names.
        body: after decompression.
    """
    key = headers.get(_IDEMPOTENCY_KEY, "").strip()
    if not key and not client_repeats(headers):
        return None
    session = header_session(headers)
    # Most processors have instructions for this digest, which takes a quarter of the time of BLAKE2 with them.
    digest = hashlib.sha256(body)
    digest.update("\0".join(("", path, session, key)).encode("utf-8", "surrogatepass"))
    return RequestKey(digest.digest(), certain=bool(key))
