"""Builds the constraint of a request for its engine: tool choice, strict tools, grammars, response formats.

A request that requires something (a call, JSON) is refused if the engine cannot enforce it. What improves a free turn
(``strict``, ``allowed_tools`` and grammars under ``tool_choice: auto``) is left out with a warning if the family's
format cannot express it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from singletree.constraints import constrain, enforceable
from singletree.constraints.expression import Expression, lark
from singletree.conversation import Request, ResponseFormat, Tool
from singletree.engines.engine import Constraint
from singletree.errors import InvalidRequest
from singletree.parsing.family import Family
from singletree.server.models.model import Model
from singletree.server.turn.constraints import ConstraintRequest, Constraints


def build_constraints(wanted: ConstraintRequest) -> Constraints:
    """Build the constraint of a request that may restrict its turn, and warnings about what is not enforced.

    Raises:
        InvalidRequest: the request requires something that cannot be enforced.
    """
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
            f"{field}: the engine behind this model has no constraint that can force this call, JSON or grammar; leave"
            " it out",
            param=field,
        )
    return Constraints(constraint, tuple(warnings))


def _relaxed(form: ResponseFormat | None) -> list[str]:
    if form is None or form.strict or not form.schema:
        return []
    at = enforceable.first_fault(form.schema, form.schema_at)
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
    tokenizer, info = model.tokenizer, model.engine.info()
    # A constraint that is only the client's own grammar goes to the engine unchanged, if the engine accepts it.
    kinds = sorted(info.constraints, key=lambda kind: kind != "gbnf")
    control = tokenizer.control_tokens(with_tags=info.has_special_tags)
    tokens = constrain.special_tokens_of(model.family, control)
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
