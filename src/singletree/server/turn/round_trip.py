"""Predicts whether the tokens of a turn come back without a capsule, from what clients send back of the turn."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from singletree.conversation import Conversation, Part, Text, Tool, ToolCall, ToolResult, Turn
from singletree.errors import SingletreeError
from singletree.parsing.render_turn import render_turn
from singletree.prompts.replay.schema_defaults import lacks_defaults, schema_of
from singletree.prompts.tokenizer.added_tokens import strip_guards
from singletree.protocols.client_json import template_json
from singletree.server.models.catalog import ChatFormat

_QUESTION = Turn("user", (Text("x"),))
_SAFE_INTEGER = 2**53
_LAST_WORD = re.compile(r"\S+\s*\Z")
_MAX_TOKENS = 8192
"""Longest end that is checked: a longer one would delay other streams, and a capsule costs less."""


def survives_round_trip(
    chat_format: ChatFormat,
    turn: Turn,
    token_ids: array[int],
    behind: str,
    tools: Sequence[Tool],
    *,
    as_objects: bool,
) -> bool:
    """Return whether a later prompt holds ``token_ids``, the end of ``turn``, when clients send the turn back.

    Clients parse arguments and print them again as JavaScript does, with the defaults of the tool's schema filled in.

    Args:
        behind: the text before those tokens.
        as_objects: whether the protocol carries arguments as objects; else the prompt shows the text that the client
            printed.
    """
    if len(token_ids) > _MAX_TOKENS:
        return False
    try:
        returned = returned_turn(turn, tools, as_objects=as_objects)
        results = tuple(ToolResult(call.id, (Text("x"),)) for call in turn.tool_calls)
        prompt = chat_format.template.render(
            Conversation((_QUESTION, returned, Turn("tool", results))),
            render_parts=partial(render_turn, chat_format.family),
            guard=chat_format.tokenizer.guard,
        )
    except (ValueError, RecursionError, SingletreeError):
        return False
    text = chat_format.tokenizer.decode(token_ids)
    joint = _LAST_WORD.search(behind)
    printed = f"{joint[0] if joint else ''}{text}".rstrip() in strip_guards(prompt)
    return printed and chat_format.tokenizer.encode_array(text) == token_ids


def returned_turn(turn: Turn, tools: Sequence[Tool], *, as_objects: bool) -> Turn:
    """Return ``turn`` as a client sends it back.

    Args:
        tools: the tools of the request.
        as_objects: whether the protocol carries arguments as objects.

    Raises:
        ValueError: the arguments of a call change on the way.
    """
    return replace(turn, parts=tuple(_as_returned(part, tools, as_objects) for part in turn.parts))


def _as_returned(part: Part, tools: Sequence[Tool], as_objects: bool) -> Part:
    """Return ``part`` as a client sends it back. Raise ValueError for a call whose arguments change on the way."""
    if not isinstance(part, ToolCall):
        return part
    arguments = json.loads(
        part.arguments or "{}", parse_float=_number, parse_int=_number, parse_constant=_number
    )
    if lacks_defaults(arguments, schema_of(part.name, tools)):
        raise ValueError("the client fills in defaults")
    printed = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    if not as_objects:
        return replace(part, arguments=printed)
    return replace(part, arguments=template_json(printed.encode()), verbatim=False)


def _number(text: str) -> int | float:
    """Return the number as JavaScript parses it. Raise ValueError for one that JavaScript prints in another way."""
    number = float(text)
    if not abs(number) < _SAFE_INTEGER:
        raise ValueError(f"JavaScript does not print {text} unchanged")
    return int(number) if number.is_integer() else number
