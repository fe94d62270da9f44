"""What constrains a turn: whether a request asks for it, and what building its constraint takes.

The constraint itself is built behind a door (``constraints``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from singletree.conversation import Request, Tool
from singletree.engines.engine import Constraint
from singletree.errors import InvalidRequest
from singletree.parsing.family import Family
from singletree.prompts.history import canonicalization
from singletree.server.doors import is_open, open_door
from singletree.server.models.model import Model

_TAIL = 256

ReasoningState = Literal["open", "possible", "over"]
"""State of the reasoning at the turn's first token: the prompt has opened it, the model may open it, or it is over."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """The constraint for the engine, if any, and warnings for the client about what is not enforced."""

    constraint: Constraint | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConstraintRequest:
    """A request whose prompt is complete, with what its constraint depends on.

    Attributes:
        family: the family that the turn is parsed with: without calls if the turn may not contain any.
        thinking: whether reasoning is open, over or possible at the end of the prompt.
        parallel: whether the turn may contain several calls.
    """

    model: Model
    request: Request
    family: Family
    thinking: ReasoningState
    parallel: bool

    @property
    def tools(self) -> tuple[Tool, ...]:
        choice, tools = self.request.tool_choice, self.request.conversation.tools
        return tuple(
            t for t in tools if choice.admits(t.name) and t.name != canonicalization.PLACEHOLDER_TOOL
        )


def thinking_state(request: Request, family: Family, in_reasoning: bool, prompt: str) -> ReasoningState:
    """Return the state of reasoning at the end of ``prompt``; it is over if the request switched reasoning off."""
    if in_reasoning:
        return "open"
    closer = family.reasoning[1].strip() if family.reasoning else ""
    is_off = request.thinking.enabled is False
    return "over" if is_off or not closer or prompt[-_TAIL:].rstrip().endswith(closer) else "possible"


BuildConstraints = Callable[[ConstraintRequest], Constraints]

_DOOR = "constraints"


def loads_package(request: Request) -> bool:
    """Return whether the constraint of ``request`` is the first: then its package is loaded, best in a thread."""
    return not is_open(_DOOR) and may_restrict(request)


def constraints_of(wanted: ConstraintRequest) -> Constraints:
    """Build the constraint of a request that ``may_restrict`` the turn, and warnings about what is not enforced.

    Raises:
        InvalidRequest: the request requires something that cannot be enforced.
    """
    build: BuildConstraints = open_door(_DOOR)
    return build(wanted)


def with_constraint_field(refusal: InvalidRequest, request: Request) -> InvalidRequest:
    """Return an engine's ``refusal`` with the field of ``request`` that it is about, if that is a constraint."""
    form = request.response_format
    about = any(word in refusal.message.lower() for word in _ABOUT_CONSTRAINTS)
    if form is None or refusal.param is not None or not about:
        return refusal
    return InvalidRequest(f"{form.at}: {refusal.message}", param=form.at)


_ABOUT_CONSTRAINTS = ("grammar", "schema", "regex", "constraint", "structured output", "structural tag")


NO_CONSTRAINTS = Constraints()


def may_restrict(request: Request) -> bool:
    """Return whether anything in ``request`` may restrict the turn; else its constraints are ``NO_CONSTRAINTS``."""
    choice, tools = request.tool_choice, request.conversation.tools
    if choice.mode == "required" or choice.allowed is not None or request.response_format is not None:
        return True
    return any(map(_STRICT, tools)) or any(map(_GRAMMAR, tools))


_STRICT, _GRAMMAR = attrgetter("strict"), attrgetter("grammar")
