"""Recognises turns from which a client left out parts, or in which it repeated some, without changing any text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from singletree.conversation import Reasoning, Text, ToolCall, Turn

_SPACE = re.compile(r"\s+")

REASONING_TAGS = tuple(
    f"<{end}{name}>" for name in ("think", "thinking", "thought", "reasoning") for end in ("", "/")
)
"""Tags that clients write around reasoning that they keep in the content, whatever the model's own markers are."""

_MAX_POSITIONS = 64
"""How many ways to match a text are followed at once. Only a text that repeats one span many times has more."""


class ProseSpan(NamedTuple):
    """A text or reasoning of a turn, whether a client may leave it out, and whether it is reasoning."""

    text: str
    is_optional: bool
    is_reasoning: bool = False


def consists_of(text: str, spans: Sequence[ProseSpan], tags: Sequence[str] = ()) -> bool:
    """Return whether ``text`` consists of ``spans`` in their order, each complete, with any white space between them.

    Args:
        spans: those that are optional may be missing.
        tags: markers of reasoning that ``text`` may contain, besides the usual ones.
    """
    if _is_sequence_of(text, spans):
        return True
    found = [tag for tag in (*REASONING_TAGS, *tags) if tag in text]
    if not found:
        return False
    bare = [span._replace(text=_without(span.text, found)) for span in spans]
    return _is_sequence_of(_without(text, found), bare)


def _is_sequence_of(text: str, spans: Sequence[ProseSpan]) -> bool:
    positions = [_skip_space(text, 0)]
    for span in spans:
        wanted = span.text.strip()
        if not wanted:
            continue
        matched = [_skip_space(text, at + len(wanted)) for at in positions if text.startswith(wanted, at)]
        skipped = positions if span.is_optional else ()
        positions = sorted({*matched, *skipped}, reverse=True)[:_MAX_POSITIONS]
        if not positions:
            return False
    return positions[0] == len(text)


def _without(text: str, tags: Sequence[str]) -> str:
    for tag in tags:
        text = text.replace(tag, "")
    return text


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def without_echoes(turn: Turn) -> Turn:
    """Return ``turn`` without the texts that repeat the reasoning before them (Copilot CLI on Responses sends such).

    A turn without any other text or call keeps them: there the model itself may have repeated its reasoning.
    """
    echoes = set(_echoes(turn))
    rest = (p for i, p in enumerate(turn.parts) if i not in echoes and not isinstance(p, Reasoning))
    if not echoes or not any(
        isinstance(p, ToolCall) or (isinstance(p, Text) and p.text.strip()) for p in rest
    ):
        return turn
    return replace(turn, parts=tuple(p for i, p in enumerate(turn.parts) if i not in echoes))


def _echoes(turn: Turn) -> Iterator[int]:
    """Yield the indexes of the texts that equal the reasoning directly before them."""
    reasoning = ""
    for i, part in enumerate(turn.parts):
        if isinstance(part, Text) and reasoning and part.text.strip() == reasoning:
            yield i
        reasoning = part.text.strip() if isinstance(part, Reasoning) else ""
