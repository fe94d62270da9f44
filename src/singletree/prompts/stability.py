"""What varies in a request without meaning anything, made the same before a prompt is rendered.

A prompt that differs in its first lines costs the whole prefill of the session again. Each rule is one entry
with its reason, acts on the conversation alone, and can be switched off by name.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, pairwise, takewhile
from typing import Any, cast

from singletree.conversation import Conversation, Part, Text, Tool, ToolReference, ToolResult, Turn
from singletree.prompts.beginnings import is_same_turn, same_items
from singletree.prompts.tool_definition import tool_definition

PLACEHOLDER_TOOL = "DeferredToolPlaceholder"

_BILLING_HEADER = re.compile(
    r"x-anthropic-billing-header:(?:[ \t]*cc\w*=[^;\s]*(?:;|(?=\s|$)))*[ \t]*\r?\n?", re.I
)
_CONTEXT = re.compile(
    r"\s*<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>.*<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\s*", re.S
)
_SYSTEM_ROLES = ("system", "developer")


Change = Callable[[Conversation], Conversation]
ToolsOf = Callable[[Sequence[Turn]], tuple[Tool, ...]]
"""The tools of the session's conversation to which these turns only add a question; none without such a one."""


def no_session(turns: Sequence[Turn]) -> tuple[Tool, ...]:
    """Nothing is known of the session."""
    return ()


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing made the same. ``apply`` gives back an equal conversation when there is nothing to do.

    It gets the turns from one of the assistant's to the next, or several such stretches at once, and makes the same of
    each; with ``whole``, all turns after the other rules.
    """

    name: str
    reason: str
    apply: Callable[[Conversation, ToolsOf], Conversation]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some turns of a conversation, from one of the assistant's on, and what the rules made of them.

    Attributes:
        end: the number of the turn behind them.
        acted: the names of the rules that changed something.
    """

    end: int
    turns: tuple[Turn, ...]
    acted: frozenset[str]


@dataclass(frozen=True, slots=True)
class Canonical:
    """A conversation as it came, what all rules made of it, and of its stretches those that treat each alone."""

    given: Conversation
    off: frozenset[str]
    conversation: Conversation
    rules: tuple[str, ...]
    stretches: tuple[Stretch, ...]


def canonicalise(
    conversation: Conversation, *, off: frozenset[str] = frozenset(), tools_of: ToolsOf = no_session
) -> tuple[Conversation, tuple[str, ...]]:
    """The conversation after all rules but those in ``off``, and the names of the rules that changed it.

    Idempotent. Rules act in the order of ``RULES``.
    """
    made = canonicalise_on(None, conversation, off=off, tools_of=tools_of)
    return made.conversation, made.rules


def canonicalise_on(
    before: Canonical | None,
    given: Conversation,
    *,
    off: frozenset[str] = frozenset(),
    tools_of: ToolsOf = no_session,
) -> Canonical:
    """As ``canonicalise``; what an earlier prompt has in common with this one is taken from ``before``."""
    turns = given.turns
    turns = given.turns
    stretches = _common_stretches(before, given, off) if before is not None else []
    begin = stretches[-1].end if stretches else 0
    answer = next((i for i in range(len(turns) - 1, begin, -1) if turns[i].role == "assistant"), begin)
    tools = given.tools
    for start, end in pairwise((begin, *sorted({answer, len(turns)} - {begin}))):
        piece, acted = _apply(Conversation(turns[start:end], given.tools), off, tools_of, whole=False)
        stretches.append(Stretch(end, piece.turns, acted))
        tools = piece.tools
    treated = Conversation(tuple(chain.from_iterable(stretch.turns for stretch in stretches)), tools)
    made, acted = _apply(treated, off, tools_of, whole=True)
    acted = acted.union(*(stretch.acted for stretch in stretches))
    rules = tuple(rule.name for rule in RULES if rule.name in acted)
    return Canonical(given, off, made, rules, tuple(stretches))


def _apply(
    conversation: Conversation, off: frozenset[str], tools_of: ToolsOf, *, whole: bool
) -> tuple[Conversation, frozenset[str]]:
    """What the rules of one kind make of ``conversation``, and the names of those that changed it."""
    acted = set()
    for rule in RULES:
        if rule.whole != whole or rule.name in off:
            continue
        before = conversation
        conversation = rule.apply(before, tools_of)
        if conversation is not before and conversation != before:
            acted.add(rule.name)
    return conversation, frozenset(acted)


