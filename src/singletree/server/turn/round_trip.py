"""Turns as the chat template prints them and as clients send them back: do their tokens come back without a capsule?"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import msgspec

from singletree.conversation import Conversation, Part, Reasoning, Text, Tool, ToolCall, ToolResult, Turn
from singletree.errors import SingletreeError
from singletree.parsing.family import Family
from singletree.parsing.parser import parse
from singletree.parsing.render_turn import render_turn
from singletree.prompts.replay.turn_comparison import lacks_defaults, schema_of
from singletree.prompts.tokenizer.added_tokens import strip_guards
from singletree.protocols.content import template_json
from singletree.server.models.chat_format import ChatFormat

_QUESTION = Turn("user", (Text("x"),))
_SAFE_INTEGER = 2**53
LAST_WORD = re.compile(r"\S+\s*\Z")
_MAX_TOKENS = 8192
"""Longest end that is checked: a longer one would delay other streams, and a capsule costs less."""


def survives_round_trip(
    chat_format: ChatFormat, turn: Turn, token_ids: array[int], behind: str, tools: Sequence[Tool]
) -> bool:
    """Return whether a later prompt holds ``token_ids``, the end of ``turn``, when clients send the turn back.

    Clients parse arguments and print them again as JavaScript does, with the defaults of the tool's schema filled in.
    ``behind`` is the text before those tokens.
    """
    if len(token_ids) > _MAX_TOKENS:
        return False
    try:
        returned = returned_turn(turn, tools)
        results = tuple(ToolResult(call.id, (Text("x"),)) for call in turn.tool_calls)
        prompt = chat_format.template.render(
            Conversation((_QUESTION, returned, Turn("tool", results))),
            render_parts=partial(render_turn, chat_format.family),
            guard=chat_format.tokenizer.guard,
        )
    except (ValueError, RecursionError, SingletreeError):
        return False
    text = chat_format.tokenizer.decode(token_ids)
    joint = LAST_WORD.search(behind)
    printed = f"{joint[0] if joint else ''}{text}".rstrip() in strip_guards(prompt)
    return printed and chat_format.tokenizer.encode_array(text) == token_ids


def returned_turn(turn: Turn, tools: Sequence[Tool]) -> Turn:
    """Return ``turn`` as a client sends it back. Raise ValueError for a call whose arguments change on the way."""
    return replace(turn, parts=tuple(_as_returned(part, tools) for part in turn.parts))


def _as_returned(part: Part, tools: Sequence[Tool]) -> Part:
    if not isinstance(part, ToolCall):
        return part
    arguments = json.loads(
        part.arguments or "{}", parse_float=_number, parse_int=_number, parse_constant=_number
    )
    if lacks_defaults(arguments, schema_of(part.name, tools)):
        raise ValueError("the client fills in defaults")
    printed = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return replace(part, arguments=template_json(printed.encode()), verbatim=False)


def _number(text: str) -> int | float:
    """Return the number as JavaScript parses it. Raise ValueError for one that JavaScript prints in another way."""
    number = float(text)
    if not abs(number) < _SAFE_INTEGER:
        raise ValueError(f"JavaScript does not print {text} unchanged")
    return int(number) if number.is_integer() else number


class RenderedTurnParser:
    """Parses turns as the template printed them, with the tools that a client sent."""

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
        turn = parse(self.family, text, self.tools, opened)
        return replace(turn, parts=tuple(map(_without_guards, turn.parts)))


def _without_guards(part: Part) -> Part:
    if isinstance(part, Text | Reasoning):
        return replace(part, text=strip_guards(part.text))
    if isinstance(part, ToolCall):
        return replace(part, name=strip_guards(part.name), arguments=strip_guards(part.arguments))
    return part
