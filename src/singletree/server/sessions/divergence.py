"""Find where and in what a prompt differs from an earlier one, or from that of an answer which the client names.

Messages are compared by their fingerprints, which are computed once, when a message is new. The cache diagnostics of
the vendors' APIs name an answer (Anthropic's ``diagnostics.previous_message_id``, OpenAI's
``prompt_cache_options.comparison_response_id``). A session's record of a conversation contains the prompts of all
answers that it continues, so only the ends of the answers are kept besides. Why a prefix breaks is found out behind a
door (``prefix_breaks``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from singletree.conversation import Tool, Turn
from singletree.pictures import comparable_tokens
from singletree.prefixes import common_prefix, common_text_prefix
from singletree.prompts.prompt_writer import Prompt
from singletree.prompts.replay.turn_comparison import is_equivalent_turn
from singletree.prompts.replay.turn_keys import Fingerprint
from singletree.request_options import CacheDiagnosis, CacheMiss
from singletree.server.doors import load_early, open_door, open_door_in_thread
from singletree.server.models.chat_format import ChatFormat
from singletree.server.models.model import Model
from singletree.server.sessions.step import Break, Step

WIDTH = array("I").itemsize
"""Size of a token in bytes."""

_MESSAGE_BYTES = 150
"""Memory of a message's fingerprint, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class ToolList:
    """The tools of a prompt, and their printed fields as JSON (``encoded``). Prompts with the same tools share one."""

    tools: tuple[Tool, ...]
    encoded: bytes

    @classmethod
    def of(cls, tools: tuple[Tool, ...], last: ToolList | None = None) -> ToolList:
        """Return a list of ``tools``; ``last`` itself where nothing differs, the order of keys included."""
        if last is not None and last.tools is tools:
            return last
        printed = [(tool.name, tool.description, tool.parameters, tool.kind) for tool in tools]
        encoded = msgspec.json.encode(printed) if tools else b""
        return last if last is not None and last.encoded == encoded else cls(tools, encoded)

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.tools]

    @property
    def bytes(self) -> int:
        return _PARSED * len(self.encoded)


_PARSED = 8
"""Approximate memory of parsed JSON, in bytes for each byte of JSON."""


class PromptRecord(NamedTuple):
    """The last prompt of one conversation, and the turn that answered it.

    Attributes:
        prompt, turn: the tokens of the prompt and of the turn, ``WIDTH`` bytes each. They are not joined here, since
            that would copy a long prompt once more with each request.
        expected: number of tokens that the next prompt should begin with, including the turn unless it was cut off.
        settings: the reasoning variables that the client set.
        answer: the generated turn; None where it was not recorded.
        ends: (tokens, messages) at which each turn ended, in ascending order, this one last.
        inspected: the turn's id in the inspector; empty where that is off.
        headers: (tokens, headers): how many headers of the assistant's turns are within so many tokens, where they were
            counted last.
        salt: the salt of the engine's prefix cache; prompts of another salt do not continue it.
        step: the request whose prompt and turn these are.
    """

    model: str
    prompt: bytes
    turn: bytes
    expected: int
    messages: tuple[Fingerprint, ...]
    tools: ToolList
    settings: Mapping[str, Any]
    answer: Turn | None
    ends: tuple[tuple[int, int], ...]
    inspected: str = ""
    headers: tuple[int, int] = (0, 0)
    salt: str = ""
    step: Step | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // WIDTH

    @property
    def length(self) -> int:
        return (len(self.prompt) + len(self.turn)) // WIDTH

    @property
    def tokens(self) -> bytes:
        return self.prompt + self.turn

    def tokens_between(self, start: int, end: int) -> bytes:
        size = len(self.prompt)
        first, last = start * WIDTH, end * WIDTH
        return self.prompt[first:last] + self.turn[max(0, first - size) : max(0, last - size)]

    def matched(self, tokens: bytes) -> int:
        """Return the number of tokens that this prompt and turn have in common with the beginning of ``tokens``."""
        same = common_text_prefix(tokens, self.prompt)
        if same == len(self.prompt):
            same += common_text_prefix(tokens[same : same + len(self.turn)], self.turn)
        return same // WIDTH

    def headers_within(self, end: int, header: bytes) -> int:
        """Return how many times the tokens ``header`` are within the first ``end`` tokens. Only those behind the
        tokens where they were counted last are searched.
        """
        counted, headers = self.headers if self.headers[0] <= end else (0, 0)
        # One that ends behind those tokens can begin within them.
        start = max(0, counted * WIDTH - len(header) + 1)
        tokens = self.prompt if end <= self.prompt_tokens else self.tokens
        return headers + tokens.count(header, start, end * WIDTH)

    def extended_to(self, matched: int) -> int:
        """Return the last end of a turn, in tokens, that lies within the first ``matched`` tokens; 0 for none."""
        for tokens, _ in reversed(self.ends):
            if tokens <= matched:
                return tokens
        return 0

    @property
    def bytes(self) -> int:
        answer = 0 if self.answer is None else 4 * (self.expected - self.prompt_tokens)
        return self.length * WIDTH + answer + _MESSAGE_BYTES * len(self.messages) + 16 * len(self.ends)


