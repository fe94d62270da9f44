"""Why a prompt does not go on from the one before: a table of likely causes, each with its cure."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from singletree.server.catalog import Speech
from singletree.server.prefix import WIDTH, Parting

_WORDS = 8
_LONGEST_DATE = 20
_BEFORE, _AFTER = 64, 48
"""How many tokens are shown of what both have, and of what each has behind it."""

_CLOCK = re.compile(
    r"\d{1,2}:\d{2}(?::\d{2})?|\d{4}-\d{2}-\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    r"|\b(?:Mon|Tues?|Wed|Thu|Fri|Sat|Sun)(?:[a-z]*day)?\b"
    r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}\b"
)
_HEAD_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Seen:
    """A parting with what there is to be read at it.

    Attributes:
        before: the last of what both prompts have.
        was, now: what follows in each.
        message: which message it is in, from 0; None where that is not known.
        unchanged: whether all messages are the same up to it and behind it, so that the template prints them otherwise.
        in_head: whether it is before all that the assistant said.
        in_answer: whether it is in the turn that was generated, and all that was said before is the same.
        opener, closer: of the model's reasoning; empty when it has none.
    """

    parting: Parting
    before: str
    was: str
    now: str
    message: int | None
    unchanged: bool
    in_head: bool
    in_answer: bool
    opener: str
    closer: str

    @property
    def role(self) -> str:
        """Of that message, as it was; empty where it is not known."""
        if self.message is None:
            return ""
        messages = self.parting.line.messages
        return messages[self.message].role if self.message < len(messages) else "assistant"

    @property
    def tools(self) -> tuple[list[str], list[str]]:
        """The names of the tools that there were, and of those there are."""
        return self.parting.line.tools.names, self.parting.tools.names

    @property
    def other_tools(self) -> bool:
        """Whether the tools differ, and the place is where templates print them or not known."""
        differ = self.parting.line.tools.written != self.parting.tools.written
        is_unplaced = self.unchanged and self.message is None
        return differ and (self.in_head or is_unplaced) and not self.in_system

    @property
    def other_settings(self) -> bool:
        """Whether the client asked for other reasoning, and the messages up to the place are the same."""
        differ = self.parting.line.settings != self.parting.settings
        return differ and (self.unchanged or (self.in_answer and self.parting.same_answer))

    @property
    def in_system(self) -> bool:
        """Whether the text at the place is that of a system message which differs."""
        new = self.parting.new
        if new is None or new.role not in _HEAD_ROLES:
            return False
        return self.before[-_WORDS:] + self.now[:1] in self.parting.turns[self.parting.at].text

    @property
    def in_date(self) -> bool:
        """Whether the place is within a date or a time, on both sides."""
        start = max(0, len(self.before) - _LONGEST_DATE)
        return all(
            any(match.start() <= len(self.before) < match.end() for match in _CLOCK.finditer(text, start))
            for text in (self.before + self.was, self.before + self.now)
        )

    @property
    def lacks_thought(self) -> bool:
        """Whether reasoning that stood at the place is gone."""
        opened = bool(self.opener) and (self.opener in self.was or self.before.rstrip().endswith(self.opener))
        return opened and (self.opener not in self.now or self.now.lstrip().startswith(self.closer))


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason for a break: what is said of it, what helps, and how it is told."""

    name: str
    says: str
    cure: str
    tells: Callable[[Seen], bool]


def _billing(seen: Seen) -> bool:
    return any("-billing-header" in (seen.before + side).lower() for side in (seen.was, seen.now))


def _differs(seen: Seen, *roles: str) -> bool:
    return not seen.unchanged and seen.parting.old is not None and seen.role in roles


def _moved(seen: Seen) -> bool:
    old, new = seen.parting.old_rest, seen.parting.new_rest
    return not seen.unchanged and len(old) == 1 and len(new) > 1 and old[-1] == new[-1]


def _reasoning_removed(seen: Seen) -> bool:
    old, new = seen.parting.old, seen.parting.new
    return (
        _differs(seen, "assistant") and old is not None and new is not None
        and (old.role, old.words) == (new.role, new.words)
    )  # fmt: skip


