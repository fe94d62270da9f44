"""Short ways to write down turns and to render them."""

from __future__ import annotations

from typing import Any

from prompts.template_sources import cached_template, write_parts
from singletree.conversation import Conversation, Part, Role, Text, Tool, ToolCall, ToolResult, Turn
from singletree.prompts.history.canonicalization import Canonicalize, ToolsOf, no_session


def turn(role: Role, *parts: Part | str) -> Turn:
    """A turn; a string is a text."""
    return Turn(role, tuple(Text(part) if isinstance(part, str) else part for part in parts))


def call(arguments: str = '{"k": 1}', id: str = "call_1", name: str = "f", complete: bool = True) -> ToolCall:
    """A call of the tool ``f``."""
    return ToolCall(name, arguments, id, complete)


def result(text: str = "done", id: str = "call_1") -> Turn:
    """The answer to a call."""
    return turn("tool", ToolResult(id, (Text(text),)))


USER = turn("user", "hi")


def render(source: str, *turns: Turn, tools: tuple[Tool, ...] = (), **options: Any) -> str:
    """The prompt that the template ``source`` makes of ``turns``."""
    template = cached_template(source)
    return template.render(Conversation(turns, tools), render_parts=write_parts, **options)


def canonicalize(
    conversation: Conversation, *, off: frozenset[str] = frozenset(), tools_of: ToolsOf = no_session
) -> tuple[Conversation, tuple[str, ...]]:
    """``conversation`` after the rules, and their names, without an earlier prompt."""
    made = Canonicalize(off, tools_of).run(conversation, None)[0]
    return made.conversation, made.rules


def assistant_text(source: str, *parts: Part | str) -> str:
    """What stands in a ChatML prompt for one assistant turn between a question and a later one."""
    text = render(source, USER, turn("assistant", *parts), turn("user", "more"))
    return text.split("assistant\n", 1)[1].split("<|im_end|>", 1)[0]
