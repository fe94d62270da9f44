"""Context editing: remove from a long history what the client allows the server to remove.

https://platform.claude.com/docs/en/build-with-claude/context-editing. The client sends the whole history every time,
so the removed parts have to be found from the history alone, with the same result each time: a prompt must go on from
the one before it, and differ only where an edit newly applies. So the conversation is replayed, request by request,
and a part that was cleared at one of them stays cleared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from singletree.conversation import (
    AppliedEdit,
    ClearThinking,
    ClearToolUses,
    ContextEdit,
    Conversation,
    Document,
    Image,
    Part,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolReference,
    ToolResult,
    Turn,
)
from singletree.prompts.template.tool_definition import tool_definition

PLACEHOLDER = "[The result of this tool call was cleared to make room.]"
"""The text that replaces a cleared tool result."""

CountTokens = Callable[[str], int]
"""Returns the number of tokens in a text."""


def apply_edits(
    conversation: Conversation, edits: Iterable[ContextEdit], count_tokens: CountTokens
) -> tuple[Conversation, tuple[AppliedEdit, ...]]:
    """Apply ``edits`` in their order; return the conversation, and a report of each edit that removed something.

    Args:
        count_tokens: returns the number of tokens in a text. The few tokens that a template adds are not counted.
    """
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
    """Clear old reasoning. All turns between two user messages count as one: a tool loop keeps its reasoning whole."""
    if edit.keep_turns is None:  # Claude Code sends this with every request
        return conversation, AppliedEdit("thinking", 0, 0)
    loops = _loops(conversation.turns)
    thinking = sorted({loop for loop, turn in zip(loops, conversation.turns, strict=True) if turn.reasoning})
    cleared = set(thinking[: max(len(thinking) - edit.keep_turns, 0)])
    turns, tokens = list(conversation.turns), 0
    for i, (loop, turn) in enumerate(zip(loops, turns, strict=True)):
        if loop in cleared and turn.role == "assistant":
            tokens += count_tokens(turn.reasoning)
            turns[i] = replace(turn, parts=tuple(p for p in turn.parts if not isinstance(p, Reasoning)))
    changed = replace(conversation, turns=tuple(turns)) if cleared else conversation
    return changed, AppliedEdit("thinking", len(cleared), tokens)


def _loops(turns: Sequence[Turn]) -> list[int]:
    """Return for each turn the number of user turns before it."""
    count, loops = 0, []
    for turn in turns:
        loops.append(count)
        count += turn.role == "user"
    return loops


@dataclass(slots=True)
class _Use:
    """A call. ``frees`` is the number of tokens that clearing the call and its result frees."""

    name: str
    frees: int = 0
    answered: bool = False


class _History:
    """A conversation that grows turn by turn: its size in tokens, and its tool uses in their order."""

    def __init__(self, edit: ClearToolUses, count_tokens: CountTokens, tools: Sequence[Tool]) -> None:
        self._edit = edit
        self._count_tokens = count_tokens
        self._placeholder = count_tokens(PLACEHOLDER)
        self._uses: dict[str, _Use] = {}
        self.tokens = sum(count_tokens(_shown(tool)) for tool in tools if not tool.deferred)
        self.cleared: dict[str, _Use] = {}

    def add(self, turn: Turn) -> None:
        """Add the next turn."""
        for part in turn.parts:
            size = self._size(part)
            self.tokens += size
            if isinstance(part, ToolCall):
                frees = size if _clears_inputs(self._edit, part.name) else 0
                self._uses[part.id] = _Use(part.name, frees)
            elif isinstance(part, ToolResult) and (use := self._uses.get(part.call_id)) and not use.answered:
                use.frees += max(size - self._placeholder, 0)
                # The model reads the definition of a deferred tool at its reference; without it there is no tool.
                use.answered = not any(isinstance(inner, ToolReference) for inner in part.parts)

    def request(self) -> None:
        """Clear the tool uses that the edit clears if a request is made now."""
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

    def _size(self, part: Part) -> int:
        if isinstance(part, Text | Reasoning):
            return self._count_tokens(part.text)
        if isinstance(part, ToolCall):
            return self._count_tokens(part.arguments)
        if isinstance(part, ToolResult):
            return sum(self._size(inner) for inner in part.parts)
        assert isinstance(part, Image | Document | ToolReference)
        return 0


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
    tokens = sum(use.frees for use in cleared.values())
    return _without(conversation, edit, cleared), AppliedEdit("tool_uses", len(cleared), tokens)


def _without(conversation: Conversation, edit: ClearToolUses, cleared: Mapping[str, _Use]) -> Conversation:
    if not cleared:
        return conversation
    turns = (
        replace(turn, parts=tuple(_cleared(p, edit, cleared) for p in turn.parts))
        for turn in conversation.turns
    )
    return replace(conversation, turns=tuple(turns))


def _cleared(part: Part, edit: ClearToolUses, cleared: Collection[str]) -> Part:
    if isinstance(part, ToolResult) and part.call_id in cleared:
        return replace(part, parts=(Text(PLACEHOLDER),))
    if isinstance(part, ToolCall) and part.id in cleared and _clears_inputs(edit, part.name):
        return replace(part, arguments="{}")
    return part


def _clears_inputs(edit: ClearToolUses, name: str) -> bool:
    return edit.inputs if isinstance(edit.inputs, bool) else name in edit.inputs
