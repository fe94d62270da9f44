"""NVIDIA's request extensions: what a harness says of a request for routing and engines, and whose it is.

``nvext.agent_hints`` and ``nvext.agent_context`` as Dynamo defines them, https://docs.nvidia.com/dynamo/agents/agent-hints
and priority-scheduling; unknown keys are accepted. The same by header, which wins over the body: Dynamo's two for the
priorities, and one of ours for each of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from singletree.conversation import Hints
from singletree.errors import InvalidRequest
from singletree.protocols import limits

_Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
# Dynamo takes 32 bits; with the priority below it, a rank has to fit vLLM's 64.
_Tier = Annotated[int, msgspec.Meta(ge=0, le=2**30)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _AgentHints(msgspec.Struct):
    latency_sensitivity: float | None = None
    priority: _Priority | None = None
    strict_priority: _Tier | None = None
    osl: _Length | None = None
    speculative_prefill: bool | None = None


class _AgentContext(msgspec.Struct):
    session_type_id: str | None = None
    session_id: str | None = None
    trajectory_id: str | None = None
    parent_trajectory_id: str | None = None
    parent_session_id: str | None = None


class NvExt(msgspec.Struct):
    """``nvext`` as it goes over the wire."""

    agent_hints: _AgentHints | None = None
    agent_context: _AgentContext | None = None


HEADERS: dict[str, tuple[str, type]] = {
    "x-dynamo-request-priority": ("priority", _Priority),
    "x-dynamo-request-strict-priority": ("strict_priority", _Tier),
    "x-singletree-latency-sensitivity": ("latency_sensitivity", float),
    "x-singletree-osl": ("expected_tokens", _Length),
    "x-singletree-speculative-prefill": ("speculative_prefill", bool),
}
"""Header, in lower case -> the hint that it gives, and its type."""


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


def with_headers(hints: Hints, headers: Mapping[str, str]) -> Hints:
    """``hints`` with what ``headers`` (names in lower case) say in their place.

    Raises:
        InvalidRequest: a header has a value that is none; ``param`` is its name.
    """
    said: dict[str, Any] = {}
    for header, (name, kind) in HEADERS.items():
        if value := headers.get(header, "").strip():
            try:
                said[name] = msgspec.convert(value, kind, strict=False)
            except msgspec.ValidationError as error:
                told = f"{header} is {limits.shown(value)}: {error}"
                raise InvalidRequest(told, param=header) from None
    return replace(hints, **said) if said else hints


def session_of(nvext: NvExt | None) -> str | None:
    """The session that ``agent_context`` names, and the trajectory in it."""
    context = (nvext and nvext.agent_context) or _AgentContext()
    return "/".join(filter(None, (context.session_id, context.trajectory_id))) or None
