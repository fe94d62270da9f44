"""Fingerprints of messages, by which the messages of two prompts are compared."""

from __future__ import annotations

from typing import NamedTuple

from singletree.conversation import Document, Image, Part, Reasoning, Text, ToolCall, ToolResult, Turn


class Fingerprint(NamedTuple):
    """Hashes that stand for one message: one of its reasoning, one of all other content."""

    role: str
    words: int
    thoughts: int


def fingerprint(turn: Turn) -> Fingerprint:
    """Return the fingerprint of ``turn``, without ids: they are not in the prompt, and some harnesses change them."""
    thoughts: list[str] = []
    words: list[tuple[str, ...]] = []
    for part in turn.parts:
        if type(part) is Reasoning:
            thoughts.append(part.text)
        else:
            _add_words(words, part)
    return Fingerprint(turn.role, hash(tuple(words)), hash(tuple(thoughts)))


def _add_words(words: list[tuple[str, ...]], part: Part) -> None:
    if type(part) is Text:
        words.append(("text", part.text))
    elif type(part) is ToolCall:
        words.append(("call", part.name, part.arguments))
    elif type(part) is ToolResult:
        words.append(("result",))
        for inner in part.parts:
            _add_words(words, inner)
    elif isinstance(part, Image | Document):
        words.append(("data", part.key if type(part) is Image and part.key else part.data, part.url))
