"""Parses turns as the chat template printed them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import msgspec

from singletree.conversation import Part, Reasoning, Text, Tool, ToolCall, Turn
from singletree.parsing.family import Family
from singletree.parsing.parser import parse
from singletree.prompts.tokenizer.added_tokens import strip_guards


class RenderedTurnParser:
    """Parses turns as the template printed them.

    Args:
        family: the model's format.
        tools: the tools that a client sent.
    """

    def __init__(self, family: Family, tools: Sequence[Tool]) -> None:
        self.family = family
        self.tools = tools

    @cached_property
    def key(self) -> tuple[int, bytes]:
        """A value that is equal for the same family and tools, so for equal results."""
        data = msgspec.json.encode(
            [(tool.name, tool.parameters, tool.kind, tool.strict) for tool in self.tools]
        )
        return id(self.family), hashlib.blake2b(data, digest_size=16).digest()

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
