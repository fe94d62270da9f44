"""What a request holds the model to, in the words of its engine: tool choice, strict tools, grammars, response formats.

What the request must have (a call, JSON) is refused where it cannot be had; what makes a free turn better (``strict``,
``allowed_tools`` and grammars under ``tool_choice: auto``) is left out with a warning where the format cannot say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from singletree.conversation import Request, Tool
from singletree.engines.engine import Constraint
from singletree.errors import InvalidRequest
from singletree.parsing import constrain
from singletree.parsing.constrain import Thinking
from singletree.parsing.expression import Expression
from singletree.parsing.family import Family
from singletree.prompts import stability
from singletree.server.catalog import Model

_TAIL = 256


@dataclass(frozen=True, slots=True)
class Held:
    """What the engine is told, and what the client is told that it is not."""

    constraint: Constraint | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asking:
    """A request whose prompt is written.

    Attributes:
        family: as the turn is read: without calls where none can be made.
        thinking: where the prompt leaves the reasoning.
        parallel: whether the turn may hold several calls.
    """

    model: Model
    request: Request
    family: Family
    thinking: Thinking
    parallel: bool

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Those that may be called."""
        choice, tools = self.request.tool_choice, self.request.conversation.tools
        return tuple(t for t in tools if choice.admits(t.name) and t.name != stability.PLACEHOLDER_TOOL)


def thinking_of(request: Request, family: Family, in_reasoning: bool, prompt: str) -> Thinking:
    """Where the prompt leaves the reasoning; a model that was told not to think does not begin to."""
    if in_reasoning:
        return "open"
    closer = family.reasoning[1].strip() if family.reasoning else ""
    told_off = request.thinking.enabled is False
    return "over" if told_off or not closer or prompt[-_TAIL:].rstrip().endswith(closer) else "possible"


def constraint_of(asking: Asking) -> Held:
    """What the request holds the model to.

    Raises:
        InvalidRequest: it asks for what cannot be had.
    """
    tools = tuple(_with_held_grammar(asking.family, tool) for tool in asking.tools)
    warnings = [
        f"{tool.schema_at}: the grammar of {tool.name!r} is shown to the model and not enforced"
        for tool, held in zip(asking.tools, tools, strict=True)
        if asking.family.forms and tool.grammar != held.grammar
    ]
    expression, left_out = _wanted(asking, tools)
    warnings += [left_out] if left_out else []
    constraint = None if expression is None else _written(asking.model, expression)
    if expression is not None and constraint is None:
        plain = tuple(replace(tool, grammar=None) for tool in tools)
        expression, _ = _wanted(asking, plain)
        constraint = None if expression is None else _written(asking.model, expression)
        warnings.append(
            "the engine takes no grammars of tools, or no constraints at all; they are not enforced"
        )
    if constraint is None and _must_hold(asking.request):
        form = asking.request.response_format
        field = "tool_choice" if form is None or asking.request.tool_choice.mode == "required" else form.at
        raise InvalidRequest(
            f"{field}: the engine behind this model takes no constraints, so no call or JSON can be forced; leave it"
            " out",
            param=field,
        )
    return Held(constraint, tuple(warnings))


def _must_hold(request: Request) -> bool:
    return request.tool_choice.mode == "required" or (
        request.response_format is not None and not request.conversation.tools
    )


def _wanted(asking: Asking, tools: Sequence[Tool]) -> tuple[Expression | None, str]:
    """What the turn may spell, None for anything; and what of the request that leaves out."""
    request, family, form = asking.request, asking.family, asking.request.response_format
    thinking, parallel = asking.thinking, asking.parallel
    if request.tool_choice.mode == "required":
        return constrain.calls(family, tools, thinking=thinking, parallel=parallel), ""
    free = bool(family.forms) and _narrows(request, tools)
    if form is not None and (not family.forms or constrain.marks_calls(family)):
        expression = constrain.json_text(family, form, tools, thinking=thinking, parallel=parallel)
        return expression, ""
    if form is not None:
        return None, f"{form.at}: not enforced beside tools: {_unmarked(family)}"
    if not free:
        return None, ""
    prose = constrain.prose(family, tools, thinking=thinking, parallel=parallel)
    return (
        prose,
        "" if prose else f"tools: strict, allowed_tools and grammars are not enforced: {_unmarked(family)}",
    )


def _unmarked(family: Family) -> str:
    return f"in the format {family.name!r} no marker tells at once that a call begins; send tool_choice 'required'"


def _narrows(request: Request, tools: Sequence[Tool]) -> bool:
    return request.tool_choice.allowed is not None or any(t.strict or t.grammar for t in tools)


def _with_held_grammar(family: Family, tool: Tool) -> Tool:
    return tool if constrain.grammar_is_held(family, tool) else replace(tool, grammar=None)


def _written(model: Model, expression: Expression) -> Constraint | None:
    tokenizer = model.tokenizer
    tokens = constrain.special_tokens_of(model.family, tokenizer.added_tokens, tokenizer.special_tokens)
    return next(
        (
            Constraint(kind, value)
            for kind in model.engine.info().constraints
            if (value := constrain.written(expression, kind, tokens, tokenizer.stop_token_ids)) is not None
        ),
        None,
    )
