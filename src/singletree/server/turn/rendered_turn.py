"""Parses turns as the chat template printed them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from singletree.conversation import Part, Reasoning, Text, Tool, ToolCall, Turn
from singletree.parsing.family import Family
from singletree.parsing.parser import parse
from singletree.prompts.tokenizer.added_tokens import strip_guards


@dataclass(frozen=True, slots=True)
class RenderedTurnParser:
    """Parses turns as the template printed them. Equal ``key``s mean the same family and tools, so equal results."""

    family: Family
    tools: Sequence[Tool]
    key: tuple[int, bytes]

    @classmethod
    def of(cls, family: Family, tools: Sequence[Tool]) -> RenderedTurnParser:
        """Return the parser for ``family`` and the ``tools`` that a client sent."""
        data = msgspec.json.encode([(tool.name, tool.parameters, tool.kind, tool.strict) for tool in tools])
        return cls(family, tools, (id(family), hashlib.blake2b(data, digest_size=16).digest()))

    def __call__(self, text: str, opened: str) -> Turn:
        """Parse ``text``; ``opened`` is the part of the turn that the prompt wrote before it.

        The text is parsed with its guards: what they break was not a marker when the model wrote it.
        """
        return _without_guards(parse(self.family, text, self.tools, opened))


def _without_guards(turn: Turn) -> Turn:
    return replace(turn, parts=tuple(map(_readable, turn.parts)))


def _readable(part: Part) -> Part:
    if isinstance(part, Text | Reasoning):
        return replace(part, text=strip_guards(part.text))
    if isinstance(part, ToolCall):
        return replace(part, name=strip_guards(part.name), arguments=strip_guards(part.arguments))
    return part
