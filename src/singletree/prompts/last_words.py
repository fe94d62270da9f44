"""The last words of what was said: by them a place in a prompt is found."""

from __future__ import annotations

import hashlib

from singletree.conversation import Part, Text, ToolResult, Turn

TELLING = 6
"""How many characters tell words from what a template writes itself."""

_ANCHOR = 200
"""How many characters of what was said before a turn are looked for in the prompt."""


def last_words(said: Turn | Part) -> str:
    """The end of the text in ``said``, as far as it is one line: no template writes anything into it."""
    if isinstance(said, Text):
        lines = said.text.strip().splitlines()
        return lines[-1][-_ANCHOR:].strip() if lines else ""
    inner = said.parts if isinstance(said, Turn | ToolResult) else ()
    return next(filter(None, map(last_words, reversed(inner))), "")


def length(said: Turn | Part) -> int:
    """How long the text in ``said`` is."""
    if isinstance(said, Text):
        return len(said.text)
    return sum(map(length, said.parts)) if isinstance(said, Turn | ToolResult) else 0


def digest_of_words(said: Turn) -> str:
    """What tells the last words of ``said`` from others."""
    words = last_words(said).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(words, digest_size=8).hexdigest()


def behind_last_words(prompt: str, turn: Turn) -> int:
    """Where the words of ``turn`` end in ``prompt``; 0 where they are not found or could be a template's."""
    words = last_words(turn)
    found = prompt.rfind(words) if len(words) >= TELLING else -1
    return found + len(words) if found >= 0 else 0
