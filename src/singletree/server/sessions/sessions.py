"""Assign requests to sessions, and compare each prompt with the last one of its conversation.

A session holds several prompt records, each of the last prompt of one conversation: sub-agents, title requests and web
searches use their session's name with other prompts. A request continues the record with which it has most tokens in
common. Tokens are compared as bytes, and a message is processed only when it is new: a request costs its new part.
"""

from __future__ import annotations

import copy
import hashlib
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from operator import attrgetter
from typing import NamedTuple

from singletree.conversation import Tool, Turn
from singletree.events import FinishReason
from singletree.lru import ENTRY_BYTES, LruCache
from singletree.owners import OWNER_END, owned_id
from singletree.pictures import comparable_tokens
from singletree.prefixes import common_prefix
from singletree.prompts.prompt_writer import Prompt
from singletree.prompts.replay.turn_keys import Fingerprint, fingerprint
from singletree.request_options import CacheDiagnosis
from singletree.server.models.model import Model
from singletree.server.sessions.divergence import (
    WIDTH,
    AnswerEnd,
    PromptRecord,
    ToolList,
    compare,
    compare_prompt,
    cut_at,
    explained_break,
    load_explanations,
)
from singletree.server.sessions.step import Break, Cost, CostSums, Course, Step, total
from singletree.server.turn.generation import Generation

NAMELESS = "nameless-"
"""Begins the key of a session to which its client gives no name."""

_RECORDS = 32
_STEPS = 64
_STEP_BYTES = 1000
_HEAD_TOKENS = 16
_ALIKE = 64
"""Most sessions without a name that are kept for the same first tokens."""
_HEADS = 4096
_ANSWERS = 16_384
"""How many answers can be named by later requests, for a comparison of the prompts."""
_COMPLETE: tuple[FinishReason, ...] = ("stop", "length", "context_overflow")
"""Ends of a generation whose turn the next prompt should contain."""


@dataclass(slots=True)
class Session:
    """The kept data of one session.

    Attributes:
        head: the first tokens of its first prompt, when the client gave the session no name.
        records: the most recently used records by number.
        requests, records_made: numbers of all requests and records, including those that are no longer kept.
        first_end: at most the number of tokens at which the first turn of a record ended.
    """

    key: str
    owner: str = ""
    head: bytes | None = None
    records: LruCache[int, PromptRecord] = field(default_factory=lambda: LruCache(entries=_RECORDS))
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=_STEPS))
    requests: int = 0
    records_made: int = 0
    first_end: float = inf

    @property
    def bytes(self) -> int:
        tools = 0
        for each in set(map(attrgetter("tools"), self.records.values())):
            tools += each.bytes
        return self.records.bytes + tools + _STEP_BYTES * (1 + len(self.steps))

    def keep(self, number: int, record: PromptRecord) -> None:
        self.records.put(number, record, record.bytes)
        self.first_end = min(self.first_end, record.ends[0][0])


class _Found(NamedTuple):
    session: Session
    number: int
    record: PromptRecord
    matched: int


class Opened(NamedTuple):
    """A request in flight: its step, the parts of its future record, and the record that this one will replace.

    Attributes:
        compared: the record that the prompt was compared with; None where there was none.
        same_messages: how many messages both begin with.
    """

    step: Step
    model: Model
    tokens: bytes
    messages: tuple[Fingerprint, ...]
    tools: ToolList
    ends: tuple[tuple[int, int], ...] = ()
    headers: tuple[int, int] = (0, 0)
    head: bytes | None = None
    record: PromptRecord | None = None
    compared: PromptRecord | None = None
    same_messages: int = 0


@dataclass(frozen=True, slots=True)
class MovedSession:
    """A session on its way to another process. The attributes are those of ``Session``, oldest first.

    Attributes:
        answers: its answers that later requests may name, by id.
    """

    key: str
    records: Sequence[tuple[int, PromptRecord]]
    steps: Sequence[Step]
    requests: int
    records_made: int
    answers: Mapping[str, AnswerEnd]


