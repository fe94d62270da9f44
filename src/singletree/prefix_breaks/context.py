"""The context of a prefix break, on which its likely cause is tested: texts, messages, and how a turn came back.

Tokens are packed, ``WIDTH`` bytes each; positions are counted in tokens.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from singletree.conversation import Tool, Turn
from singletree.parsing.parser import parse
from singletree.pictures import FIRST_PICTURE_NUMBER
from singletree.prefix_breaks.turn_differences import Difference, difference, thought_is_in
from singletree.server.models.chat_format import ChatFormat
from singletree.server.sessions.divergence import WIDTH, Divergence, assistant_places

OPENING = 16
"""Approximate number of tokens at the end of a prompt that open the generated turn."""

PICTURE = "[picture]"
_LONGEST_TURN = 65_536
"""Most tokens of an earlier turn that are decoded to compare it."""
_WORDS = 8
_LONGEST_DATE = 20
_BEFORE, _AFTER = 64, 48
"""Length of the excerpts in tokens: of the common text before a break, and of each prompt's text after it."""
_CLOCK = re.compile(
    r"\d{1,2}:\d{2}(?::\d{2})?|\d{4}-\d{2}-\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    r"|\b(?:Mon|Tues?|Wed|Thu|Fri|Sat|Sun)(?:[a-z]*day)?\b"
    r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}\b"
)
HEAD_ROLES = ("system", "developer")
"""The roles of messages at the start of a prompt."""


def turn_header(chat_format: ChatFormat) -> bytes:
    """Return the tokens that begin every turn of the assistant; empty where the template has no single header."""
    return chat_format.derived(_turn_header)


def _turn_header(chat_format: ChatFormat) -> bytes:
    if chat_format.layout is None or len(chat_format.layout.headers) != 1:
        return b""
    # White space at the end of the header may form one token with the following text.
    return array("I", chat_format.tokenizer.encode(chat_format.layout.headers[0].rstrip())).tobytes()


def turn_start(tokens: bytes, place: int, chat_format: ChatFormat) -> int:
    """Return the position behind the header of the assistant's turn that contains the token ``place``; 0 if unknown."""
    header = turn_header(chat_format)
    if chat_format.family.message_header:
        return max(turn_starts(tokens, place, chat_format), default=0)
    at = tokens.rfind(header, 0, place * WIDTH) if header else -1
    while at > 0 and at % WIDTH:  # the match spans parts of two tokens
        at = tokens.rfind(header, 0, at + len(header) - 1)
    return 0 if at < 0 else (at + len(header)) // WIDTH


