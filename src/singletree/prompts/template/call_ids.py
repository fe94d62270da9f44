"""Convert the ids of calls to the form that a model knows, whatever form a client sends."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from singletree.conversation import ToolCall
from singletree.prompts.template.capabilities import TemplateCapabilities

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NINE = re.compile(r"[0-9A-Za-z]{9}")


def _unchanged(call: ToolCall, index: int) -> str:
    return call.id


def _nine_characters(call: ToolCall, index: int) -> str:
    """Return an id of nine characters. Mistral's templates refuse others; a call must keep its id in later prompts."""
    if _NINE.fullmatch(call.id):
        return call.id
    number = int.from_bytes(sha256(call.id.encode("utf-8", "replace") or str(index).encode()).digest()[:8])
    characters = []
    for _ in range(9):
        number, letter = divmod(number, len(_LETTERS))
        characters.append(_LETTERS[letter])
    return "".join(characters)


@dataclass(frozen=True, slots=True)
class _Pictured:
    """Return an id in the form of ``picture``, counted over the conversation; an id of that form stays as it is.

    A model that knows its calls by such ids makes worse calls with others
    (https://github.com/vllm-project/vllm/issues/29596). The text before the name may be missing: the model forgets it.
    """

    picture: str

    def __call__(self, call: ToolCall, index: int) -> str:
        if _own_ids(self.picture, call.name).fullmatch(call.id):
            return call.id
        return self.picture.replace("{name}", call.name).replace("{index}", str(index))


@lru_cache(maxsize=256)
def _own_ids(picture: str, name: str) -> re.Pattern[str]:
    before, _, after = map(re.escape, picture.partition("{name}"))
    counted = after.replace(re.escape("{index}"), r"\d+")
    return re.compile(f"(?:{before})?{re.escape(name)}{counted}")


def _renaming(capabilities: TemplateCapabilities) -> Callable[[ToolCall, int], str]:
    if capabilities.call_ids == "nine":
        return _nine_characters
    return _Pictured(capabilities.call_id_picture) if capabilities.call_id_picture else _unchanged


class TemplateCallIds:
    """The calls of a conversation, in order: assigns their ids, and finds the call that a result answers."""

    def __init__(self, capabilities: TemplateCapabilities) -> None:
        self._rename = _renaming(capabilities)
        self._count = 0
        self._known: dict[str, tuple[str, str]] = {}
        self._unanswered: deque[tuple[str, str]] = deque()

    def copy(self) -> TemplateCallIds:
        """Return a copy that can take more calls."""
        other = TemplateCallIds.__new__(TemplateCallIds)
        other._rename, other._count = self._rename, self._count
        other._known, other._unanswered = self._known.copy(), self._unanswered.copy()
        return other

    def call(self, call: ToolCall) -> str:
        """Return the id by which the model knows ``call``. Call this once for each call, in order."""
        renamed = self._rename(call, self._count)
        self._count += 1
        self._known[call.id] = entry = (renamed, call.name)
        self._unanswered.append(entry)
        return renamed

    def result(self, call_id: str) -> tuple[str, str]:
        """Return (id, tool name) of the call that a result with ``call_id`` answers.

        An unknown id answers the oldest call without a result; if there is none, the result keeps an id of its own.
        """
        entry = self._known.get(call_id)
        if entry is None and self._unanswered:
            entry = self._unanswered[0]
        if entry is None:
            return self._rename(ToolCall("tool", "", call_id), self._count), "tool"
        if entry in self._unanswered:
            self._unanswered.remove(entry)
        return entry
