"""What the headers of a request add to its body: hints, the agent and its session, the cache salt, switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from singletree.conversation import Request
from singletree.protocols.openai import nvext
from singletree.server.answers.header_flags import flag_of
from singletree.server.answers.tracing import Trace
from singletree.server.models.config import REASONING_FIELD_NAMES, Config
from singletree.server.sessions.session_names import identified_agent, is_subagent, session_key
from singletree.server.turn import complete_calls
from singletree.server.turn.protocol import CHAT, WireProtocol

_USUAL_FIELD = "reasoning_content"
"""The value of ``--reasoning-field`` that Chat Completions uses where a request has none set."""


def with_hints(
    request: Request, headers: Mapping[str, str], *, protocol: WireProtocol, config: Config, trace: Trace
) -> Request:
    """Return ``request`` with what its headers set, and the configured reasoning fields where it does not show its own.

    Args:
        headers: with lower-case names.
        trace: gets the hints and the agent's context.

    Raises:
        InvalidRequest: a header has a wrong value.
    """
    options = request.options
    if options.reasoning_fields is None and protocol is CHAT and config.reasoning_field != _USUAL_FIELD:
        options = replace(options, reasoning_fields=REASONING_FIELD_NAMES[config.reasoning_field])
    hints = nvext.with_headers(request.hints, nvext.HINTS, headers)
    agent = nvext.with_headers(request.agent, nvext.AGENT, headers)
    if is_subagent(headers, agent) != agent.is_subagent:
        agent = replace(agent, is_subagent=not agent.is_subagent)
    trace.record_hints(hints, agent)
    wanted: dict[str, Any] = {
        "hints": hints,
        "agent": identified_agent(headers, agent, request.session),
        "cache_salt": nvext.cache_salt_of_header(headers) or request.cache_salt,
        "session": session_key(headers, request),
        "live_arguments": flag_of(headers, complete_calls.HEADER, config.live_arguments),
        "options": options,
    }
    changed = {name: value for name, value in wanted.items() if value is not getattr(request, name)}
    # A copy takes longer than all of the above.
    return replace(request, **changed) if changed else request
