"""Anchors: the last line of a turn's text, by which the turn's place in a rendered prompt is found."""

from __future__ import annotations

import hashlib

from singletree.conversation import Part, Text, ToolResult, Turn

MIN_ANCHOR = 6
"""An anchor shorter than this many characters could be text of the template itself."""

_MAX_ANCHOR = 200
"""The most characters of a turn that are searched for in the prompt."""


def anchor_of(item: Turn | Part) -> str:
    """Return the anchor of a turn or part: the end of its last line of text; empty where it has no text.

    It is a single line, because no template writes anything into a line.
    """
    if isinstance(item, Text):
        lines = item.text.rstrip()[-_MAX_ANCHOR:].splitlines()
        return lines[-1].strip() if lines else ""
    inner = item.parts if isinstance(item, Turn | ToolResult) else ()
    return next(filter(None, map(anchor_of, reversed(inner))), "")


def text_length(item: Turn | Part) -> int:
    """Return the length of the text in a turn or part, in characters."""
    if isinstance(item, Text):
        return len(item.text)
    return sum(map(text_length, item.parts)) if isinstance(item, Turn | ToolResult) else 0


def anchor_digest(anchor: str) -> str:
    """Return a digest of ``anchor``, as hexadecimal text."""
    return hashlib.blake2b(anchor.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def anchor_end(prompt: str, anchor: str) -> int:
    """Return the position in ``prompt`` after the last occurrence of ``anchor``.

    It is 0 where the anchor is not found, or is so short that it could be text of the template.
    """
    found = prompt.rfind(anchor) if len(anchor) >= MIN_ANCHOR else -1
    return found + len(anchor) if found >= 0 else 0
