"""NVIDIA's request extensions: hints from a harness for routing and engines, and the agent that a request belongs to.

``nvext.agent_hints`` and ``nvext.agent_context`` as Dynamo defines them, https://docs.nvidia.com/dynamo/agents/agent-hints
and agents/session-ids; unknown keys are accepted. Headers set the same on every API, and win over the body. Header
names are Dynamo's where it has one; the others are our own.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec

from singletree.conversation import AgentContext, Hints
from singletree.protocols.limits import SALT_LENGTH, CacheSalt, quote_value, refused

_Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
# Dynamo takes 32 bits; with the priority below it, a rank has to fit vLLM's 64.
_Tier = Annotated[int, msgspec.Meta(ge=0, le=2**30)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Sensitivity = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]


class _AgentHints(msgspec.Struct):
    latency_sensitivity: _Sensitivity | None = None
    priority: _Priority | None = None
    strict_priority: _Tier | None = None
    osl: _Length | None = None
    speculative_prefill: bool | None = None


class _AgentContext(msgspec.Struct):
    session_type_id: _Name | None = None
    session_id: _Name | None = None
    trajectory_id: _Name | None = None
    parent_session_id: _Name | None = None
    parent_trajectory_id: _Name | None = None
    session_final: bool | None = None


class NvExt(msgspec.Struct):
    """``nvext``, as the client sends it."""

    agent_hints: _AgentHints | None = None
    agent_context: _AgentContext | None = None
    cache_salt: CacheSalt | None = None


Headers = Mapping[str, tuple[str, Any]]
"""Header name in lower case -> the attribute that it sets, and its type."""

HINTS: Headers = {
    "x-dynamo-request-priority": ("priority", _Priority),
    "x-dynamo-request-strict-priority": ("strict_priority", _Tier),
    "x-singletree-latency-sensitivity": ("latency_sensitivity", _Sensitivity),
    "x-singletree-osl": ("expected_tokens", _Length),
    "x-singletree-speculative-prefill": ("speculative_prefill", bool),
    "x-singletree-keep": ("keep", bool),
}
AGENT: Headers = {
    "x-dynamo-session-id": ("session_id", _Name),
    "x-dynamo-parent-session-id": ("parent_session_id", _Name),
    "x-parent-session-id": ("parent_session_id", _Name),
    "x-dynamo-session-final": ("session_final", bool),
    "x-claude-code-agent-id": ("trajectory_id", _Name),
    "x-claude-code-parent-agent-id": ("parent_trajectory_id", _Name),
    "x-codex-parent-thread-id": ("parent_trajectory_id", _Name),
}

SALT_HEADER = "x-singletree-cache-salt"

AGENT_HINT = "x-agent-hint"
"""The header of Hermes' plugin agent-hint: a JSON object in base64url. Written from its description, not from a run."""
_HINTED = {
    "session": "x-dynamo-session-id",
    "priority": "x-dynamo-request-priority",
    "pin": "x-singletree-keep",
    "final": "x-dynamo-session-final",
}
"""Its keys, with the headers that say the same."""
_LAST = ("end", "fin", "complete", "close")
"""How its key ``lifecycle`` begins in the last request of a session."""

_NO_HINTS, _NO_AGENT = Hints(), AgentContext()

HintsOrAgent = TypeVar("HintsOrAgent", Hints, AgentContext)


def hints_of(nvext: NvExt | None) -> Hints:
    """Return the hints of a body."""
    sent = nvext.agent_hints if nvext is not None else None
    if sent is None:
        return _NO_HINTS
    return Hints(
        priority=sent.priority or 0,
        strict_priority=sent.strict_priority or 0,
        latency_sensitivity=sent.latency_sensitivity,
        expected_tokens=sent.osl,
        speculative_prefill=bool(sent.speculative_prefill),
    )


def cache_salt_of(sent: str | None, nvext: NvExt | None) -> str:
    """Return the cache salt of a body: its own field's, else that of ``nvext``; empty for none."""
    return sent or (nvext and nvext.cache_salt) or ""


def cache_salt_of_header(headers: Mapping[str, str]) -> str:
    """Return the cache salt that a header sets: a gateway names the tenant there, whatever the body contains.

    Raises InvalidRequest if it is too long.
    """
    salt = headers.get(SALT_HEADER, "").strip()
    if len(salt) > SALT_LENGTH:
        raise refused(SALT_HEADER, f"has {len(salt)} characters; send at most {SALT_LENGTH}")
    return salt


def agent_of(nvext: NvExt | None) -> AgentContext:
    """Return the agent that a body names as its own."""
    sent = nvext.agent_context if nvext is not None else None
    if sent is None:
        return _NO_AGENT
    return AgentContext(**{name: value for name in sent.__struct_fields__ if (value := getattr(sent, name))})


def with_headers(context: HintsOrAgent, table: Headers, headers: Mapping[str, str]) -> HintsOrAgent:
    """Return ``context`` with the values that ``headers`` set by ``table``; header names in lower case.

    Raises InvalidRequest for an invalid value, with ``param`` as the name of the header.
    """
    if table.keys().isdisjoint(headers):
        return context
    changed: dict[str, Any] = {}
    for header, (name, kind) in table.items():
        if value := headers.get(header, "").strip():
            try:
                changed[name] = msgspec.convert(value, kind, strict=False)
            except msgspec.ValidationError as error:
                raise refused(header, f"is {quote_value(value)}: {error}") from None
    return replace(context, **changed) if changed else context


def with_agent_hint(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return ``headers`` with what ``AGENT_HINT`` has, as the headers that say the same; a header of its own wins.

    What cannot be read is left out: the plugin sends the header whether a server knows it or not.
    """
    if AGENT_HINT not in headers:
        return headers
    sent, read = {}, {}
    with suppress(ValueError, msgspec.DecodeError, RecursionError):
        sent = msgspec.json.decode(base64.urlsafe_b64decode(headers[AGENT_HINT] + "=="), type=dict[str, Any])
        if str(sent.get("lifecycle")).lower().startswith(_LAST):
            sent["final"] = True
    for key in sent.keys() & _HINTED.keys():
        header = _HINTED[key]
        with suppress(msgspec.ValidationError):
            read[header] = str(msgspec.convert(sent[key], {**HINTS, **AGENT}[header][1], strict=False))
    return {**read, **headers}


def session_of(agent: AgentContext) -> str | None:
    """Return the session that ``agent_context`` names, with its trajectory; None if it names neither."""
    return "/".join(filter(None, (agent.session_id, agent.trajectory_id))) or None
