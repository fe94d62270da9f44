"""Ids of calls in the form in which a model knows them, whatever a client made of them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from typing import Literal

from singletree.conversation import ToolCall

IdStyle = Literal["any", "nine", "kimi"]

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NINE = re.compile(r"[0-9A-Za-z]{9}")


def _as_given(call: ToolCall, index: int) -> str:
    return call.id


def _nine_characters(call: ToolCall, index: int) -> str:
    """Mistral's templates refuse anything else; the same call must get the same id in every later prompt."""
    if _NINE.fullmatch(call.id):
        return call.id
    number = int.from_bytes(sha256(call.id.encode("utf-8", "replace") or str(index).encode()).digest()[:8])
    characters = []
    for _ in range(9):
        number, letter = divmod(number, len(_LETTERS))
        characters.append(_LETTERS[letter])
    return "".join(characters)


def _counted(call: ToolCall, index: int) -> str:
    """Kimi writes ``functions.name:3``, counting through the conversation; other ids make it call worse.

    https://github.com/vllm-project/vllm/issues/29596
    """
    own = re.fullmatch(rf"(?:functions\.)?{re.escape(call.name)}:\d+", call.id)
    return call.id if own else f"functions.{call.name}:{index}"


_STYLES: dict[IdStyle, Callable[[ToolCall, int], str]] = {
    "any": _as_given,
    "nine": _nine_characters,
    "kimi": _counted,
}


class CallIds:
    """The calls of a conversation, as they come by: new ids for them, and which call a result answers."""

    def __init__(self, style: IdStyle) -> None:
        self._rename = _STYLES[style]
        self._count = 0
        self._known: dict[str, tuple[str, str]] = {}
        self._unanswered: deque[tuple[str, str]] = deque()

    def copy(self) -> CallIds:
        """One that goes on from here."""
        other = CallIds.__new__(CallIds)
        other._rename, other._count = self._rename, self._count
        other._known, other._unanswered = self._known.copy(), self._unanswered.copy()
        return other

    def call(self, call: ToolCall) -> str:
        """The id under which the model sees ``call``."""
        renamed = self._rename(call, self._count)
        self._count += 1
        self._known[call.id] = entry = (renamed, call.name)
        self._unanswered.append(entry)
        return renamed

    def result(self, call_id: str) -> tuple[str, str]:
        """(id, tool name) of the call that a result with ``call_id`` answers.

        An unknown id answers the oldest call without an answer; without any, it stands for itself.
        """
        entry = self._known.get(call_id)
        if entry is None and self._unanswered:
            entry = self._unanswered[0]
        if entry is None:
            return self._rename(ToolCall("tool", "", call_id), self._count), "tool"
        if entry in self._unanswered:
            self._unanswered.remove(entry)
        return entry
