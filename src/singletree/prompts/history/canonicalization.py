"""Canonicalization: make requests equal where they differ without meaning, before a prompt is rendered.

A prompt that differs in its first lines costs the prefill of the whole session again. Each rule is one entry with its
reason. A rule depends on the conversation alone, and can be switched off by name.
"""

from __future__ import annotations

import json
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

from singletree.conversation import Conversation, Part, Text, Tool, ToolReference, ToolResult, Turn
from singletree.prefixes import common_prefix, identical_prefix
from singletree.prompts.prompt_cache import is_same_turn
from singletree.prompts.replay.turn_comparison import with_joined_texts
from singletree.prompts.template.content import tool_definition

PLACEHOLDER_TOOL = "DeferredToolPlaceholder"
"""A tool that a client sends to keep tool deferral on; the model never sees it."""

_BILLING_HEADER = re.compile(
    r"x-anthropic-billing-header:(?:[ \t]*cc\w*=[^;\s]*(?:;|(?=\s|$)))*[ \t]*\r?\n?", re.I
)
_CONTEXT = re.compile(
    r"\s*<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>.*<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\s*", re.S
)
_SYSTEM_ROLES = ("system", "developer")

ItemT = TypeVar("ItemT", Turn, ToolResult)

ToolsOf = Callable[[Sequence[Turn]], tuple[Tool, ...]]
"""Returns the tools of the session's conversation to which these turns only add a question; () if there is none."""


def no_session(turns: Sequence[Turn]) -> tuple[Tool, ...]:
    """Return no tools: a ``ToolsOf`` for requests without a session."""
    return ()


@dataclass(frozen=True, slots=True)
class Rule:
    """A canonicalization rule.

    Attributes:
        name: the name by which it is switched off.
        reason: why it exists, for the documentation.
        apply: returns the changed conversation, or an equal one. It gets one segment (the turns from one of the
            assistant's to the next) or several at once, and its result for a segment does not depend on the others.
        whole: whether it gets all turns instead, after the other rules.
    """

    name: str
    reason: str
    apply: Callable[[Conversation, ToolsOf], Conversation]
    whole: bool = False


class Segment(NamedTuple):
    """Consecutive turns after the rules, beginning at one of the assistant's.

    ``end`` is the index of the first turn after them in the original conversation; ``changed`` is (first, end) of the
    turns that the ``applied`` rules changed, by the indices in the whole conversation after the rules.
    """

    end: int
    turns: tuple[Turn, ...]
    applied: frozenset[str]
    changed: tuple[int, int] = (0, 0)


class Canonical(NamedTuple):
    """A conversation after all rules, and their names in the order of ``RULES``.

    ``places`` has (first, end, names) for each range of its turns that rules changed.
    """

    conversation: Conversation
    rules: tuple[str, ...]
    places: tuple[tuple[int, int, frozenset[str]], ...] = ()


class CanonicalCheckpoint(NamedTuple):
    """The segments of the conversation ``given``, and its tools, after the rules that act on segments."""

    given: Conversation
    off: frozenset[str]
    segments: tuple[Segment, ...]
    tools: tuple[Tool, ...]

    @property
    def bytes(self) -> int:
        return _SEGMENT_BYTES * len(self.segments)


_SEGMENT_BYTES = 200


@dataclass(frozen=True, slots=True)
class Canonicalize:
    """The stage that applies the rules, in the order of ``RULES``; the result is idempotent.

    ``off`` names the rules that are switched off; ``tools_of`` looks up the tools of the session.
    """

    off: frozenset[str] = frozenset()
    tools_of: ToolsOf = no_session

    def run(
        self, conversation: Conversation, checkpoint: CanonicalCheckpoint | None
    ) -> tuple[Canonical, CanonicalCheckpoint]:
        turns, tools = conversation.turns, conversation.tools
        segments: list[Segment] = []
        if checkpoint is not None:
            segments += _common_segments(checkpoint, conversation, self.off)
            tools = checkpoint.tools if segments else tools
        joined = list(chain.from_iterable(map(attrgetter("turns"), segments)))
        begin = segments[-1].end if segments else 0
        for end in _segment_ends(turns, begin):
            given = turns[begin:end]
            changed, applied = self._apply(_SEGMENT_RULES, Conversation(given, conversation.tools))
            first, last = _changed_range(given, changed.turns) if applied else (0, 0)
            place = first + len(joined), last + len(joined)
            segments.append(Segment(end, changed.turns, applied, place))
            joined += changed.turns
            begin, tools = end, changed.tools
        before = Conversation(tuple(joined), tools)
        result, applied = self._apply(_WHOLE_RULES, before)
        changed_segments = filter(attrgetter("applied"), segments)
        places = [(*segment.changed, segment.applied) for segment in changed_segments]
        if applied:
            places.insert(0, (*_changed_range(before.turns, result.turns), applied))
        names = {name for _, _, changes in places for name in changes}
        rules = tuple([rule.name for rule in RULES if rule.name in names]) if names else ()
        made = CanonicalCheckpoint(conversation, self.off, tuple(segments), tools)
        return Canonical(result, rules, tuple(places)), made

    def _apply(
        self, rules: Sequence[Rule], conversation: Conversation
    ) -> tuple[Conversation, frozenset[str]]:
        applied = []
        for rule in rules:
            before = conversation
            if rule.name not in self.off:
                conversation = rule.apply(before, self.tools_of)
            if conversation is not before and conversation != before:
                applied.append(rule.name)
        return conversation, frozenset(applied)


