"""Compare a generated turn with what the client sent back of it: all of it, a part, or something else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from singletree.conversation import Reasoning, Text, Tool, ToolCall, Turn
from singletree.parsing.family import Family
from singletree.parsing.parser import parse
from singletree.prompts.replay.turn_comparison import (
    REASONING_TAGS,
    ProseSpan,
    consists_of,
    is_equivalent_turn,
    without_space,
)

_PLAIN = re.compile(r"[\w.-]+")
"""A part of an argument that JSON, Python and other forms write alike."""

Difference = Literal[
    "none",
    "reasoning_left_out",
    "in_part",
    "in_pieces",
    "interrupted",
    "reasoning_as_text",
    "calls_as_text",
    "edited",
]
"""How a turn differs that came back. ``none``: it is complete. ``in_pieces``: it is complete, in several messages.
``interrupted``: messages of others stand between its text and its calls. ``edited``: it has content that was not
generated."""


def difference(
    generated: Turn,
    returned: Sequence[Turn],
    family: Family,
    tools: Sequence[Tool] = (),
    later: Sequence[Turn] = (),
) -> Difference:
    """Return how ``returned`` differs from ``generated``.

    White space, the formatting of arguments, and the order of text, reasoning and calls are ignored.

    Args:
        returned: the adjacent assistant messages that came back for the turn.
        family: parses calls and reasoning that came back as text.
        tools: the tools that the turn could call.
        later: the turns behind ``returned``.
    """
    joined = Turn("assistant", tuple(part for turn in returned for part in turn.parts))
    thought, text = without_space(generated.reasoning), without_space(generated.text)
    their_thought, their_text = without_space(joined.reasoning), without_space(joined.text)
    if not joined.tool_calls and their_text:
        whole = (their_text, their_thought) == (text, thought)
        if not whole and parse(family, joined.text, tools).tool_calls:
            return "calls_as_text"
        if _retells_calls(their_text, generated):
            return "calls_as_text"
    if not _are_ordered_part(joined.tool_calls, generated.tool_calls, tools):
        return "edited"
    if their_text not in text:
        rest = _without_thought(their_text, thought, family)
        is_as_text = (rest is not None and rest in text) or _has_thoughts_between(joined, generated, family)
        return "reasoning_as_text" if is_as_text else "edited"
    if their_thought not in thought:
        return "edited"
    has_calls = len(joined.tool_calls) == len(generated.tool_calls)
    if not has_calls and not joined.tool_calls and _calls_follow(generated, later, tools):
        return "interrupted"
    if their_text != text or not has_calls or (their_thought and their_thought != thought):
        return "in_part"
    if their_thought != thought:
        return "reasoning_left_out"
    return "in_pieces" if len(returned) > 1 else "none"


def thought_is_in(excerpt: str, turns: Sequence[Turn]) -> bool:
    """Tell whether any reasoning of ``turns`` begins with ``excerpt``, ignoring white space."""
    begin = without_space(excerpt)
    spans = (part.text for turn in turns for part in turn.parts if isinstance(part, Reasoning))
    return any(without_space(span).startswith(begin) for span in spans)


def _without_thought(text: str, thought: str, family: Family) -> str | None:
    """Return ``text`` without ``thought`` and the markers around it; None where it does not contain ``thought``."""
    for marker in (*REASONING_TAGS, *(family.reasoning or ())):
        text = text.replace(without_space(marker), "")
    if not thought or thought not in text:
        return None
    before, _, after = text.partition(thought)
    return before + after


def _has_thoughts_between(returned: Turn, generated: Turn, family: Family) -> bool:
    """Tell whether the text of ``returned`` is made of reasoning and text of ``generated``, each in its place."""
    spans = [
        ProseSpan(part.text, True, isinstance(part, Reasoning))
        for part in generated.parts
        if isinstance(part, Text | Reasoning)
    ]
    text = without_space(returned.text)
    has_thought = any(without_space(s.text) in text for s in spans if s.is_reasoning and s.text.strip())
    return has_thought and consists_of(returned.text, spans, family.reasoning or ())


def _retells_calls(text: str, generated: Turn) -> bool:
    """Tell whether ``text``, without white space, begins with the text of ``generated`` and goes on with its calls."""
    begin = without_space(generated.text)
    if not generated.tool_calls or not text.startswith(begin):
        return False
    at = len(begin)
    for call in generated.tool_calls:
        for word in (call.name, *_values(call.arguments)):
            if word not in text[at:]:
                return False
        at = text.find(call.name, at) + len(call.name)
    return True


def _values(arguments: str) -> Iterator[str]:
    """Yield the texts and numbers in the JSON ``arguments``, without white space and as far as no form escapes them."""
    try:
        waiting = [json.loads(arguments or "{}")]
    except (ValueError, RecursionError):
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            yield from _PLAIN.findall(without_space(str(value)))


def _calls_follow(generated: Turn, later: Sequence[Turn], tools: Sequence[Tool]) -> bool:
    """Tell whether the next turn of the assistant in ``later`` consists of the calls of ``generated``."""
    following = next((turn for turn in later if turn.role == "assistant"), None)
    if following is None or not following.tool_calls or following.text.strip():
        return False
    return _are_ordered_part(following.tool_calls, generated.tool_calls, tools)


def _are_ordered_part(some: Sequence[ToolCall], calls: Sequence[ToolCall], tools: Sequence[Tool]) -> bool:
    rest = iter(calls)
    return all(any(_is_same(call, other, tools) for other in rest) for call in some)


def _is_same(returned: ToolCall, generated: ToolCall, tools: Sequence[Tool]) -> bool:
    return is_equivalent_turn(Turn("assistant", (returned,)), Turn("assistant", (generated,)), tools)