CAUSES: tuple[Cause, ...] = (
    Cause(
        "billing_header",
        "the billing header that Claude Code puts into the system prompt has another value",
        "leave the rule billing_header on (--stability-off, --no-strip-anthropic-preamble), or start Claude Code with "
        "CLAUDE_CODE_ATTRIBUTION_HEADER=0",
        lambda seen: seen.in_head and _billing(seen),
    ),
    Cause(
        "tools_dropped",
        "the harness sent no tools this time",
        "a compaction request keeps the session's tools by the rule compaction_tools (--stability-off); otherwise let "
        "the harness send them and say tool_choice none",
        lambda seen: seen.other_tools and not seen.tools[1],
    ),
    Cause(
        "tools_added",
        "tools were added to the list, which stands at the head of the prompt",
        "let the harness defer them (defer_loading), or load them before the first turn",
        lambda seen: seen.other_tools and set(seen.tools[0]) < set(seen.tools[1]),
    ),
    Cause(
        "tools_removed",
        "tools were taken from the list",
        "let the harness keep its tools for the whole session",
        lambda seen: seen.other_tools and set(seen.tools[0]) > set(seen.tools[1]),
    ),
    Cause(
        "tools_reordered",
        "the same tools came in another order",
        "let the harness list its tools in one order",
        lambda seen: (
            seen.other_tools
            and seen.tools[0] != seen.tools[1]
            and sorted(seen.tools[0]) == sorted(seen.tools[1])
        ),
    ),
    Cause(
        "tools_changed",
        "a tool's description or schema changed",
        "look at what differs: volatile text does not belong into a tool's description",
        lambda seen: seen.other_tools,
    ),
    Cause(
        "context_edited",
        "the client had the server take earlier content out of the history (context_management)",
        "nothing is wrong if it was meant; a higher trigger makes it rarer",
        lambda seen: seen.parting.edited and _differs(seen, "assistant", "user", "tool"),
    ),
    Cause(
        "date_in_system",
        "the system prompt holds a date or a time that went on",
        "let the harness put it into the last message, or leave it out",
        lambda seen: _differs(seen, *_HEAD_ROLES) and seen.in_date,
    ),
    Cause(
        "message_moved",
        "a message that was the last one stands behind the new ones",
        "in OpenClaw it is a block of internal context, which stays where it is over the Responses API "
        '(api "openai-responses"); what the model said after it has to be read again otherwise',
        _moved,
    ),
    Cause(
        "message_inserted",
        "a message was put in between those that were there",
        "let the harness add messages at the end only",
        lambda seen: not seen.unchanged and seen.parting.old in seen.parting.new_rest[1:],
    ),
    Cause(
        "message_removed",
        "messages that stood there are gone: the harness trimmed or compacted its history",
        "nothing is wrong if it was meant; a larger window for the harness makes it rarer",
        lambda seen: (
            not seen.unchanged
            and seen.parting.old is not None
            and (seen.parting.new is None or seen.parting.new in seen.parting.old_rest[1:])
        ),
    ),
    Cause(
        "system_changed",
        "a system message has another text",
        "let the harness keep it for the session and add what is new at the end",
        lambda seen: _differs(seen, *_HEAD_ROLES),
    ),
    Cause(
        "reasoning_removed",
        "the harness sent an earlier turn back without its reasoning",
        "let the harness keep reasoning; on Messages: context_management clear_thinking with keep all",
        _reasoning_removed,
    ),
    Cause(
        "answer_edited",
        "the harness sent an earlier turn of the assistant back with other words",
        "nothing is wrong if it was meant; the turn is rendered as edited",
        lambda seen: _differs(seen, "assistant"),
    ),
    Cause(
        "date_in_message",
        "an earlier message holds a date or a time that went on",
        "let the harness keep what it once sent",
        lambda seen: _differs(seen, "user", "tool") and seen.in_date,
    ),
    Cause(
        "message_changed",
        "an earlier message came with another text",
        "let the harness keep what it once sent",
        lambda seen: _differs(seen, "user", "tool"),
    ),
    Cause(
        "answer_dropped",
        "the harness went on without the turn that was generated",
        "harnesses drop a turn that was cut, or that has no visible text",
        lambda seen: seen.in_answer and (seen.parting.new is None or seen.parting.new.role != "assistant"),
    ),
    Cause(
        "settings",
        "a setting of the request, such as the reasoning effort, changed, and with it what the chat template prints of "
        "it or of earlier reasoning",
        "let the harness keep its settings for the whole session",
        lambda seen: (seen.unchanged and seen.in_head) or seen.other_settings,
    ),
    Cause(
        "thinking_dropped",
        "the chat template leaves out earlier reasoning: that is how the model was trained",
        "models that can keep it have a switch, such as chat_template_kwargs preserve_thinking or clear_thinking",
        lambda seen: (seen.unchanged or seen.in_answer) and seen.lacks_thought,
    ),
    Cause(
        "answer_respelled",
        "the generated turn says the same in other tokens: the turn memory does not hold it, or the template's turns "
        "cannot be told apart",
        "give --turn-memory more room",
        lambda seen: seen.in_answer and (seen.parting.line.answer is None or seen.parting.same_answer),
    ),
    Cause(
        "answer_rewritten",
        "the harness sent the generated turn back with other words",
        "nothing is wrong if it was meant; the turn is rendered as edited",
        lambda seen: seen.in_answer,
    ),
    Cause(
        "template",
        "the chat template prints the same messages otherwise once others follow",
        "look at what differs; --chat-template takes another template",
        lambda seen: seen.unchanged,
    ),
    Cause("unknown", "none of the known causes", "look at what differs", lambda seen: True),
)
"""In the order in which they are tried. The last one fits everything."""


