"""Creates ids for responses, items, tool calls and requests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count

from singletree.conversation import Conversation
from singletree.events import ToolCallStart
from singletree.prompts.replay.turn_comparison import normalized_id

NewId = Callable[[str], str]

_ALPHABET = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_TIME_LENGTH, _RANDOM_LENGTH = 7, 17
_RANDOM_BYTES = 4096
"""How many random bytes are drawn at a time, for some 230 ids: each draw lets another thread take the interpreter."""
_CHARACTER = bytes(_ALPHABET[byte % len(_ALPHABET)] for byte in range(256))
_DIGITS = 4
_UNEVEN = bytes(range(256 - 256 % len(_ALPHABET), 256))
"""Bytes that are dropped: with them, the first characters of the alphabet would be more frequent than the others."""
_CALL_PREFIX = "call_"
_FIRST_TIME = 1_735_689_600_000
"""2025 in milliseconds: no id is older."""
_DAY = 86_400_000
_LONGEST_REQUEST_ID = 128
_SPARE_IDS: list[str] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SPARE_IDS.clear)  # Else two processes would give the same ids.


def new_id(prefix: str) -> str:
    """Return ``prefix`` and 24 letters and digits: 7 that grow with the time, and 17 random ones (101 bits).

    An index of ids changes near its end alone, not in as many places as there are new ids.
    """
    while True:
        try:
            return prefix + _SPARE_IDS.pop()  # Each is given to one thread only.
        except IndexError:
            characters = os.urandom(_RANDOM_BYTES).translate(_CHARACTER, _UNEVEN).decode()
            starts = range(0, len(characters) - _RANDOM_LENGTH + 1, _RANDOM_LENGTH)
            now = _encoded_time(time.time_ns() // 1_000_000)
            _SPARE_IDS.extend(now + characters[start : start + _RANDOM_LENGTH] for start in starts)


def _encoded_time(milliseconds: int) -> str:
    digits = []
    for _ in range(_TIME_LENGTH):
        milliseconds, digit = divmod(milliseconds, len(_ALPHABET))
        digits.append(chr(_ALPHABET[digit]))
    return "".join(reversed(digits))


def is_minted(call_id: str) -> bool:
    """Return whether a server of this kind has made the id of a call, as far as its form tells.

    It begins with a time since 2025; of random ids with the same length and alphabet, about one in 60 does.
    """
    id, prefix = normalized_id(call_id), normalized_id(_CALL_PREFIX)
    if len(id) != len(prefix) + _TIME_LENGTH + _RANDOM_LENGTH or not id.startswith(prefix):
        return False
    made = 0
    for digit in id.removeprefix(prefix)[:_TIME_LENGTH].encode():
        made = made * len(_ALPHABET) + _ALPHABET.index(digit)
    return _FIRST_TIME <= made <= time.time_ns() // 1_000_000 + _DAY


def numbered_ids(new_id: NewId) -> NewId:
    """Return a function that makes many ids from one of ``new_id``: its first characters, and a number.

    An index of them changes in one place, not in as many as there are ids.
    """
    shared, numbers = new_id("")[:-_DIGITS], count()
    return lambda prefix: f"{prefix}{shared}{next(numbers):0{_DIGITS}}"


def request_id(given: str | None) -> str:
    """Return the client's ``x-request-id`` if it is safe in a header and a log line, else a new id."""
    usable = given is not None and 0 < len(given) <= _LONGEST_REQUEST_ID and given.isascii()
    return given if usable and given is not None and given.isprintable() else new_id("req_")


class TurnCallIds:
    """Gives the calls of one turn ids that are unique in the conversation, so that each result finds its call.

    Some harnesses keep only the letters and digits of an id, so only these are compared.

    Args:
        are_shown: whether the client gets the ids.

    Attributes:
        minted: the ids that were created here and not by the model; they identify the turn when it comes back.
    """

    def __init__(self, conversation: Conversation, new_id: NewId = new_id, *, are_shown: bool = True) -> None:
        self._turns = conversation.turns
        self._taken: set[str] | None = None
        self._new_id = new_id
        self._are_shown = are_shown
        self.minted: set[str] = set()

    def mint(self, index: int, name: str) -> str:
        """Return a new id, for a call whose format carries none."""
        id = self._new_id(_CALL_PREFIX)
        if self._are_shown:
            self.minted.add(id)
        return id

    def ensure_unique(self, start: ToolCallStart) -> None:
        """Replace the id that the model wrote if the conversation or this turn has it already."""
        if self._taken is None:
            # Most turns have no call, and a conversation may have thousands.
            earlier = (turn.tool_calls for turn in self._turns if turn.role == "assistant")
            self._taken = {normalized_id(call.id) for calls in earlier for call in calls}
        if normalized_id(start.id) in self._taken:
            start.id = self.mint(start.index, start.name)
        self._taken.add(normalized_id(start.id))
