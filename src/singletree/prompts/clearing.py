"""Context editing: what a client lets the server take out of a long history, taken out.

https://platform.claude.com/docs/en/build-with-claude/context-editing. The client sends the whole history every time,
so what has been taken out has to be found again from the history alone, and the same each time: a prompt must go on
from the one before it, and break from it only where an edit newly applies. So the conversation is lived through once
more, request by request, and what was cleared at one of them stays cleared.
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
from singletree.prompts.tool_definition import tool_definition

PLACEHOLDER = "[The result of this tool call was cleared to make room.]"

Weigh = Callable[[str], int]


def clear(
    conversation: Conversation, edits: Iterable[ContextEdit], weigh: Weigh
) -> tuple[Conversation, tuple[AppliedEdit, ...]]:
    """The conversation after ``edits``, in their order, and what those took out that found anything.

    Args:
        weigh: how many tokens a text is. Sizes are those of the texts: a template's own few tokens do not count.
    """
    applied = []
    for edit in edits:
        if isinstance(edit, ClearThinking):
            conversation, told = _clear_thinking(conversation, edit, weigh)
        else:
            conversation, told = _clear_tool_uses(conversation, edit, weigh)
        if told.count:
            applied.append(told)
    return conversation, tuple(applied)


def _clear_thinking(
    conversation: Conversation, edit: ClearThinking, weigh: Weigh
) -> tuple[Conversation, AppliedEdit]:
    """All that is said between two messages of the user is one turn here: a tool loop keeps its thoughts whole."""
    if edit.keep_turns is None:  # as Claude Code asks with every request
        return conversation, AppliedEdit("thinking", 0, 0)
    loops = _loops(conversation.turns)
    thinking = sorted({loop for loop, turn in zip(loops, conversation.turns, strict=True) if turn.reasoning})
    cleared = set(thinking[: max(len(thinking) - edit.keep_turns, 0)])
    turns, tokens = list(conversation.turns), 0
    for i, (loop, turn) in enumerate(zip(loops, turns, strict=True)):
        if loop in cleared and turn.role == "assistant":
            tokens += weigh(turn.reasoning)
            turns[i] = replace(turn, parts=tuple(p for p in turn.parts if not isinstance(p, Reasoning)))
    changed = replace(conversation, turns=tuple(turns)) if cleared else conversation
    return changed, AppliedEdit("thinking", len(cleared), tokens)


def _loops(turns: Sequence[Turn]) -> list[int]:
    """For each turn how many of the user's were before it."""
    count, loops = 0, []
    for turn in turns:
        loops.append(count)
        count += turn.role == "user"
    return loops


@dataclass(slots=True)
class _Use:
    """A call, and once it is answered what it takes to clear it frees, in tokens."""

    name: str
    frees: int = 0
    answered: bool = False


class _History:
    """A conversation as it grew: its size, and its tool uses in their order."""

    def __init__(self, edit: ClearToolUses, weigh: Weigh, tools: Sequence[Tool]) -> None:
        self._edit = edit
        self._weigh = weigh
        self._placeholder = weigh(PLACEHOLDER)
        self._uses: dict[str, _Use] = {}
        self.tokens = sum(weigh(_shown(tool)) for tool in tools if not tool.deferred)
        self.cleared: dict[str, _Use] = {}

    def add(self, turn: Turn) -> None:
        """One more turn."""
        for part in turn.parts:
            size = self._size(part)
            self.tokens += size
            if isinstance(part, ToolCall):
                frees = size if _clears_inputs(self._edit, part.name) else 0
                self._uses[part.id] = _Use(part.name, frees)
            elif isinstance(part, ToolResult) and (use := self._uses.get(part.call_id)) and not use.answered:
                use.frees += max(size - self._placeholder, 0)
                # A reference is where the model reads what a deferred tool is; without it there is no tool.
                use.answered = not any(isinstance(inner, ToolReference) for inner in part.parts)

    def ask(self) -> None:
        """A request is made now: clears what the edit says is to be cleared."""
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
            return self._weigh(part.text)
        if isinstance(part, ToolCall):
            return self._weigh(part.arguments)
        if isinstance(part, ToolResult):
            return sum(self._size(inner) for inner in part.parts)
        assert isinstance(part, Image | Document | ToolReference)
        return 0


def _shown(tool: Tool) -> str:
    try:
        return json.dumps(tool_definition(tool))
    except RecursionError:  # a schema nested deeper than Python reads
        return tool.description or tool.name


def _clear_tool_uses(
    conversation: Conversation, edit: ClearToolUses, weigh: Weigh
) -> tuple[Conversation, AppliedEdit]:
    made = sum(len(turn.tool_calls) for turn in conversation.turns)
    if made <= edit.keep:
        return conversation, AppliedEdit("tool_uses", 0, 0)
    history = _History(edit, weigh, conversation.tools)
    for turn in conversation.turns:
        if turn.role == "assistant":
            history.ask()
        history.add(turn)
    history.ask()
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
