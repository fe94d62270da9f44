"""Find out which invocation of an agent a request belongs to.

An invocation goes from a question of the user (or of the agent above) to the answer without calls. It is found from the
conversation, not from what this process has seen, so that requests of one invocation that reach several processes get
the same ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from singletree.conversation import Turn
from singletree.lru import LruCache
from singletree.records.record_queue import AnswerRecords, RequestRecord
from singletree.records.span_attributes import CHAT, INVOKE_AGENT, SUMMED, span_attributes

_MOST_OPEN = 4096
"""How many invocations may be without an end; the oldest are ended where their last request ended."""
_LONGEST_PAUSE_MS = 3_600_000
"""How long an invocation waits for its next request, in milliseconds, while tools run: after it, the agent has gone."""
_MOST_SESSIONS = 16_384


@dataclass(slots=True)
class Invocation:
    """One invocation of an agent.

    Attributes:
        parent: id of the span of the invocation that started it; None for none.
        started, ended: unix times in milliseconds: of its first request, and of the end of its last one.
        error: the name of the error that its last request ended with; empty for none.
    """

    trace_id: int
    span_id: int
    parent: int | None
    started: int
    ended: int
    attributes: dict[str, Any] = field(default_factory=dict)
    error: str = ""


_Lane = tuple[str, str]
"""A session, and a conversation or an agent in it."""


class Invocations:
    """The invocations that are not over, and the last one of each agent: sub-agents find theirs there."""

    def __init__(self) -> None:
        # By session, conversation, and the number of its last question.
        self._open: OrderedDict[tuple[str, str, int], Invocation] = OrderedDict()
        self._of_conversation: LruCache[_Lane, Invocation] = LruCache(entries=_MOST_SESSIONS)
        self._of_agent: LruCache[_Lane, Invocation] = LruCache(entries=_MOST_SESSIONS)
        self._traces: LruCache[str, int] = LruCache(entries=_MOST_SESSIONS)

    def trace_of(self, record: RequestRecord) -> int:
        """Return the id of the trace of a record's session: that of the session above it, if it has one."""
        agent = record["agent_context"]
        session, parent = agent["session_id"], agent.get("parent_session_id", "")
        if parent:
            self._traces.put(session, self._traces.get(parent) or _id(16, parent))
        return self._traces.get(session) or _id(16, session)

    def of_tool(self, record: RequestRecord) -> Invocation | None:
        return self._of_conversation.get(_conversation(record))

    def take(self, answer: AnswerRecords) -> Invocation | None:
        """Return the invocation that a request belongs to, with the request counted in it; None if there is none.

        A request without tools asks a model and not an agent: it belongs to the last invocation of its agent.
        """
        record = answer.records[-1]
        conversation, agent = _conversation(record), (record["agent_context"]["session_id"], answer.run)
        if not _has_tools(record):
            return self._of_agent.get(agent)
        key = (*conversation, questions(answer.turns))
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = self._begin(answer, key)
        self._open.move_to_end(key)
        found.ended = max(found.ended, record["event_time_unix_ms"])
        found.error = record["request"]["singletree"].get("error", "")
        counted = span_attributes(CHAT, record)
        for name in SUMMED:
            found.attributes[name] = found.attributes.get(name, 0) + counted.get(name, 0)
        self._of_conversation.put(conversation, found)
        self._of_agent.put(agent, found)
        return found

    def over(self, answer: AnswerRecords) -> Iterator[Invocation]:
        """Yield the invocations that are over with the end of a request, each once.

        They are its own, if its answer has no calls; one of the same conversation that it has left; and those that were
        left long ago, or are too many.
        """
        record = answer.records[-1]
        if _has_tools(record):
            conversation = _conversation(record)
            own = (*conversation, questions(answer.turns))
            for key in [key for key in self._open if key[:2] == conversation and key != own]:
                yield self._open.pop(key)
            ended = record["request"]["finish_reason_metadata"]
            if not ended["tool_calls"] and ended["finish_reason"] not in ("cancelled", "error"):
                yield self._open.pop(own)
        now = record["event_time_unix_ms"]
        while self._open:
            oldest = next(iter(self._open.values()))
            if len(self._open) <= _MOST_OPEN and now - oldest.ended < _LONGEST_PAUSE_MS:
                break
            yield self._open.popitem(last=False)[1]

    def rest(self) -> Iterator[Invocation]:
        """Yield all that are not over, each once: the server ends."""
        while self._open:
            yield self._open.popitem(last=False)[1]

    def _begin(self, answer: AnswerRecords, key: tuple[str, str, int]) -> Invocation:
        record = answer.records[-1]
        above, request = self._above(answer), record["request"]
        asked = next((turn.text for turn in reversed(answer.turns) if turn.role == "user"), "")
        span_id = _id(8, key[0], key[1], str(key[2]), asked)
        before = self._of_conversation.get(key[:2])
        if before is not None and before.span_id == span_id:
            # The same question again: it is another invocation.
            span_id = _id(8, str(span_id), request["request_id"])
        return Invocation(
            self.trace_of(record),
            span_id,
            None if above is None else above.span_id,
            request["request_received_ms"],
            record["event_time_unix_ms"],
            span_attributes(INVOKE_AGENT, record),
        )

    def _above(self, answer: AnswerRecords) -> Invocation | None:
        record = answer.records[-1]
        agent = record["agent_context"]
        run = agent.get("parent_trajectory_id", "")
        if not record["request"]["singletree"]["is_subagent"]:
            return None
        session = agent.get("parent_session_id") or agent["session_id"]
        return self._of_agent.get((session, run)) or self._of_agent.get((session, ""))


def _conversation(record: RequestRecord) -> _Lane:
    agent = record["agent_context"]
    return agent["session_id"], agent["trajectory_id"]


def _has_tools(record: RequestRecord) -> bool:
    return bool(record["request"]["singletree"]["tools"])


def questions(turns: Sequence[Turn]) -> int:
    """Return how many questions a conversation has: what users said in one go, except beside the results of tools."""
    count, before = 0, "assistant"
    for turn in turns:
        if turn.role == "user" and before == "assistant":
            count += 1
        if turn.role in ("user", "assistant", "tool"):
            before = turn.role
    return count


def _id(size: int, *texts: str) -> int:
    digest = blake2b("\0".join(texts).encode("utf-8", "surrogatepass"), digest_size=size).digest()
    return int.from_bytes(digest, "big") or 1