class Sessions:
    """The sessions of one server, bounded in bytes; the least recently used ones are dropped first.

    Args:
        limit: in bytes. With 0 nothing is kept: every request is the first of its session.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: LruCache[str, Session] = LruCache(limit)
        self._nameless: LruCache[bytes, deque[str]] = LruCache(entries=_HEADS)
        self._answers: LruCache[str, AnswerEnd] = LruCache(entries=_ANSWERS)
        self._owned_costs: dict[str, CostSums] = {}
        self.share_costs(lambda owner: CostSums(), lambda: self._owned_costs)

    def share_costs(self, make: Callable[[str], CostSums], owners: Callable[[], Iterable[str]]) -> None:
        """Count what turns cost in what ``make`` returns for each owner; ``owners`` returns those who have a name."""
        self._make_costs, self._list_owners = make, owners
        self.owner, self.costs = "", make("")

    def of(self, owner: str) -> Sessions:
        """Return the sessions of one owner, within the same limit; these ones for an empty name."""
        if not owner:
            return self
        part = copy.copy(self)
        part.owner = owner
        part._sessions = self._sessions.part(owner)
        part._nameless = self._nameless.part(owner)
        part._answers = self._answers.part(owner)
        part.costs = self.costs_of(owner)
        return part

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the sessions, the most recently used first; without an owner, over those of all owners."""
        return iter(self._sessions.values())

    def shown_id(self, session: Session) -> str:
        """Return the id under which ``find`` finds a session: with its owner where that is another one."""
        return session.key if session.owner == self.owner else owned_id(session.owner, session.key)

    def find(self, id: str) -> Session | None:
        if (found := self.get(id)) is not None or self.owner:
            return found
        owner, _, key = id.partition(OWNER_END)
        return self.of(owner).get(key)

    def costs_of(self, owner: str) -> CostSums:
        """Return the sums of one of the owners whose sessions these are."""
        if owner == self.owner:
            return self.costs
        if owner not in self._owned_costs:
            self._owned_costs[owner] = self._make_costs(owner)
        return self._owned_costs[owner]

    def key_costs(self) -> dict[str, Cost]:
        """Return what the turns of each owner have cost, also those of sessions that are forgotten."""
        owners = (self.owner,) if self.owner else ("", *self._list_owners())
        return {owner: self.costs_of(owner).spent for owner in owners}

    def costs_here(self) -> Cost:
        """Return what the turns of all owners have cost in this process."""
        return total(sums.all for sums in (self.costs, *self._owned_costs.values()))

    def get(self, key: str) -> Session | None:
        return self._sessions.peek(key)

    def tools_of(self, key: str | None, model: str, turns: Sequence[Turn]) -> tuple[Tool, ...]:
        """Return the tools of the conversation with ``model`` to which ``turns`` only add a question; else none."""
        session = self._sessions.peek(key) if key else None
        if session is None or len(turns) < 2 or turns[-1].role not in ("user", "system"):
            return ()
        records = (record for record in session.records.values() if record.model == model)
        return next(
            (each.tools.tools for each in records if each.tools.tools and _adds_question(each, turns)), ()
        )

    def open(self, key: str | None, model: Model, prompt: Prompt, salt: str = "") -> Opened:
        """Compare ``prompt`` with its session in memory: the session ``key`` or, for None, one whose prompts begin
        with the same tokens. Pass the result to ``close`` when the request is over.

        Args:
            salt: of the request; prompts of another salt are in another part of the engine's prefix cache.
        """
        tokens = comparable_tokens(prompt.token_ids, prompt.pictures).tobytes()
        head = tokens[: _HEAD_TOKENS * WIDTH] + salt.encode("utf-8", "replace") if key is None else None
        found = self._longest(self._candidates(key, head), model.name, tokens, salt)
        if found is None:
            tools = ToolList.of(prompt.tools)
            first = self._first(key, model, tokens, salt)
            return Opened(first, model, tokens, prompt.fingerprints, tools, head=head)
        session, number, record, matched = found
        if tokens == record.prompt:
            tokens = record.prompt  # Of a prompt that is sent again, one copy is kept.
        tools = ToolList.of(prompt.tools, record.tools)
        lost, explain = 0, None
        headers = record.headers if record.headers[0] <= matched else (0, 0)
        if matched >= record.expected:
            course: Course = "appended"
            # The record's messages are in these tokens, even if a client has changed what the template omits.
            at = min(len(record.messages), len(prompt.turns))
            messages = (*record.messages[:at], *prompt.fingerprints[at:])
        else:
            divergence = compare(record, matched, prompt, tools)
            at, messages = divergence.at, divergence.messages
            if divergence.starts_over:
                first = self._first(key, model, tokens, salt, matched)
                return Opened(
                    first, model, tokens, messages, tools, head=head, compared=record, same_messages=at
                )
            course = "back" if divergence.goes_back else "broken"
            if course == "broken":
                load_explanations()
                lost, explain = record.expected - matched, partial(explained_break, divergence, tokens, model)
        if course == "back":
            number = session.records_made + 1
        return Opened(
            self._step(session.key, model, number, course, tokens, matched, lost, explain),
            model,
            tokens,
            messages,
            tools,
            ends=record.ends[: bisect_right(record.ends, (matched, inf))],
            headers=headers,
            head=session.head,
            record=None if course == "back" else record,
            compared=record,
            same_messages=at,
        )

    def compare_with(self, answer: str, model: Model, prompt: Prompt) -> CacheDiagnosis:
        known = self._answers.get(answer)
        if known is None:
            return "not_found"
        session = self._sessions.peek(known.session)
        record = None if session is None else session.records.peek(known.record_number)
        record = None if record is None else cut_at(record, known.end)
        return "unavailable" if record is None else compare_prompt(record, model, prompt)

    def close(self, opened: Opened, generation: Generation, answer: str = "", inspected: str = "") -> None:
        """Record the end of a request: the next one should continue its prompt and the generated turn.

        Args:
            answer: the id by which later requests may name the answer.
            inspected: the turn's id in the inspector.
        """
        step = opened.step
        step.generated, step.cached = len(generation.token_ids), generation.reported_cached_tokens()
        step.route = generation.reported_route()
        step.payer = self.costs.place(step.session, generation.request.agent)
        if self._limit == 0:
            return
        session = self._sessions.peek(step.session) or Session(step.session, self.owner, opened.head)
        record = _record(opened, generation, inspected)
        if opened.record is None or session.records.get(step.record_number) is not opened.record:
            # Another request has continued the same record in the meantime.
            step.record_number = session.records_made = session.records_made + 1
        session.keep(step.record_number, record)
        if answer:
            self._answers.put(answer, AnswerEnd(step.session, step.record_number, record.ends[-1]))
        session.steps.append(step)
        session.requests += 1
        if session.head is not None:
            self._index(session.key, session.head)
        size = session.bytes
        # A session that is over the limit by itself loses its oldest records.
        while size + ENTRY_BYTES > self._limit and len(session.records) > 1:
            session.records.pop(session.records.keys()[-1])
            size = session.bytes
        self._sessions.put(step.session, session, size)

    def take(self, key: str) -> MovedSession | None:
        """Remove the session ``key`` and return it, for another process; None when it is not in memory."""
        session = self._sessions.pop(key)
        if session is None:
            return None
        records, steps = session.records.items()[::-1], tuple(session.steps)
        answers = self._answers_of(key)
        return MovedSession(key, records, steps, session.requests, session.records_made, answers)

    def receive(self, moved: MovedSession) -> None:
        """Add a session that another process had. If this process has a part of it, they become one."""
        session = self._sessions.peek(moved.key) or Session(moved.key, self.owner)
        added = moved.records_made  # The numbers of this process's records follow those that come.
        own = [(number + added, record) for number, record in session.records.items()[::-1]]
        for id, end in self._answers_of(moved.key).items():
            self._answers.put(id, end._replace(record_number=end.record_number + added))
        for id, end in moved.answers.items():
            self._answers.put(id, end)
        session.records = LruCache(entries=_RECORDS)
        for number, record in (*moved.records, *own):
            session.keep(number, record)
        session.records_made += added
        session.steps = deque(sorted((*moved.steps, *session.steps), key=lambda step: step.at), maxlen=_STEPS)
        session.requests += moved.requests
        self._sessions.put(moved.key, session, session.bytes)

    def _answers_of(self, key: str) -> dict[str, AnswerEnd]:
        return {id: end for id, end in self._answers.items()[::-1] if type(id) is str and end.session == key}

    def _candidates(self, key: str | None, head: bytes | None) -> list[Session]:
        keys = [key] if key is not None else self._nameless.peek(head or b"") or ()
        return [session for each in keys if (session := self._sessions.peek(each)) is not None]

    def _longest(
        self, sessions: Sequence[Session], model: str, tokens: bytes, salt: str = ""
    ) -> _Found | None:
        """Find the record of ``model`` and ``salt`` that ``tokens`` extend furthest.

        The match is measured up to the last end of a turn within it: the few tokens after that end, which open the next
        message, are the same in every record. Among equal records, the one with most common tokens is chosen, then the
        one that was used last.
        """
        best: _Found | None = None
        furthest = (-1, False, 0)
        length = len(tokens) // WIDTH
        without_end = (0, False, length)
        for session in sessions:
            for number, record in session.records.items():
                # No turn of the session ended within these tokens: a record with all of them is as good as any.
                if furthest >= without_end and length < session.first_end:
                    break
                if record.model != model or record.salt != salt:
                    continue
                # Most records cannot win, even if all of their tokens were the same; those are not compared.
                most = min(length, record.length)
                reached = record.extended_to(most)
                if (reached, reached == record.expected, most) <= furthest:
                    continue
                matched = record.matched(tokens)
                reached = record.extended_to(matched)
                # A record that the tokens extend completely is preferred to a fork of it.
                rank = (reached, reached == record.expected, matched)
                if matched and rank > furthest:
                    best, furthest = _Found(session, number, record, matched), rank
        return best

    def _first(self, key: str | None, model: Model, tokens: bytes, salt: str, matched: int = 0) -> Step:
        if key is None:
            # Of the digests of Python, processors have instructions for this one's.
            digest = hashlib.sha256(tokens)
            if salt:
                digest.update(salt.encode("utf-8", "replace"))
            key = f"{NAMELESS}{digest.hexdigest()[:12]}"
        session = self._sessions.peek(key)
        number = 1 if session is None else session.records_made + 1
        return self._step(key, model, number, "first", tokens, matched)

    def _step(
        self,
        session: str,
        model: Model,
        record: int,
        course: Course,
        tokens: bytes,
        matched: int,
        lost: int = 0,
        explain: Callable[[], Break] | None = None,
    ) -> Step:
        length = len(tokens) // WIDTH
        now, owner = time.time(), self.owner
        return Step(session, now, model.name, record, course, length, matched, lost, explain, owner=owner)

    def _index(self, key: str, head: bytes) -> None:
        """Register a session without a name as the most recent one whose prompts begin with ``head``."""
        alike = self._nameless.get(head)
        if alike is None:
            self._nameless.put(head, deque((key,), maxlen=_ALIKE))
        elif alike[-1] != key:
            if key in alike:
                alike.remove(key)
            alike.append(key)