class Divergence(NamedTuple):
    """The point at which a prompt diverges from the one that it should continue.

    Attributes:
        record, prompt: the earlier prompt and the new one.
        matched: number of tokens that both begin with.
        messages, tools: the fingerprints of the new prompt's messages, and its tools.
        at: number of messages that both begin with: the index of the first message that differs.
    """

    record: PromptRecord
    matched: int
    prompt: Prompt
    messages: tuple[Fingerprint, ...]
    tools: ToolList
    at: int

    @property
    def old(self) -> Fingerprint | None:
        """Return the first message that differs, from the earlier prompt; None where that has no more messages."""
        return self.record.messages[self.at] if self.at < len(self.record.messages) else None

    @property
    def new(self) -> Fingerprint | None:
        return self.messages[self.at] if self.at < len(self.messages) else None

    @property
    def old_rest(self) -> tuple[Fingerprint, ...]:
        return self.record.messages[self.at :]

    @property
    def new_rest(self) -> tuple[Fingerprint, ...]:
        return self.messages[self.at :]

    def returned(self, message: int) -> tuple[Sequence[Turn], Sequence[Turn]]:
        """Return the adjacent assistant turns of the new prompt that include the index ``message``, and those behind.

        The first are empty where there are none.
        """
        turns = self.prompt.turns
        start = stop = message
        while stop < len(turns) and turns[stop].role == "assistant":
            stop += 1
        while start and start < stop and turns[start - 1].role == "assistant":
            start -= 1
        return turns[start:stop], turns[stop:]

    def template_prints_thought(self, message: int) -> bool:
        """Tell whether the template would print the reasoning of the assistant's turn ``message`` if it were sent."""
        runs = _runs(self.prompt.turns)
        number = next((i for i, run in enumerate(runs) if message in run), None)
        # The template may have received several turns of the client as one.
        given = _runs(self.prompt.given)
        return (
            number is not None and len(given) == len(runs) and self.prompt.prints_thought(given[number].start)
        )

    @property
    def same_answer(self) -> bool:
        """Tell whether the first message that differs is the generated turn, with the same content."""
        answer = self.record.answer
        if answer is None or self.old is not None or self.new is None or self.new.role != "assistant":
            return False
        return is_equivalent_turn(self.prompt.turns[self.at], answer)

    @property
    def answer_comes_back(self) -> bool:
        """Tell whether the new prompt contains the generated turn after the divergence."""
        answer = self.record.answer
        return answer is not None and any(
            turn.role == "assistant" and is_equivalent_turn(turn, answer)
            for turn in self.prompt.turns[self.at :]
        )

    def come_back(self, *roles: str) -> bool:
        """Tell whether any message of these ``roles`` after the divergence is also in the rest of the new prompt."""
        return not {old for old in self.old_rest if old.role in roles}.isdisjoint(self.new_rest)

    @property
    def starts_over(self) -> bool:
        """Tell whether the new prompt starts another conversation with the same first messages: an agent with another
        task, a side request, or a compacted session. A title request also contains the user's text, but none of the
        later turns. A compacted session has all of the user's text, and a summary for the model's first turn.
        """
        roles = roles_of(self.record.messages)
        asked, acted = (roles.index(r) if r in roles else len(roles) for r in ("user", "assistant"))
        if self.answer_comes_back or self.come_back("assistant", "tool"):
            return False
        summed_up = self.at == acted and self.new is not None and self.new.role == "user"
        another_task = asked < self.at and self._is_another_task and not self.come_back("user")
        return self.at <= asked < len(roles) or another_task or (summed_up and acted < len(roles))

    @property
    def _is_another_task(self) -> bool:
        """Tell whether a message before the model's first turn differs. Harnesses put the environment, their rules and
        example turns into separate messages before the task.
        """
        generated = self.record.ends[0][1] if self.record.ends else len(self.record.messages)
        is_asked = self.old is not None and self.old.role != "assistant" and self.new is not None
        # Where the answer was not recorded, any later assistant turn may be the answer.
        could_be_it = self.record.answer is None and any(new.role == "assistant" for new in self.new_rest)
        return is_asked and self.at < generated and not could_be_it

    @property
    def goes_back(self) -> bool:
        """Tell whether the new prompt continues an earlier turn of the conversation completely: a fork, or a retry."""
        if self.answer_comes_back or self.come_back("user", "assistant", "tool"):
            return False
        if self.old is None and self.new is None:
            return self.matched >= self.record.prompt_tokens
        if self.new is None:
            # An earlier prompt was sent again. The turn that answered it is the first message that is missing.
            lacks_answer = self.old is not None and self.old.role == "assistant"
            return lacks_answer and all(
                tokens <= self.matched for tokens, messages in self.record.ends if messages <= self.at
            )
        return any(
            self.at == messages and self.matched >= tokens for tokens, messages in self.record.ends[:-1]
        )