@dataclass(frozen=True, slots=True)
class Break:
    """Where and why a prompt does not go on from the one before.

    Attributes:
        message: the place of the first message that differs, from 0; None where it is not known.
        role: its role; ``tools`` for the list of tools.
        before: text that both prompts have, up to the place; ``was`` and ``now`` follow it in each.
        lost: tokens that should have matched and did not.
    """

    cause: Cause
    message: int | None
    role: str
    before: str
    was: str
    now: str
    lost: int


def explain(parting: Parting, tokens: bytes, speech: Speech) -> Break:
    """The break at ``parting``; ``tokens`` are the new prompt's."""
    seen = _look(parting, tokens, speech)
    cause = next(cause for cause in CAUSES if cause.tells(seen))
    in_tools = cause.name.startswith("tools_")
    return Break(
        cause,
        message=None if in_tools else seen.message,
        role="tools" if in_tools else seen.role,
        before=seen.before,
        was=seen.was,
        now=seen.now,
        lost=parting.line.expected - parting.matched,
    )


def _look(parting: Parting, tokens: bytes, speech: Speech) -> Seen:
    at, decode = parting.matched, speech.tokenizer.decode
    opener, closer = speech.family.reasoning or ("", "")
    said = [i for i, message in enumerate(parting.line.messages) if message.role == "assistant"]
    begun, is_counted = _begun(parting, said, speech)
    unchanged = _is_unchanged(parting, [*said, len(parting.line.messages)], begun)
    return Seen(
        parting,
        before=decode(_ids(tokens, max(0, at - _BEFORE), at)),
        was=decode(_ids(parting.line.tokens, at, at + _AFTER)),
        now=decode(_ids(tokens, at, at + _AFTER)),
        message=parting.at if not unchanged else said[begun - 1] if begun and is_counted else None,
        unchanged=unchanged,
        in_head=begun == 0,
        in_answer=not unchanged and parting.old is None,
        opener=opener.strip(),
        closer=closer.strip(),
    )


def _ids(tokens: bytes, start: int, end: int) -> array[int]:
    return array("I", tokens[start * WIDTH : end * WIDTH])


_OPENING = 16
"""About how many tokens of a prompt open the turn that follows."""


def _begun(parting: Parting, said: Sequence[int], speech: Speech) -> tuple[int, bool]:
    """How many turns of the assistant begin before the place, and whether that is counted: where no one header tells
    it is what the messages say.
    """
    if speech.layout is not None and len(speech.layout.headers) == 1:
        # White space at its end may be one token with what follows.
        header = array("I", speech.tokenizer.encode(speech.layout.headers[0].rstrip())).tobytes()
        return parting.line.tokens.count(header, 0, parting.matched * WIDTH), True
    if parting.matched >= parting.line.prompt_tokens - _OPENING:
        return len(said) + 1, False
    return sum(i <= parting.at for i in said), False


def _is_unchanged(parting: Parting, said: Sequence[int], begun: int) -> bool:
    """Whether no message differs up to that in which the next turn of the assistant begins.

    Args:
        said: where its turns are, that which was generated at the end.
    """
    if begun >= len(said):
        return False
    # The next turn itself may be the first that differs; what stands in its place would have another header.
    is_said = parting.new is not None and parting.new.role == "assistant"
    return parting.at > said[begun] or (parting.at == said[begun] and is_said)