def turn_starts(tokens: bytes, place: int, chat_format: ChatFormat) -> list[int]:
    """Return the positions behind the headers of the assistant's turns that begin before the token ``place``.

    Where a turn consists of several messages, each has the header; only that of the first begins the turn.
    """
    header = turn_header(chat_format)
    starts: list[int] = []
    last, at = 0, tokens.find(header, 0, place * WIDTH) if header else -1
    while at >= 0:
        behind = at + len(header)
        if at % WIDTH == 0:
            between = chat_format.tokenizer.decode(ids_between(tokens, last, behind // WIDTH))
            if not starts or _end_of_turn(between, chat_format)[1]:
                starts.append(behind // WIDTH)
            last = behind // WIDTH
        at = tokens.find(header, at + 1, place * WIDTH)
    return starts


def turn_at(tokens: bytes, start: int, tools: Sequence[Tool], chat_format: ChatFormat) -> Turn:
    """Parse the turn in ``tokens`` that begins at the token ``start`` and could call ``tools``."""
    decode = chat_format.tokenizer.decode
    text = decode(ids_between(tokens, start, start + _LONGEST_TURN))
    end, ender = _end_of_turn(text, chat_format)
    # Where each message of a turn has an end, that of the last one can also close a call.
    family = chat_format.family
    closers = {closer for form in family.forms for closer in (form.calls[1], *form.also_close)}
    text = text[:end] + (ender if family.message_header and ender in closers else "")
    opened = decode(ids_between(tokens, max(0, start - OPENING), start))
    return parse(family, text, tools, opened)


def rest_of_turn(text: str, chat_format: ChatFormat) -> str:
    """Return ``text``, which begins inside a turn, up to the end of that turn."""
    return text[: _end_of_turn(text, chat_format)[0]]


def _end_of_turn(text: str, chat_format: ChatFormat) -> tuple[int, str]:
    """Return where the turn at the start of ``text`` ends, and what ends it; empty where it does not end.

    Where a turn consists of several messages, the end of one is not the end of the turn if the next one follows.
    """
    enders, header, at = chat_format.derived(_turn_enders), chat_format.family.message_header, 0
    while True:
        found = [(place, ender) for ender in enders if (place := text.find(ender, at)) >= 0]
        end, ender = min(found, default=(len(text), ""))
        at = end + len(ender)
        if not (ender and header and text.startswith(header, at)):
            return end, ender


def _turn_enders(chat_format: ChatFormat) -> frozenset[str]:
    """Return the texts that end a turn: those that the template prints, and those of the model's stop tokens."""
    layout, tokenizer = chat_format.layout, chat_format.tokenizer
    stops = map(tokenizer.decode, ([id] for id in tokenizer.stop_token_ids))
    return frozenset([*(layout.ends if layout else ()), *stops]) - {""}


def excerpt(tokens: bytes, start: int, end: int, chat_format: ChatFormat) -> str:
    """Return the text of the tokens from ``start`` up to ``end``, with ``PICTURE`` for each picture."""
    ids, decode = ids_between(tokens, start, end), chat_format.tokenizer.decode
    if not ids or max(ids) < FIRST_PICTURE_NUMBER:
        return decode(ids)
    runs = groupby(ids, key=lambda id: id >= FIRST_PICTURE_NUMBER)
    return "".join(PICTURE * len(list(run)) if is_picture else decode(run) for is_picture, run in runs)


def ids_between(tokens: bytes, start: int, end: int) -> array[int]:
    """Return the token ids from ``start`` up to ``end``."""
    return array("I", tokens[start * WIDTH : end * WIDTH])


class BreakContext:
    """A divergence with its context, on which the causes are tested. What takes long is found when a cause asks for it.

    Attributes:
        before: the end of the text that both prompts have.
        was, now: the text after the divergence, in the earlier prompt and in the new one.
        old_turn, new_turn: the same up to the end of the turn that contains the divergence.
        headers: number of headers of the assistant's turns before it; None where they were not counted.
        in_head: whether it is before the first turn of the assistant.
        unchanged: whether all messages are equal around it, so that the template prints the same messages differently.
        in_answer: whether it is in the generated turn, and all earlier messages are equal.
        message: index of the message that contains the divergence, from 0; None where it is not known.
        opener, closer: markers of the model's reasoning; empty when it has none.
    """

    def __init__(self, divergence: Divergence, tokens: bytes, chat_format: ChatFormat) -> None:
        at, record = divergence.matched, divergence.record
        self.divergence = divergence
        self._tokens, self._format = tokens, chat_format
        self.before = excerpt(tokens, max(0, at - _BEFORE), at, chat_format)
        self.was = excerpt(record.tokens_between(at, at + _AFTER), 0, _AFTER, chat_format)
        self.now = excerpt(tokens, at, at + _AFTER, chat_format)
        self.old_turn, self.new_turn = (rest_of_turn(text, chat_format) for text in (self.was, self.now))
        self.opener, self.closer = (each.strip() for each in chat_format.family.reasoning or ("", ""))
        assistant = assistant_places(record.messages)
        if len(assistant_places(divergence.prompt.given)) < len(assistant_places(divergence.prompt.turns)):
            # The template received neighbouring messages as one turn.
            indices = frozenset(assistant)
            assistant = [i for i in assistant if i - 1 not in indices]
        begun, is_counted = _begun(divergence, assistant, chat_format)
        self.headers = begun if is_counted else None
        self.in_head = begun == 0
        self.unchanged = _is_unchanged(divergence, [*assistant, len(record.messages)], begun)
        self.in_answer = not self.unchanged and divergence.old is None
        self.message: int | None = divergence.at
        if self.unchanged:
            self.message = assistant[begun - 1] if begun and is_counted else None

    @property
    def switches(self) -> Mapping[str, Any]:
        """Return the template variables that keep earlier reasoning, with the values that keep it."""
        return self._format.template.capabilities.history_switches

    @cached_property
    def difference(self) -> Difference | None:
        """Return how the client changed the assistant's turn that contains the divergence, compared with the earlier
        prompt or the generated turn; None where that is not known.
        """
        returned, later = ((), ()) if self.message is None else self.divergence.returned(self.message)
        if not returned:
            return None
        record = self.divergence.record
        generated = record.answer if self.in_answer else None
        if generated is None:
            generated = self._turn_at(record.tokens, record.prompt_tokens if self.in_answer else None)
        return difference(generated, returned, self._format.family, record.tools.tools, later)

    @cached_property
    def retokenized(self) -> bool:
        """Tell whether that turn has the same content in both prompts, in different tokens."""
        if self.difference != "none" or not self.unchanged:
            return self.difference == "none" and self.in_answer
        record = self.divergence.record
        before, now = self._turn_at(record.tokens), self._turn_at(self._tokens)
        return difference(before, (now,), self._format.family, record.tools.tools) == "none"

    def _turn_at(self, tokens: bytes, start: int | None = None) -> Turn:
        record = self.divergence.record
        if start is None:
            start = turn_start(record.tokens, self.divergence.matched, self._format)
        return turn_at(tokens, start, record.tools.tools, self._format)

    @property
    def role(self) -> str:
        """Return the role of that message in the earlier prompt; empty where it is not known."""
        if self.message is None:
            return ""
        messages = self.divergence.record.messages
        return messages[self.message].role if self.message < len(messages) else "assistant"

    @property
    def tools(self) -> tuple[list[str], list[str]]:
        return self.divergence.record.tools.names, self.divergence.tools.names

    @property
    def other_tools(self) -> bool:
        """Tell whether the tools differ, and the divergence is where templates print them, or not located."""
        differ = self.divergence.record.tools.encoded != self.divergence.tools.encoded
        is_not_located = self.unchanged and self.message is None
        return differ and (self.in_head or is_not_located) and not self.in_system

    @property
    def other_settings(self) -> bool:
        """Tell whether the client changed the reasoning settings, and the messages before the divergence are equal."""
        differ = self.divergence.record.settings != self.divergence.prompt.settings
        return differ and (self.unchanged or (self.in_answer and self.divergence.same_answer))

    @property
    def in_system(self) -> bool:
        new = self.divergence.new
        if new is None or new.role not in HEAD_ROLES:
            return False
        return self.before[-_WORDS:] + self.now[:1] in self.divergence.prompt.turns[self.divergence.at].text

    @property
    def in_date(self) -> bool:
        """Tell whether the divergence is within a date or a time, in both prompts."""
        start = max(0, len(self.before) - _LONGEST_DATE)
        return all(
            any(match.start() <= len(self.before) < match.end() for match in _CLOCK.finditer(text, start))
            for text in (self.before + self.was, self.before + self.now)
        )

    @property
    def lacks_thought(self) -> bool:
        """Tell whether the earlier prompt has reasoning at the divergence, and the new one has none."""
        # The next turn, whose reasoning some generation prompts open, can begin a few tokens after the divergence.
        opened = bool(self.opener) and (
            self.opener in self._shared_edge + self.old_turn or self.before.rstrip().endswith(self.opener)
        )
        return opened and (
            self.opener not in self._shared_edge + self.new_turn
            or self.new_turn.lstrip().startswith(self.closer)
        )

    @property
    def _shared_edge(self) -> str:
        """Return the end of the common text: the divergence can be inside the marker of reasoning."""
        return self.before[-(len(self.opener) - 1) :] if len(self.opener) > 1 else ""

    @property
    def template_drops_thought(self) -> bool:
        """Tell whether the template omits reasoning at the divergence: it received it, or would not have printed it."""
        if not self.lacks_thought:
            return False
        _, is_opened, text = (self._shared_edge + self.old_turn).partition(self.opener)
        text = text if is_opened else self.old_turn
        excerpt = text.partition(self.closer)[0] if self.closer else text
        if thought_is_in(excerpt, self.divergence.prompt.given):
            return True
        if self.message is None:
            return not self.divergence.prompt.given
        return not self.divergence.template_prints_thought(self.message)


def _begun(divergence: Divergence, assistant: Sequence[int], chat_format: ChatFormat) -> tuple[int, bool]:
    """Return how many of the assistant's turns begin before the divergence, and whether their headers were counted.
    Without a unique header the number comes from the messages.
    """
    header = turn_header(chat_format)
    if header and chat_format.family.message_header:
        return len(turn_starts(divergence.record.tokens, divergence.matched, chat_format)), True
    if header:
        return divergence.record.headers_within(divergence.matched, header), True
    if divergence.matched >= divergence.record.prompt_tokens - OPENING:
        return len(assistant) + 1, False
    return sum(i <= divergence.at for i in assistant), False


def _is_unchanged(divergence: Divergence, assistant: Sequence[int], begun: int) -> bool:
    """Tell whether all messages are equal up to the start of the assistant's next turn: of the turns ``assistant``, the
    generated one last, ``begun`` begin before the divergence.
    """
    if begun >= len(assistant):
        return False
    # The next turn itself may be the first that differs; a message of another role would have another header.
    is_assistant = divergence.new is not None and divergence.new.role == "assistant"
    return divergence.at > assistant[begun] or (divergence.at == assistant[begun] and is_assistant)
