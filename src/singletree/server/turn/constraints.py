"""Builds the constraint of a request for its engine: tool choice, strict tools, grammars, response formats.

A request that requires something (a call, JSON) is refused if the engine cannot enforce it. What improves a free turn
(``strict``, ``allowed_tools`` and grammars under ``tool_choice: auto``) is left out with a warning if the family's
format cannot express it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from singletree.conversation import Request, ResponseFormat, Tool
from singletree.engines.engine import Constraint
from singletree.errors import InvalidRequest
from singletree.parsing.constraints import constrain, schema_support
from singletree.parsing.constraints.constrain import ReasoningState
from singletree.parsing.constraints.expression import Expression
from singletree.parsing.constraints.lark import lark
from singletree.parsing.family import Family
from singletree.prompts.history import canonicalization
from singletree.server.models.catalog import Model

_TAIL = 256


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
        """The tools that the model may call."""
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


def build_constraints(wanted: ConstraintRequest) -> Constraints:
    """Build the constraint of a request, and warnings about what is not enforced.

    Raises:
        InvalidRequest: the request requires something that cannot be enforced.
    """
    if not may_restrict(wanted.request):
        return NO_CONSTRAINTS
    tools = tuple(_with_enforced_grammar(wanted.family, tool) for tool in wanted.tools)
    warnings = [
        f"{tool.schema_at}: the grammar of {tool.name!r} is shown to the model and not enforced"
        for tool, enforced in zip(wanted.tools, tools, strict=True)
        if wanted.family.forms and tool.grammar != enforced.grammar
    ]
    warnings += _relaxed(wanted.request.response_format)
    expression, left_out = _expression_of(wanted, tools)
    warnings += [left_out] if left_out else []
    constraint = None if expression is None else _encoded(wanted.model, expression)
    if expression is not None and constraint is None:
        plain = tuple(replace(tool, grammar=None) for tool in tools)
        expression, _ = _expression_of(wanted, plain)
        constraint = None if expression is None else _encoded(wanted.model, expression)
        warnings.append(
            "the engine supports no grammars of tools, or no constraints at all; they are not enforced"
        )
    if constraint is None and _requires_constraint(wanted.request):
        form = wanted.request.response_format
        field = "tool_choice" if form is None or wanted.request.tool_choice.mode == "required" else form.at
        raise InvalidRequest(
            f"{field}: the engine behind this model supports no constraints, so no call or JSON can be forced; leave it"
            " out",
            param=field,
        )
    return Constraints(constraint, tuple(warnings))


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
    return any(tool.strict or tool.grammar for tool in tools)


def _relaxed(form: ResponseFormat | None) -> list[str]:
    """Return a warning for a schema that is not strict and has a keyword that is not enforced."""
    if form is None or form.strict or not form.schema:
        return []
    at = schema_support.first_fault(form.schema, form.schema_at)
    return [f"{at}: this keyword is not enforced"] if at else []


def _requires_constraint(request: Request) -> bool:
    return request.tool_choice.mode == "required" or (
        request.response_format is not None and not request.conversation.tools
    )


def _expression_of(wanted: ConstraintRequest, tools: Sequence[Tool]) -> tuple[Expression | None, str]:
    """Return what the turn may contain (None for anything), and a warning about what that does not enforce."""
    request, family, form = wanted.request, wanted.family, wanted.request.response_format
    thinking, parallel = wanted.thinking, wanted.parallel
    if request.tool_choice.mode == "required":
        return constrain.require_call(family, tools, thinking=thinking, parallel=parallel), ""
    free = bool(family.forms) and _narrows(request, tools)
    if form is not None and (not family.forms or constrain.marks_calls(family)):
        expression = constrain.require_format(family, form, tools, thinking=thinking, parallel=parallel)
        return expression, ""
    if form is not None:
        return None, f"{form.at}: not enforced beside tools: {_unmarked(family)}"
    if not free:
        return None, ""
    prose = constrain.allow_calls(family, tools, thinking=thinking, parallel=parallel)
    return (
        prose,
        "" if prose else f"tools: strict, allowed_tools and grammars are not enforced: {_unmarked(family)}",
    )


def _unmarked(family: Family) -> str:
    return f"in the format {family.name!r} a call does not begin with a marker; send tool_choice 'required'"


def _narrows(request: Request, tools: Sequence[Tool]) -> bool:
    return request.tool_choice.allowed is not None or any(t.strict or t.grammar for t in tools)


def _with_enforced_grammar(family: Family, tool: Tool) -> Tool:
    if tool.grammar is None or constrain.grammar_is_enforceable(family, tool):
        return tool
    return replace(tool, grammar=None)


def _encoded(model: Model, expression: Expression) -> Constraint | None:
    tokenizer = model.tokenizer
    # A constraint that is only the client's own grammar goes to the engine unchanged, if the engine accepts it.
    kinds = sorted(model.engine.info().constraints, key=lambda kind: kind != "gbnf")
    tokens = constrain.special_tokens_of(model.family, tokenizer.added_tokens, tokenizer.special_tokens)
    stops = tokenizer.stop_token_ids
    return next(
        (
            Constraint(kind, value, "" if kind == "lark" else _followed(expression, tokens, stops))
            for kind in kinds
            if (value := constrain.to_constraint(expression, kind, tokens, stops)) is not None
        ),
        None,
    )


def _followed(expression: Expression, tokens: Mapping[str, int], stops: Iterable[int]) -> str:
    """Return the expression in Lark, for a turn that continues on another engine; empty if it cannot be written so."""
    try:
        return lark(expression, tokens, stops, any_white_space=True)
    except InvalidRequest:
        return ""
