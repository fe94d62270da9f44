"""What the headers of a request say: its session, its agent, and settings that it switches on or off.

The names of ``headers`` are in lower case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from singletree.conversation import AgentContext, Request


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
