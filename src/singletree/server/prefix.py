"""How a prompt goes on from an earlier one: the tokens that both begin with, and where the messages part.

Nothing here walks over the tokens of a prompt in Python: they are compared as bytes, and messages by fingerprints
that are taken once, when a message is new.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from singletree.conversation import (
    Document,
    Image,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
)
from singletree.prompts.replay import says_the_same

WIDTH = array("I").itemsize
"""Bytes of a token."""

_FIRST_STEP = 256
_MESSAGE_BYTES = 150
"""What a remembered message costs."""


def common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens of ``WIDTH`` bytes both begin with."""
    if one.startswith(other):
        return len(other) // WIDTH
    low, end = 0, min(len(one), len(other)) // WIDTH
    step = _FIRST_STEP
    while low < end and one.startswith(other[low * WIDTH : min(low + step, end) * WIDTH], low * WIDTH):
        low, step = min(low + step, end), step * 2
    high = min(low + step, end)
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low * WIDTH : middle * WIDTH], low * WIDTH):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One message without its text: hashes of its words and, apart, of its reasoning."""

    role: str
    words: int
    thoughts: int


def fingerprint(turn: Turn) -> Fingerprint:
    """Ids do not count: they are not in the prompt, and some harnesses rewrite them."""
    thoughts = tuple(part.text for part in turn.parts if isinstance(part, Reasoning))
    return Fingerprint(turn.role, hash(tuple(_words(turn.parts))), hash(thoughts))


def _words(parts: Iterable[Any]) -> Iterable[tuple[str, ...]]:
    for part in parts:
        if isinstance(part, Text):
            yield ("text", part.text)
        elif isinstance(part, ToolCall):
            yield ("call", part.name, part.arguments)
        elif isinstance(part, Image | Document):
            yield ("data", part.data, part.url)
        elif isinstance(part, ToolResult):
            yield ("result",)
            yield from _words(part.parts)


@dataclass(frozen=True, slots=True)
class ToolList:
    """The tools of a prompt, and all that is printed of them, as JSON."""

    tools: tuple[Tool, ...]
    written: bytes

    @classmethod
    def of(cls, tools: tuple[Tool, ...], last: ToolList | None = None) -> ToolList:
        """``tools``; ``last`` itself where nothing differs, the order of keys included."""
        printed = [(tool.name, tool.description, tool.parameters, tool.kind) for tool in tools]
        written = msgspec.json.encode(printed) if tools else b""
        return last if last is not None and last.written == written else cls(tools, written)

    @property
    def names(self) -> list[str]:
        """What they are called."""
        return [tool.name for tool in self.tools]

    @property
    def bytes(self) -> int:
        """About what it costs."""
        return _PARSED * len(self.written)


_PARSED = 8
"""How many bytes a byte of JSON takes when it is read into objects, about."""


@dataclass(frozen=True, slots=True)
class Line:
    """The last prompt of one conversation, and the turn that answered it.

    Attributes:
        model: whose tokens they are.
        tokens: the prompt's and the turn's, ``WIDTH`` bytes each.
        prompt_tokens: how many are the prompt's.
        expected: how many the next prompt should begin with; the turn's are among them unless it was broken off.
        messages: of the prompt.
        tools: those that the model was told of.
        settings: the variables of reasoning that the client asked for.
        answer: the turn, where it was taken down.
        ends: (tokens, messages) at which earlier turns ended, this one last.
    """

    model: str
    tokens: bytes
    prompt_tokens: int
    expected: int
    messages: tuple[Fingerprint, ...]
    tools: ToolList
    settings: Mapping[str, Any]
    answer: Turn | None
    ends: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        """About what it costs, without its tools, which lines share."""
        answer = 0 if self.answer is None else 4 * (self.expected - self.prompt_tokens)
        return len(self.tokens) + answer + _MESSAGE_BYTES * len(self.messages) + 16 * len(self.ends)


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a prompt parts from the one that it should go on from.

    Attributes:
        line: the earlier prompt.
        matched: tokens that both begin with.
        turns, messages: what the new prompt is of.
        at: how many messages both begin with.
        settings: see ``Line``, of the new prompt.
        edited: whether the client had earlier content taken out.
    """

    line: Line
    matched: int
    turns: Sequence[Turn]
    messages: tuple[Fingerprint, ...]
    tools: ToolList
    at: int
    settings: Mapping[str, Any]
    edited: bool = False

    @property
    def old(self) -> Fingerprint | None:
        """The first message that differs, as it was; None where the earlier prompt had no more."""
        return self.line.messages[self.at] if self.at < len(self.line.messages) else None

    @property
    def new(self) -> Fingerprint | None:
        """The first message that differs, as it is."""
        return self.messages[self.at] if self.at < len(self.messages) else None

    @property
    def old_rest(self) -> tuple[Fingerprint, ...]:
        """What stood in the earlier prompt from there on."""
        return self.line.messages[self.at :]

    @property
    def new_rest(self) -> tuple[Fingerprint, ...]:
        """What stands in the new one from there on."""
        return self.messages[self.at :]

    @property
    def same_answer(self) -> bool:
        """Whether the turn that was generated is the message that differs, and says what was generated."""
        answer = self.line.answer
        if answer is None or self.old is not None or self.new is None or self.new.role != "assistant":
            return False
        return says_the_same(self.turns[self.at], answer)

    @property
    def answer_comes_back(self) -> bool:
        """Whether the turn that was generated stands somewhere behind the place."""
        answer = self.line.answer
        return answer is not None and any(
            turn.role == "assistant" and says_the_same(turn, answer) for turn in self.turns[self.at :]
        )

    def come_back(self, *roles: str) -> bool:
        """Whether any message of these ``roles`` that stood behind the place stands somewhere in the new prompt."""
        return not {old for old in self.old_rest if old.role in roles}.isdisjoint(self.new_rest)

    @property
    def starts_over(self) -> bool:
        """Whether it is another conversation under the same head: a side request, or a compacted session. A title
        request has the user's words in it, too, but nothing of what was done; a compacted session has all of them,
        and a summary where the model's first turn was.
        """
        roles = [message.role for message in self.line.messages]
        asked, acted = (roles.index(r) if r in roles else len(roles) for r in ("user", "assistant"))
        if self.answer_comes_back or self.come_back("assistant", "tool"):
            return False
        summed_up = self.at == acted and self.new is not None and self.new.role == "user"
        return self.at <= asked < len(roles) or (summed_up and acted < len(roles))

    @property
    def goes_back(self) -> bool:
        """Whether it goes on from an earlier turn of the conversation, all of which it has: a fork, or a retry."""
        if self.answer_comes_back or self.come_back("user", "assistant", "tool"):
            return False
        if self.old is None and self.new is None:
            return self.matched >= self.line.prompt_tokens
        return any(self.at == messages and self.matched >= tokens for tokens, messages in self.line.ends[:-1])


def part(
    line: Line,
    matched: int,
    turns: Sequence[Turn],
    tools: ToolList,
    settings: Mapping[str, Any],
    *,
    known: Sequence[Fingerprint] = (),
    edited: bool = False,
) -> Parting:
    """Where the prompt of ``turns``, which begins with ``matched`` tokens of ``line``, parts from it.

    Args:
        known: the fingerprints of the first turns, where they are known already.
    """
    messages = (*known[: len(turns)], *map(fingerprint, turns[len(known) :]))
    pairs = zip(line.messages, messages, strict=False)
    at = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(line.messages), len(messages)))
    return Parting(line, matched, turns, messages, tools, at, settings, edited)
