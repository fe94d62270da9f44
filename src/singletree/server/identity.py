"""Ids that the server makes: of answers, items, calls and requests."""

from __future__ import annotations

import os
from collections.abc import Callable

from singletree.conversation import Conversation, ToolCall
from singletree.events import ToolCallStart
from singletree.prompts.replay import letters

NewId = Callable[[str], str]

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_LENGTH = 24
_LONGEST_REQUEST_ID = 128


def new_id(prefix: str) -> str:
    """``prefix`` and 24 random letters and digits (142 bits)."""
    number = int.from_bytes(os.urandom(24), "big")
    characters = []
    for _ in range(_LENGTH):
        number, digit = divmod(number, 62)
        characters.append(_ALPHABET[digit])
    return prefix + "".join(characters)


def request_id(given: str | None) -> str:
    """The client's own ``x-request-id`` where it can stand in a header and a log line, else a new one."""
    usable = given is not None and 0 < len(given) <= _LONGEST_REQUEST_ID and given.isascii()
    return given if usable and given is not None and given.isprintable() else new_id("req_")


class CallIds:
    """The ids of the calls of one turn: none that the conversation has, or results would go astray.

    Some harnesses leave nothing of an id but its letters and digits, so these tell two apart.

    Attributes:
        made: those that are from here and not the model's.
    """

    def __init__(self, conversation: Conversation, new_id: NewId = new_id) -> None:
        said = (turn.parts for turn in conversation.turns if turn.role == "assistant")
        self._taken = {letters(part.id) for parts in said for part in parts if type(part) is ToolCall}
        self._new_id = new_id
        self.made: set[str] = set()

    def mint(self, index: int, name: str) -> str:
        """An id for a call whose format carries none."""
        id = self._new_id("call_")
        self.made.add(id)
        return id

    def settle(self, start: ToolCallStart) -> None:
        """Keep the id that the model wrote, unless the conversation or this turn has it already."""
        if letters(start.id) in self._taken:
            start.id = self.mint(start.index, start.name)
        self._taken.add(letters(start.id))