def roles_of(messages: Iterable[Turn | Fingerprint]) -> list[str]:
    """Return the role of each of ``messages``. No Python loop runs over those of a long conversation."""
    return list(map(attrgetter("role"), messages))


def assistant_places(messages: Iterable[Turn | Fingerprint]) -> list[int]:
    """Return the indices of the assistant's turns among ``messages``."""
    return list(compress(count(), map("assistant".__eq__, roles_of(messages))))


def _runs(turns: Sequence[Turn]) -> list[range]:
    runs: list[range] = []
    for i in assistant_places(turns):
        follows = bool(runs) and runs[-1].stop == i
        start = runs.pop().start if follows else i
        runs.append(range(start, i + 1))
    return runs


def compare(record: PromptRecord, matched: int, prompt: Prompt, tools: ToolList) -> Divergence:
    """Return the point at which ``prompt`` diverges from ``record``, with ``matched`` tokens that both begin with."""
    messages = prompt.fingerprints
    return Divergence(record, matched, prompt, messages, tools, common_prefix(record.messages, messages))


def cut_at(record: PromptRecord, end: tuple[int, int]) -> PromptRecord | None:
    """Return ``record`` as it was when the answer that ends at ``end`` was its last; None if it changed before that."""
    if end not in record.ends:
        return None
    if end == record.ends[-1]:
        return record
    tokens, messages = end
    return record._replace(
        prompt=record.tokens_between(0, tokens),
        turn=b"",
        expected=tokens,
        messages=record.messages[:messages],
        answer=None,
        ends=record.ends[: record.ends.index(end) + 1],
    )


ExplainBreak = Callable[[Divergence, bytes, ChatFormat], Break]

_DOOR = "prefix breaks"


def load_explanations() -> None:
    """Load in a thread what ``explained_break`` needs: it is called in a moment."""
    load_early(_DOOR)


async def wait_for_explanations() -> None:
    """Load in a thread what ``compare_prompt`` needs, and wait for it."""
    await open_door_in_thread(_DOOR)


def explained_break(divergence: Divergence, tokens: bytes, chat_format: ChatFormat) -> Break:
    """Return the break at ``divergence`` with its likely cause. ``tokens`` are those of the new prompt, packed."""
    explain: ExplainBreak = open_door(_DOOR)
    return explain(divergence, tokens, chat_format)


class AnswerEnd(NamedTuple):
    """Where an answer ends in the record of its conversation.

    Attributes:
        session: the key of the session.
        record_number: the number of the record.
        end: (tokens, messages) at the end of the answer.
    """

    session: str
    record_number: int
    end: tuple[int, int]


def compare_prompt(record: PromptRecord, model: Model, prompt: Prompt) -> CacheDiagnosis:
    """Return how ``prompt`` compares with the earlier prompt and answer of ``record``."""
    if record.model != model.name:
        reason = f"the answer was generated by {record.model}"
        return CacheMiss("model", record.expected, 0, {"cause": "model_changed", "reason": reason})
    tokens = comparable_tokens(prompt.token_ids, prompt.pictures).tobytes()
    matched = record.matched(tokens)
    if matched >= record.expected:
        return "hit"
    divergence = compare(record, matched, prompt, ToolList.of(prompt.tools, record.tools))
    broken = explained_break(divergence, tokens, model)
    report: dict[str, Any] = {
        "cause": broken.cause,
        "reason": broken.reason,
        "cure": broken.cure,
        "message": broken.message,
    }
    return CacheMiss(broken.change, broken.lost, matched, report)
