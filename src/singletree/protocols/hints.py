"""NVIDIA's request extensions: what a harness says of a request for routing and engines, and whose it is.

``nvext.agent_hints`` and ``nvext.agent_context`` as Dynamo defines them, https://docs.nvidia.com/dynamo/agents/agent-hints
and agents/session-ids; unknown keys are accepted. On every API the same by header, which wins over the body: Dynamo's
names where it has one, and of ours for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec

from singletree.conversation import AgentContext, Hints
from singletree.errors import InvalidRequest
from singletree.protocols import limits

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
    """``nvext`` as it goes over the wire."""

    agent_hints: _AgentHints | None = None
    agent_context: _AgentContext | None = None


Headers = Mapping[str, tuple[str, Any]]
"""Header, in lower case -> the attribute that it gives, and its type."""

HINTS: Headers = {
    "x-dynamo-request-priority": ("priority", _Priority),
    "x-dynamo-request-strict-priority": ("strict_priority", _Tier),
    "x-singletree-latency-sensitivity": ("latency_sensitivity", _Sensitivity),
    "x-singletree-osl": ("expected_tokens", _Length),
    "x-singletree-speculative-prefill": ("speculative_prefill", bool),
}
AGENT: Headers = {
    "x-dynamo-session-id": ("session_id", _Name),
    "x-dynamo-parent-session-id": ("parent_session_id", _Name),
    "x-dynamo-session-final": ("session_final", bool),
    "x-claude-code-agent-id": ("trajectory_id", _Name),
    "x-claude-code-parent-agent-id": ("parent_trajectory_id", _Name),
    "x-codex-parent-thread-id": ("parent_trajectory_id", _Name),
}

Said = TypeVar("Said", Hints, AgentContext)


def hints_of(nvext: NvExt | None) -> Hints:
    """The hints of a body."""
    said = (nvext and nvext.agent_hints) or _AgentHints()
    return Hints(
        priority=said.priority or 0,
        strict_priority=said.strict_priority or 0,
        latency_sensitivity=said.latency_sensitivity,
        expected_tokens=said.osl,
        speculative_prefill=bool(said.speculative_prefill),
    )


def agent_of(nvext: NvExt | None) -> AgentContext:
    """Whose request a body says it is."""
    said = (nvext and nvext.agent_context) or _AgentContext()
    return AgentContext(**{name: value for name in said.__struct_fields__ if (value := getattr(said, name))})


def with_headers(said: Said, table: Headers, headers: Mapping[str, str]) -> Said:
    """``said`` with what ``headers`` (names in lower case) say in its place.

    Raises:
        InvalidRequest: a header has a value that is none; ``param`` is its name.
    """
    changed: dict[str, Any] = {}
    for header, (name, kind) in table.items():
        if value := headers.get(header, "").strip():
            try:
                changed[name] = msgspec.convert(value, kind, strict=False)
            except msgspec.ValidationError as error:
                told = f"{header} is {limits.shown(value)}: {error}"
                raise InvalidRequest(told, param=header) from None
    return replace(said, **changed) if changed else said


def session_of(agent: AgentContext) -> str | None:
    """The session that a body's ``agent_context`` names, and the trajectory in it."""
    return "/".join(filter(None, (agent.session_id, agent.trajectory_id))) or None