def _changed_range(before: Sequence[Turn], after: Sequence[Turn]) -> tuple[int, int]:
    """Return (first, end) of the turns of ``after`` that are other objects than in ``before``."""
    first = identical_prefix(before, after)
    behind = identical_prefix(before[first:][::-1], after[first:][::-1])
    return first, len(after) - behind


def _common_segments(
    before: CanonicalCheckpoint, given: Conversation, off: frozenset[str]
) -> Sequence[Segment]:
    turns, known, segments = given.turns, before.given, before.segments
    has_other_tools = known.tools is not given.tools
    if before.off != off or (has_other_tools and any(t.deferred for t in (*known.tools, *given.tools))):
        return ()
    same = common_prefix(known.turns, turns, is_same_turn)
    if same == len(turns) == len(known.turns) and not has_other_tools:
        return segments
    count = bisect_right(segments, min(same, len(turns) - 1), key=attrgetter("end"))
    # A segment ends where an answer begins. The last one ended with the turns: there may be anything behind it now.
    if count and not _begins_answer(turns, segments[count - 1].end):
        count -= 1
    return segments[:count]


def _segment_ends(turns: Sequence[Turn], begin: int) -> Sequence[int]:
    """Return the ends of the segments from ``begin`` on: where the last answer begins, and the end of the turns."""
    end = len(turns)
    answer = next((i for i in range(end - 1, begin, -1) if _begins_answer(turns, i)), begin)
    return (answer, end) if begin < answer else (end,) if begin < end else ()


def _begins_answer(turns: Sequence[Turn], number: int) -> bool:
    return turns[number].role == "assistant" and (number == 0 or turns[number - 1].role != "assistant")


def _each_turn(conversation: Conversation, change: Callable[[Turn], Turn | None]) -> Conversation:
    return _with_turns(
        conversation, [changed for turn in conversation.turns if (changed := change(turn)) is not None]
    )


def _each_part(
    parts: tuple[Part, ...], change: Callable[[tuple[Part, ...]], tuple[Part, ...]]
) -> tuple[Part, ...]:
    """Apply ``change`` to the parts of results, then to ``parts``; nothing is copied where nothing changes."""
    inner = [_with_parts(part, change(part.parts)) if type(part) is ToolResult else part for part in parts]
    return change(parts if all(map(operator.is_, inner, parts)) else tuple(inner))


def _with_parts(item: ItemT, parts: tuple[Part, ...]) -> ItemT:
    return item if parts is item.parts else replace(item, parts=cast(Any, parts))


def _strip_billing_header(conversation: Conversation, _: ToolsOf) -> Conversation:
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


