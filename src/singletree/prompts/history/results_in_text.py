"""Convert tool results that a client writes as user text, in the template's form, to results."""

from __future__ import annotations

import re
from dataclasses import replace

from singletree.conversation import Conversation, Text, ToolResult, Turn

_LONGEST_START = 256
"""The number of characters in which a result has to begin; white space is allowed before it."""


def read_results(
    conversation: Conversation, marks: tuple[str, str] | None, call_opener: str = ""
) -> Conversation:
    """Return ``conversation`` with tool results in place of user text that has their form.

    Qwen-Agent writes ``<tool_response>`` around results and sends them as user messages, because Qwen's templates print
    results so and treat such a message as one. As a result, its text is guarded and the template prints the marks.

    Args:
        marks: the prefix and suffix that the template writes around a result (``TemplateCapabilities.result_marks``).
            None leaves the conversation as it is.
        call_opener: the text that opens each call where the assistant's calls are text too. A text is read as several
            results only if it answers as many calls, since a tool could have written the marks between them.
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