def _common_stretches(before: Canonical, given: Conversation, off: frozenset[str]) -> list[Stretch]:
    tools = (*before.given.tools, *given.tools)
    if before.off != off or (before.given.tools is not given.tools and any(tool.deferred for tool in tools)):
        return []
    turns = given.turns
    same = min(same_items(before.given.turns, turns, is_same_turn), len(turns) - 1)
    ends = (s.end <= same and turns[s.end].role == "assistant" for s in before.stretches)
    return list(compress(before.stretches, takewhile(bool, ends)))


def _each_turn(conversation: Conversation, change: Callable[[Turn], Turn | None]) -> Conversation:
    changed = (change(turn) for turn in conversation.turns)
    return _with_turns(conversation, [turn for turn in changed if turn is not None])


def _each_part(
    parts: tuple[Part, ...], change: Callable[[tuple[Part, ...]], tuple[Part, ...]]
) -> tuple[Part, ...]:
    """``change`` applied to the parts of each result among ``parts``, then to ``parts`` themselves.

    The very tuple comes back if nothing changes: no rule builds a long conversation anew.
    """
    inner = tuple(
        _with_parts(part, change(part.parts)) if isinstance(part, ToolResult) else part for part in parts
    )
    return change(inner if any(map(operator.is_not, inner, parts)) else parts)


def _with_parts(result: ToolResult, parts: tuple[Part, ...]) -> ToolResult:
    return result if parts is result.parts else replace(result, parts=cast(Any, parts))


def _with_turn_parts(turn: Turn, parts: tuple[Part, ...]) -> Turn:
    return turn if parts is turn.parts else replace(turn, parts=parts)


def _strip_billing_header(conversation: Conversation) -> Conversation:
    def strip(turn: Turn) -> Turn | None:
        if turn.role not in _SYSTEM_ROLES or "-billing-header:" not in turn.text.lower():
            return turn
        stripped = (
            replace(part, text=_BILLING_HEADER.sub("", part.text)) if isinstance(part, Text) else part
            for part in turn.parts
        )
        parts = tuple(part for part in stripped if not isinstance(part, Text) or part.text)
        return replace(turn, parts=parts) if parts else None

    return _each_turn(conversation, strip)


