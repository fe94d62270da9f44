"""Edit a conversation before anything else is done with it: what the client asks for, and results in user text.
Truncation, the last means, removes part of the middle of a history that is too long for the context window.

https://platform.claude.com/docs/en/build-with-claude/context-editing. The client sends the whole history every time,
so the removed parts have to be found from the history alone, with the same result each time: a prompt must go on from
the one before it, and differ only where an edit newly applies. So the conversation is replayed, request by request,
and a part that was cleared at one of them stays cleared.

https://platform.openai.com/docs/api-reference/responses/create#responses-create-truncation: for the same reason a
history is not cut as little as possible, which would move the cut with every turn, but at one of a few places that
depend only on the turns before them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, repeat
from typing import NamedTuple

from singletree.conversation import (
    Conversation,
    Part,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolReference,
    ToolResult,
    Turn,
)
from singletree.prompts.replay.turn_comparison import without_reasoning
from singletree.prompts.template.content import tool_definition
from singletree.request_options import AppliedEdit, ClearThinking, ClearToolUses, ContextEdit

PLACEHOLDER = "[The result of this tool call was cleared to make room.]"
"""The text that replaces a cleared tool result."""

CountTokens = Callable[[str], int]
"""Returns the number of tokens in a text."""


def apply_edits(
    conversation: Conversation, edits: Iterable[ContextEdit], count_tokens: CountTokens
) -> tuple[Conversation, tuple[AppliedEdit, ...]]:
    """Apply ``edits`` in their order; return the conversation, and a report of each that removed something."""
    applied = []
    for edit in edits:
        if isinstance(edit, ClearThinking):
            conversation, report = _clear_thinking(conversation, edit, count_tokens)
        else:
            conversation, report = _clear_tool_uses(conversation, edit, count_tokens)
        if report.count:
            applied.append(report)
    return conversation, tuple(applied)


def _clear_thinking(
    conversation: Conversation, edit: ClearThinking, count_tokens: CountTokens
) -> tuple[Conversation, AppliedEdit]:
    """All turns between two user messages count as one: a tool loop keeps its reasoning whole."""
    if edit.keep_turns is None:  # Claude Code sends this with every request
        return conversation, AppliedEdit("thinking", 0, 0)
    # For each turn, the number of user turns before it; one more at the end.
    loops = list(accumulate((turn.role == "user" for turn in conversation.turns), initial=0))
    thinking = sorted({loop for loop, turn in zip(loops, conversation.turns, strict=False) if turn.reasoning})
    cleared = set(thinking[: max(len(thinking) - edit.keep_turns, 0)])
    turns, tokens = list(conversation.turns), 0
    for i, (loop, turn) in enumerate(zip(loops, turns, strict=False)):
        if loop in cleared and turn.role == "assistant":
            tokens += count_tokens(turn.reasoning)
            turns[i] = replace(turn, parts=without_reasoning(turn.parts))
    changed = replace(conversation, turns=tuple(turns)) if cleared else conversation
    return changed, AppliedEdit("thinking", len(cleared), tokens)


@dataclass(slots=True)
class _Use:
    """A call. ``frees`` is the number of tokens that clearing the call and its result frees."""

    name: str
    frees: int = 0
    answered: bool = False


class _History:
    def __init__(self, edit: ClearToolUses, count_tokens: CountTokens, tools: Sequence[Tool]) -> None:
        self._edit = edit
        self._count_tokens = count_tokens
        self._placeholder = count_tokens(PLACEHOLDER)
        self._uses: dict[str, _Use] = {}
        self.tokens = sum(count_tokens(_shown(tool)) for tool in tools if not tool.deferred)
        self.cleared: dict[str, _Use] = {}

    def add(self, turn: Turn) -> None:
        for part in turn.parts:
            size = part_size(part, self._count_tokens)
            self.tokens += size
            if isinstance(part, ToolCall):
                frees = size if _clears_inputs(self._edit, part.name) else 0
                self._uses[part.id] = _Use(part.name, frees)
            elif isinstance(part, ToolResult) and (use := self._uses.get(part.call_id)) and not use.answered:
                use.frees += max(size - self._placeholder, 0)
                # The model reads the definition of a deferred tool at its reference; without it there is no tool.
                use.answered = not any(isinstance(inner, ToolReference) for inner in part.parts)

    def request(self) -> None:
        edit, uses = self._edit, list(self._uses.items())
        full = edit.trigger_tokens is not None and self.tokens > edit.trigger_tokens
        many = edit.trigger_uses is not None and len(uses) > edit.trigger_uses
        if not (full or many):
            return
        old = uses[: max(len(uses) - edit.keep, 0)]
        found = {id: use for id, use in old if use.answered and use.name not in edit.exclude_tools}
        frees = sum(use.frees for use in found.values())
        if found and frees >= edit.at_least:
            self.cleared |= found
            self.tokens -= frees
            for id in found:
                del self._uses[id]


def _shown(tool: Tool) -> str:
    try:
        return json.dumps(tool_definition(tool))
    except RecursionError:  # the schema is nested too deeply for Python
        return tool.description or tool.name


def _clear_tool_uses(
    conversation: Conversation, edit: ClearToolUses, count_tokens: CountTokens
) -> tuple[Conversation, AppliedEdit]:
    count = sum(len(turn.tool_calls) for turn in conversation.turns)
    if count <= edit.keep:
        return conversation, AppliedEdit("tool_uses", 0, 0)
    history = _History(edit, count_tokens, conversation.tools)
    for turn in conversation.turns:
        if turn.role == "assistant":
            history.request()
        history.add(turn)
    history.request()
    cleared = history.cleared
    if cleared:
        turns = (
            replace(turn, parts=tuple(_cleared(part, edit, cleared) for part in turn.parts))
            for turn in conversation.turns
        )
        conversation = replace(conversation, turns=tuple(turns))
    tokens = sum(use.frees for use in cleared.values())
    return conversation, AppliedEdit("tool_uses", len(cleared), tokens)


def _cleared(part: Part, edit: ClearToolUses, cleared: Collection[str]) -> Part:
    if isinstance(part, ToolResult) and part.call_id in cleared:
        return replace(part, parts=(Text(PLACEHOLDER),))
    if isinstance(part, ToolCall) and part.id in cleared and _clears_inputs(edit, part.name):
        return replace(part, arguments="{}")
    return part


def _clears_inputs(edit: ClearToolUses, name: str) -> bool:
    return edit.inputs if isinstance(edit.inputs, bool) else name in edit.inputs


_LONGEST_START = 256
"""The number of characters in which a result has to begin; white space is allowed before it."""


def read_results(
    conversation: Conversation, marks: tuple[str, str] | None, call_opener: str = ""
) -> Conversation:
    """Return ``conversation`` with tool results in place of user text that has their form.

    Qwen-Agent writes ``<tool_response>`` around results and sends them as user messages, because Qwen's templates print
    results so and treat such a message as one. As a result, its text is guarded and the template prints the marks
    (``TemplateCapabilities.result_marks``; None leaves the conversation as it is).

    Where ``call_opener`` opens each call and the assistant's calls are text too, a text is read as several results only
    if it answers as many calls, since a tool could have written the marks between them.
    """
    if marks is None:
        return conversation
    turns = conversation.turns
    changed: dict[int, Turn] = {}
    for i, turn in enumerate(turns):
        if i and turn.role == "user":
            read = _read(turn, changed.get(i - 1, turns[i - 1]), marks, call_opener)
            if read is not turn:
                changed[i] = read
    if not changed:
        return conversation
    return replace(conversation, turns=tuple(changed.get(i, turn) for i, turn in enumerate(turns)))


def _read(turn: Turn, answered: Turn, marks: tuple[str, str], call_opener: str) -> Turn:
    begin, end = marks
    found: list[str] = []
    for part in turn.parts:
        if not isinstance(part, Text):
            return turn
        if not part.text or part.text.isspace():
            continue
        if not part.text[:_LONGEST_START].lstrip().startswith(begin):
            return turn  # the usual case; found without reading the whole message
        text = part.text.strip()
        if len(text) < len(begin) + len(end) or not text.endswith(end):
            return turn
        found.append(text[len(begin) : len(text) - len(end)])
    if len(found) == 1 and call_opener:
        several = re.split(rf"{re.escape(end)}\s*{re.escape(begin)}", found[0])
        calls = answered.text.count(call_opener) + len(answered.tool_calls)
        found = several if len(several) == calls else found
    results = [ToolResult("", (Text(text.removeprefix("\n").removesuffix("\n")),)) for text in found]
    return Turn("tool", tuple(results), turn.extra) if results else turn


class Cut(NamedTuple):
    """A cut that leaves out the turns from ``start`` up to, but without, ``end``."""

    start: int
    end: int

    def of(self, conversation: Conversation) -> Conversation:
        turns = conversation.turns
        return Conversation((*turns[: self.start], *turns[self.end :]), conversation.tools)


def first_fitting(cuts: Sequence[Cut], fits: Callable[[Cut], bool]) -> Cut | None:
    """Return the smallest cut that fits, else the largest, by a binary search: ``fits`` is slow. None without cuts."""
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(cuts[middle]) else (middle + 1, high)
    return cuts[low] if cuts else None


def possible_cuts(turns: Sequence[Turn], step: int) -> list[Cut]:
    """Return the possible cuts of ``turns``, the smallest first, each about ``step`` characters larger than the last.

    The turns before the first answer (the instructions, the task) and the end stay. Results go with their calls.
    """
    start = next((i for i, turn in enumerate(turns) if turn.role == "assistant"), None)
    if start is None:
        start = min(len(turns), 1 + next((i for i, t in enumerate(turns) if t.role == "user"), len(turns)))
    ends = [i for i in _whole(turns, start) if i > start]
    found, left_out, wanted = [], 0, step
    for before, end in pairwise([start, *ends]):
        left_out += sum(part_size(part) for turn in turns[before:end] for part in turn.parts)
        if left_out >= wanted or end == ends[-1]:
            found.append(Cut(start, end))
            wanted = left_out + step
    return found


def conversation_characters(conversation: Conversation) -> int:
    """Return about how many characters of text a prompt of ``conversation`` has at least: of its turns and tools."""
    described = sum(len(tool.description or "") for tool in conversation.tools)
    return described + sum(part_size(part) for turn in conversation.turns for part in turn.parts)


def _whole(turns: Sequence[Turn], start: int) -> list[int]:
    """Return the turns, from ``start`` on, before which a cut can end: no earlier call is answered there or later."""
    answers: dict[str, int] = {}
    answered = []  # by turn, the last one first: the last turn that answers one of its calls
    for i in range(len(turns) - 1, start - 1, -1):
        answered.append(max((answers.get(call.id, i) for call in turns[i].tool_calls), default=i))
        answers |= {part.call_id: i for part in turns[i].parts if isinstance(part, ToolResult)}
    before = accumulate(reversed(answered), max, initial=start - 1)
    within = range(start, len(turns))
    return [i for i, last in zip(within, before, strict=False) if last < i and turns[i].role != "tool"]


def part_size(part: Part, measure: Callable[[str], int] = len) -> int:
    """Return about how many characters (or what ``measure`` counts) ``part`` has; pictures take little room."""
    if isinstance(part, Text | Reasoning):
        return measure(part.text)
    if isinstance(part, ToolCall):
        return measure(part.arguments)
    return sum(map(part_size, part.parts, repeat(measure))) if isinstance(part, ToolResult) else 0