def _show_deferred_tools(conversation: Conversation, _: ToolsOf) -> Conversation:
    tools = conversation.tools
    deferred = {tool.name: tool for tool in filter(attrgetter("deferred"), tools)}

    def show(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if ToolReference not in map(type, parts):
            return parts
        return tuple(
            Text(_reference_text(part, deferred)) if isinstance(part, ToolReference) else part
            for part in parts
        )

    changed = _each_turn(conversation, lambda turn: _with_parts(turn, _each_part(turn.parts, show)))
    if not deferred and PLACEHOLDER_TOOL not in map(attrgetter("name"), tools):
        return changed
    shown = tuple(t for t in tools if not t.deferred and t.name != PLACEHOLDER_TOOL)
    return replace(changed, tools=shown)


def _reference_text(reference: ToolReference, deferred: dict[str, Tool]) -> str:
    tool = deferred.get(reference.name)
    try:
        return reference.name if tool is None else json.dumps(tool_definition(tool), ensure_ascii=False)
    except RecursionError:  # the schema is nested too deeply for Python; only its name can be shown
        return reference.name


def _context_of_harness(conversation: Conversation, _: ToolsOf) -> Conversation:
    turns = list(conversation.turns)
    for i in range(1, len(turns)):
        if turns[i].role == "user" and turns[i - 1].role == "tool" and _CONTEXT.fullmatch(turns[i].text):
            turns[i] = replace(turns[i], role="system")
    return _with_turns(conversation, turns)


def _join_blocks(conversation: Conversation, _: ToolsOf) -> Conversation:
    def join(turn: Turn) -> Turn:
        return turn if turn.role == "assistant" else _with_parts(turn, _each_part(turn.parts, _joined))

    return _each_turn(conversation, join)


def _joined(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return parts if len(parts) < 2 else tuple(with_joined_texts(parts, by_lines=True))


def _join_assistants(conversation: Conversation, _: ToolsOf) -> Conversation:
    if ("assistant", "assistant") not in pairwise([turn.role for turn in conversation.turns]):
        return conversation
    turns: list[Turn] = []
    for turn in conversation.turns:
        if turns and turn.role == turns[-1].role == "assistant":
            before = turns[-1].parts
            middle = _joined((*before[-1:], *turn.parts[:1]))
            extra = {**(turns[-1].extra or {}), **(turn.extra or {})} or None
            turns[-1] = Turn("assistant", (*before[:-1], *middle, *turn.parts[1:]), extra)
        else:
            turns.append(turn)
    return _with_turns(conversation, turns)


def _system_after_results(conversation: Conversation, _: ToolsOf) -> Conversation:
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


def _order_results(conversation: Conversation, _: ToolsOf) -> Conversation:
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
            turns.append(_with_parts(turn, _in_order(turn.parts, order)))
    return _with_turns(conversation, turns)


def _with_turns(conversation: Conversation, turns: list[Turn]) -> Conversation:
    changed = tuple(turns)
    return conversation if changed == conversation.turns else replace(conversation, turns=changed)


def _in_order(parts: tuple[Part, ...], order: dict[str, int]) -> tuple[Part, ...]:
    def place(part: Part) -> int:
        return order.get(part.call_id, len(order)) if isinstance(part, ToolResult) else len(order)

    return parts if len(parts) < 2 else tuple(sorted(parts, key=place))


def _keep_tools(conversation: Conversation, tools_of: ToolsOf) -> Conversation:
    kept = () if conversation.tools else tools_of(conversation.turns)
    return replace(conversation, tools=kept) if kept else conversation


RULES: tuple[Rule, ...] = (
    Rule(
        "billing_header",
        "Claude Code begins its system prompt with a header whose value changes with each request "
        "(anthropics/claude-code#50085).",
        _strip_billing_header,
    ),
    Rule(
        "deferred_tools",
        "A tool with defer_loading joins the tool list when it is first referenced, which would change the head of the "
        "prompt. Its definition is shown where it is referenced instead. The placeholder tool that keeps the feature "
        "on is never shown to the model.",
        _show_deferred_tools,
    ),
    Rule(
        "assistant_messages",
        "Some clients split one turn into several messages: text and calls (goose, Open Interpreter), or one message "
        "for each block. Consecutive assistant messages are joined into one turn, as on Anthropic's own API.",
        _join_assistants,
    ),
    Rule(
        "system_after_results",
        "A system message between a call and its result separates two messages that templates and models expect "
        "together (vllm-project/vllm#52978). It is moved to after the results.",
        _system_after_results,
    ),
    Rule(
        "result_order",
        "Clients send the results of parallel calls in the order in which they finished, which is random. They are "
        "sorted by their calls.",
        _order_results,
    ),
    Rule(
        "harness_context",
        "OpenClaw ends every prompt of a tool loop with a user message about other running tasks. A template takes "
        "it for a new question, and leaves out the reasoning of the loop; so it becomes a system message.",
        _context_of_harness,
    ),
    Rule(
        "text_blocks",
        "A message is one string or several blocks, and this changes when a cache mark moves. The blocks of a turn are "
        "joined into one text with a line break between two blocks, which depends on these two blocks alone.",
        _join_blocks,
    ),
    Rule(
        "compaction_tools",
        "Codex asks for a summary of the session without the tools that all its other prompts begin with. If a tool "
        "loop comes back with a question and no tools, the session's tools are shown, and no call is made.",
        _keep_tools,
        whole=True,
    ),
)

_SEGMENT_RULES = tuple(rule for rule in RULES if not rule.whole)
_WHOLE_RULES = tuple(rule for rule in RULES if rule.whole)


SESSION_CLOCK = Rule(
    "session_clock",
    "A template that prints the time (Hunyuan A13B: to the second) changes the head of its prompts all the time; a "
    "session keeps the time of its first prompt, for a day at most.",
    lambda conversation, _: conversation,
)
"""A rule that applies where a prompt is rendered."""

NAMED: tuple[Rule, ...] = (*RULES, SESSION_CLOCK)
"""All rules that can be switched off and are counted by name."""