def _record(opened: Opened, generation: Generation, inspected: str) -> PromptRecord:
    turn_tokens = _turn_tokens(generation)
    step, broken = opened.step, opened.step.broken
    expected = step.prompt_tokens + turn_tokens
    return PromptRecord(
        model=opened.model.name,
        prompt=opened.tokens,
        turn=generation.token_ids.tobytes(),
        expected=expected,
        messages=opened.messages,
        tools=opened.tools,
        settings=generation.prompt.settings,
        answer=generation.recorder.turn if turn_tokens and generation.recorder else None,
        ends=(*opened.ends, (expected, len(opened.messages) + (turn_tokens > 0))),
        inspected=inspected,
        headers=opened.headers
        if broken is None or broken.headers is None
        else (step.matched, broken.headers),
        salt=generation.request.cache_salt,
        step=step,
    )


def _turn_tokens(generation: Generation) -> int:
    """Return how many tokens of the turn the next prompt should contain, without the stop token: the template may end
    the turn with another one.
    """
    ids, recording = generation.token_ids, generation.recorder
    if generation.ended not in _COMPLETE:
        return 0
    if recording is not None:
        return recording.tokens
    return len(ids) - (bool(ids) and ids[-1] in generation.model.tokenizer.stop_token_ids)


def _adds_question(record: PromptRecord, turns: Sequence[Turn]) -> bool:
    """Tell whether ``turns`` are the record's turns, perhaps without the last ones, with a question added.

    A harness that compacts after the context window overflowed omits the turns that made it overflow.
    """
    same = common_prefix(record.messages, turns, lambda old, turn: old == fingerprint(turn))
    in_a_loop = any(turn.role == "tool" for turn in turns[:-1])
    return in_a_loop and same in (len(record.messages), len(turns) - 1)
