"""The context of a prefix break, on which its likely cause is tested: texts, messages, and how a turn came back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from singletree.server.models.catalog import ChatFormat
from singletree.server.sessions.divergence import Divergence, assistant_places
from singletree.server.sessions.turn_differences import Difference, difference, thought_is_in
from singletree.server.sessions.turn_tokens import (
    OPENING,
    excerpt,
    rest_of_turn,
    turn_at,
    turn_header,
    turn_start,
    turn_starts,
)

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


class BreakContext(NamedTuple):
    """A divergence with its context, on which the causes are tested.

    Attributes:
        divergence: the divergence.
        before: the end of the text that both prompts have.
        was, now: the text after the divergence, in the earlier prompt and in the new one.
        old_turn, new_turn: the same up to the end of the turn that contains the divergence.
        message: index of the message that contains the divergence, from 0; None where it is not known.
        unchanged: whether all messages are equal around it, so that the template prints the same messages differently.
        headers: number of headers of the assistant's turns before it; None where they were not counted.
        in_head: whether it is before the first turn of the assistant.
        in_answer: whether it is in the generated turn, and all earlier messages are equal.
        difference: how the client changed the assistant's turn that contains it, compared with the earlier prompt or
            the generated turn; None where that is not known.
        retokenized: whether that turn has the same content in both prompts, in different tokens.
        opener, closer: markers of the model's reasoning; empty when it has none.
        switches: the template variables that keep earlier reasoning, with the values that keep it.
    """

    divergence: Divergence
    before: str
    was: str
    now: str
    old_turn: str
    new_turn: str
    message: int | None
    unchanged: bool
    headers: int | None
    in_head: bool
    in_answer: bool
    difference: Difference | None
    retokenized: bool
    opener: str
    closer: str
    switches: Mapping[str, Any]

    @property
    def role(self) -> str:
        """Return the role of that message in the earlier prompt; empty where it is not known."""
        if self.message is None:
            return ""
        messages = self.divergence.record.messages
        return messages[self.message].role if self.message < len(messages) else "assistant"

    @property
    def tools(self) -> tuple[list[str], list[str]]:
        """Return the names of the earlier prompt's tools and of the new one's."""
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
        """Tell whether the divergence is in the text of a system message that differs."""
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


def break_context(divergence: Divergence, tokens: bytes, chat_format: ChatFormat) -> BreakContext:
    """Return the context of the break at ``divergence``.

    Args:
        divergence: the divergence.
        tokens: the new prompt's tokens, ``WIDTH`` bytes each.
        chat_format: the model's template, family and tokenizer.
    """
    at = divergence.matched
    opener, closer = chat_format.family.reasoning or ("", "")
    assistant = assistant_places(divergence.record.messages)
    if len(assistant_places(divergence.prompt.given)) < len(assistant_places(divergence.prompt.turns)):
        # The template received neighbouring messages as one turn.
        indices = frozenset(assistant)
        assistant = [i for i in assistant if i - 1 not in indices]
    begun, is_counted = _begun(divergence, assistant, chat_format)
    unchanged = _is_unchanged(divergence, [*assistant, len(divergence.record.messages)], begun)
    in_answer = not unchanged and divergence.old is None
    message = divergence.at if not unchanged else assistant[begun - 1] if begun and is_counted else None
    changed = _difference(divergence, message, chat_format, in_answer=in_answer)
    was = excerpt(divergence.record.tokens_between(at, at + _AFTER), 0, _AFTER, chat_format)
    now = excerpt(tokens, at, at + _AFTER, chat_format)
    return BreakContext(
        divergence,
        before=excerpt(tokens, max(0, at - _BEFORE), at, chat_format),
        was=was,
        now=now,
        old_turn=rest_of_turn(was, chat_format),
        new_turn=rest_of_turn(now, chat_format),
        message=message,
        unchanged=unchanged,
        headers=begun if is_counted else None,
        in_head=begun == 0,
        in_answer=in_answer,
        difference=changed,
        retokenized=changed == "none"
        and (in_answer or (unchanged and _has_same_content(divergence, tokens, chat_format))),
        opener=opener.strip(),
        closer=closer.strip(),
        switches=chat_format.template.capabilities.history_switches,
    )


def _difference(
    divergence: Divergence, message: int | None, chat_format: ChatFormat, *, in_answer: bool
) -> Difference | None:
    """Return how the client changed the assistant's turn at ``message``, as it was in the earlier prompt or answer."""
    returned = () if message is None else divergence.returned(message)
    if not returned:
        return None
    record = divergence.record
    generated = record.answer if in_answer else None
    if generated is None:
        start = (
            record.prompt_tokens if in_answer else turn_start(record.tokens, divergence.matched, chat_format)
        )
        generated = turn_at(record.tokens, start, record.tools.tools, chat_format)
    return difference(generated, returned, chat_format.family, record.tools.tools)


def _has_same_content(divergence: Divergence, tokens: bytes, chat_format: ChatFormat) -> bool:
    """Tell whether the assistant's turn at the divergence has the same content in both prompts."""
    record = divergence.record
    start = turn_start(record.tokens, divergence.matched, chat_format)
    before, now = (turn_at(each, start, record.tools.tools, chat_format) for each in (record.tokens, tokens))
    return difference(before, (now,), chat_format.family, record.tools.tools) == "none"


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
    """Tell whether all messages are equal up to the start of the assistant's next turn.

    Args:
        assistant: indices of the assistant's turns, the generated one last.
        begun: how many of them begin before the divergence.
    """
    if begun >= len(assistant):
        return False
    # The next turn itself may be the first that differs; a message of another role would have another header.
    is_assistant = divergence.new is not None and divergence.new.role == "assistant"
    return divergence.at > assistant[begun] or (divergence.at == assistant[begun] and is_assistant)