def _show_deferred_tools(conversation: Conversation) -> Conversation:
    deferred = {tool.name: tool for tool in conversation.tools if tool.deferred}
    shown = tuple(t for t in conversation.tools if not t.deferred and t.name != PLACEHOLDER_TOOL)

    def show(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if not any(isinstance(part, ToolReference) for part in parts):
            return parts
        return tuple(
            Text(_reference_text(part, deferred)) if isinstance(part, ToolReference) else part
            for part in parts
        )

    changed = _each_turn(conversation, lambda turn: _with_turn_parts(turn, _each_part(turn.parts, show)))
    return changed if shown == conversation.tools else replace(changed, tools=shown)


def _reference_text(reference: ToolReference, deferred: dict[str, Tool]) -> str:
    tool = deferred.get(reference.name)
    try:
        return reference.name if tool is None else json.dumps(tool_definition(tool), ensure_ascii=False)
    except RecursionError:  # a schema nested deeper than Python reads; its name is all that can be shown
        return reference.name


def _context_of_harness(conversation: Conversation) -> Conversation:
    turns = list(conversation.turns)
    for i in range(1, len(turns)):
        if turns[i].role == "user" and turns[i - 1].role == "tool" and _CONTEXT.fullmatch(turns[i].text):
            turns[i] = replace(turns[i], role="system")
    return _with_turns(conversation, turns)


def _join_blocks(conversation: Conversation) -> Conversation:
    def join(turn: Turn) -> Turn:
        return turn if turn.role == "assistant" else _with_turn_parts(turn, _each_part(turn.parts, _joined))

    return _each_turn(conversation, join)


def _joined(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """``parts`` with each run of texts as one; a seam without a line break gets one."""
    if not any(isinstance(a, Text) and isinstance(b, Text) for a, b in pairwise(parts)):
        return parts
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if not isinstance(part, Text) or not isinstance(last, Text):
            joined.append(part)
            continue
        seam = "" if last.text.endswith("\n") or part.text.startswith("\n") else "\n"
        joined[-1] = Text(last.text + seam + part.text)
    return tuple(joined)


def _system_after_results(conversation: Conversation) -> Conversation:
    """Move system turns between a turn's calls and the last of their results behind the results."""
    turns: list[Turn] = []
    waiting: list[Turn] = []
    answering = False
    for turn in conversation.turns:
        if answering and turn.role in _SYSTEM_ROLES:
            waiting.append(turn)
            continue
        if turn.role != "tool":
            turns += waiting
            waiting = []
            answering = turn.role == "assistant" and bool(turn.tool_calls)
        turns.append(turn)
    return _with_turns(conversation, [*turns, *waiting])


def _order_results(conversation: Conversation) -> Conversation:
    """Bring each run of results into one turn, in the order of the calls that they answer."""
    turns: list[Turn] = []
    order: dict[str, int] = {}
    for turn in conversation.turns:
        if turn.role == "assistant":
            order = {call.id: index for index, call in enumerate(turn.tool_calls)}
        if turn.role != "tool":
            turns.append(turn)
        elif turns and turns[-1].role == "tool":
            turns[-1] = Turn("tool", _in_order(turns[-1].parts + turn.parts, order))
        else:
            turns.append(_with_turn_parts(turn, _in_order(turn.parts, order)))
    return _with_turns(conversation, turns)


def _with_turns(conversation: Conversation, turns: list[Turn]) -> Conversation:
    changed = tuple(turns)
    return conversation if changed == conversation.turns else replace(conversation, turns=changed)


def _in_order(parts: tuple[Part, ...], order: dict[str, int]) -> tuple[Part, ...]:
    """Results of known calls first, by call; what answers none of them stays behind, as it came."""

    def place(part: Part) -> int:
        return order.get(part.call_id, len(order)) if isinstance(part, ToolResult) else len(order)

    return parts if len(parts) < 2 else tuple(sorted(parts, key=place))


def _keep_tools(conversation: Conversation, tools_of: ToolsOf) -> Conversation:
    kept = () if conversation.tools else tools_of(conversation.turns)
    return replace(conversation, tools=kept) if kept else conversation


def _alone(change: Change) -> Callable[[Conversation, ToolsOf], Conversation]:
    """A rule that needs nothing but the conversation."""
    return lambda conversation, _: change(conversation)


RULES: tuple[Rule, ...] = (
    Rule(
        "billing_header",
        "Claude Code opens its system prompt with a header whose value changes with the request "
        "(anthropics/claude-code#50085).",
        _alone(_strip_billing_header),
    ),
    Rule(
        "deferred_tools",
        "A tool with defer_loading is put into the tool list when it is first referenced; shown where the "
        "reference stands, it leaves the head as it was. The placeholder that keeps the feature on is none.",
        _alone(_show_deferred_tools),
    ),
    Rule(
        "system_after_results",
        "A system message between a call and its result splits what templates and models know as one piece "
        "(vllm-project/vllm#52978).",
        _alone(_system_after_results),
    ),
    Rule(
        "result_order",
        "Clients send the results of parallel calls in the order in which they finished, which is chance.",
        _alone(_order_results),
    ),
    Rule(
        "harness_context",
        "OpenClaw ends every prompt of a tool loop with a user's message on what runs beside it. To a template a new "
        "question begins there, and it leaves out what the model thought in the loop; so it is a system message.",
        _alone(_context_of_harness),
    ),
    Rule(
        "text_blocks",
        "A message comes as one string or as blocks, and its shape changes when a cache mark moves. The "
        "blocks of a turn are one text with a line break at each seam: it depends on its two blocks alone.",
        _alone(_join_blocks),
    ),
    Rule(
        "compaction_tools",
        "Codex asks for a summary of the session without the tools that stand at the head of all its prompts. They are "
        "shown where a tool loop comes back with a question and no tools, and no call is made.",
        _keep_tools,
        whole=True,
    ),
)


@dataclass(frozen=True, slots=True)
class RenderRule:
    """What is made the same where a prompt is rendered: no edit of its conversation."""

    name: str
    reason: str


SESSION_CLOCK = RenderRule(
    "session_clock",
    "A template that prints the time (Hunyuan A13B: to the second) changes the head of its prompts as it goes on; a "
    "session is shown that of its first prompt, for a day at most.",
)

NAMED: tuple[Rule | RenderRule, ...] = (*RULES, SESSION_CLOCK)
"""All that can be switched off and is counted by name."""
