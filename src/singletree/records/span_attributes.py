"""What a span tells of a request: its texts, where asked for, and which invocation of an agent it belongs to.

Texts are as OpenTelemetry's conventions for generative AI write them. An invocation goes from a question of the user
(or of the agent above) to the answer without calls. It is found from the conversation, not from what this process has
seen, so that requests of one invocation that reach several processes get the same ids.
"""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from singletree.conversation import Reasoning, Text, Tool, ToolCall, ToolResult, Turn
from singletree.lru import LruCache
from singletree.records.record_queue import AnswerRecords, RequestRecord

SCHEMA_URL = "https://opentelemetry.io/schemas/gen-ai/1.42.0"
CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The variable of the conventions by which texts are exported."""
CONTENT_IN_SPANS = frozenset({"true", "span_only", "span_and_event"})
"""Its values, in lower case, with which texts are attributes of spans."""

CHAT, INVOKE_AGENT, EXECUTE_TOOL = "chat", "invoke_agent", "execute_tool"
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
PROVIDER_NAME = "singletree"

INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
SUMMED = (INPUT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS, REASONING_TOKENS)
"""Attributes of ``chat`` spans whose sums ``invoke_agent`` spans have."""

FINISH_REASONS = "gen_ai.response.finish_reasons"
ERROR_TYPE = "error.type"
REQUEST_MODEL = "gen_ai.request.model"
TOOL_NAME = "gen_ai.tool.name"

SYSTEM_INSTRUCTIONS = "gen_ai.system_instructions"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOOL_DEFINITIONS = "gen_ai.tool.definitions"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"

_AGENT = {
    "gen_ai.conversation.id": ("agent_context", "session_id"),
    "gen_ai.agent.id": ("agent_context", "trajectory_id"),
    "gen_ai.agent.name": ("agent_context", "session_type_id"),
}
_ATTRIBUTES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    CHAT: {
        **_AGENT,
        REQUEST_MODEL: ("request", "singletree", "requested_model"),
        "gen_ai.request.stream": ("request", "singletree", "stream"),
        "gen_ai.request.max_tokens": ("request", "singletree", "sampling", "max_tokens"),
        "gen_ai.request.temperature": ("request", "singletree", "sampling", "temperature"),
        "gen_ai.request.top_p": ("request", "singletree", "sampling", "top_p"),
        "gen_ai.request.top_k": ("request", "singletree", "sampling", "top_k"),
        "gen_ai.request.presence_penalty": ("request", "singletree", "sampling", "presence_penalty"),
        "gen_ai.request.frequency_penalty": ("request", "singletree", "sampling", "frequency_penalty"),
        "gen_ai.request.seed": ("request", "singletree", "sampling", "seed"),
        "gen_ai.response.id": ("request", "singletree", "answer_id"),
        "gen_ai.response.model": ("request", "model"),
        INPUT_TOKENS: ("request", "input_tokens"),
        OUTPUT_TOKENS: ("request", "output_tokens"),
        CACHED_TOKENS: ("request", "cached_tokens"),
        REASONING_TOKENS: ("request", "singletree", "reasoning_tokens"),
        ERROR_TYPE: ("request", "singletree", "error"),
        "singletree.request.id": ("request", "request_id"),
        "singletree.prefix.course": ("request", "singletree", "course"),
        "singletree.prefix.matched_tokens": ("request", "singletree", "matched_tokens"),
        "singletree.prefix.lost_tokens": ("request", "singletree", "lost_tokens"),
        "singletree.prefix.break": ("request", "singletree", "break"),
        "singletree.replayed_turns": ("request", "singletree", "replayed_turns"),
        "singletree.worker": ("request", "singletree", "worker"),
        "singletree.failovers": ("request", "singletree", "failovers"),
    },
    EXECUTE_TOOL: {
        **_AGENT,
        TOOL_NAME: ("tool", "tool_class"),
        "gen_ai.tool.call.id": ("tool", "tool_call_id"),
    },
    INVOKE_AGENT: {**_AGENT, REQUEST_MODEL: ("request", "singletree", "requested_model")},
}
"""For each operation the attributes of its span, and where in a record their values are."""

_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
_CHOICES = "gen_ai.request.choice.count"


def span_attributes(operation: str, record: RequestRecord) -> dict[str, Any]:
    """Return the attributes of the span of ``operation`` for ``record``. What the record does not have is left out."""
    found: dict[str, Any] = {OPERATION: operation, PROVIDER: PROVIDER_NAME}
    for name, path in _ATTRIBUTES[operation].items():
        value: Any = record
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    if operation == EXECUTE_TOOL:
        found["gen_ai.tool.type"] = "function"
        if record["tool"]["status"] == "failed":
            found[ERROR_TYPE] = "tool_error"
    if operation == CHAT:
        request = record["request"]
        found[FINISH_REASONS] = (finish_reason(record),)
        if (first := request.get("ttft_ms")) is not None:
            found[_FIRST_CHUNK] = first / 1000
        if (choices := request["singletree"]["choices"]) > 1:
            found[_CHOICES] = choices
    return found


def finish_reason(record: RequestRecord) -> str:
    """Return why a turn ended, by the names of the conventions where they have one."""
    ended = record["request"]["finish_reason_metadata"]
    if ended["tool_calls"] and ended["finish_reason"] in ("stop", "stop_sequence"):
        return "tool_call"
    names = {"stop_sequence": "stop", "context_overflow": "length", "refusal": "content_filter"}
    reason: str = ended["finish_reason"]
    return names.get(reason, reason)


_SYSTEM_ROLES = ("system", "developer")


def content_attributes(
    turns: Sequence[Turn], tools: Sequence[Tool], answer: Turn, ended: str
) -> dict[str, str]:
    """Return the attributes with the texts of a conversation and its answer, as JSON.

    Args:
        ended: why the answer ended, by the name of the conventions.
    """
    first = next((i for i, turn in enumerate(turns) if turn.role not in _SYSTEM_ROLES), len(turns))
    values = {
        SYSTEM_INSTRUCTIONS: [part for turn in turns[:first] for part in _parts(turn)],
        INPUT_MESSAGES: [{"role": turn.role, "parts": _parts(turn)} for turn in turns[first:]],
        OUTPUT_MESSAGES: [{"role": "assistant", "parts": _parts(answer), "finish_reason": ended}],
        TOOL_DEFINITIONS: [_definition(tool) for tool in tools],
    }
    return {name: content_json(value) for name, value in values.items() if value}


def invocation_attributes(turns: Sequence[Turn], answer: Turn, ended: str) -> dict[str, str]:
    """Return the attributes with the question of an invocation, and its last answer so far. Arguments as above."""
    asked = next((turn for turn in reversed(turns) if turn.role == "user"), None)
    values = {
        INPUT_MESSAGES: [] if asked is None else [{"role": "user", "parts": _parts(asked)}],
        OUTPUT_MESSAGES: [{"role": "assistant", "parts": _parts(answer), "finish_reason": ended}],
    }
    return {name: content_json(value) for name, value in values.items() if value}


def result_text(result: ToolResult) -> str:
    """Return the result of a tool: its text, or its parts as JSON where it has others."""
    if all(isinstance(part, Text) for part in result.parts):
        return whole_characters("".join(part.text for part in result.parts if isinstance(part, Text)))
    return content_json([_part(part) for part in result.parts])


def content_json(value: Any) -> str:
    """Return ``value`` as JSON text that UTF-8 has."""
    return whole_characters(json.dumps(value, ensure_ascii=False, default=_plain))


def whole_characters(text: str) -> str:
    """Return ``text`` with question marks in the place of half surrogate pairs, which UTF-8 does not have."""
    return text.encode("utf-8", "replace").decode()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return msgspec.to_builtins(value)


def _parts(turn: Turn) -> list[dict[str, Any]]:
    return [_part(part) for part in turn.parts]


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "content": part.text}
    if isinstance(part, Reasoning):
        return {"type": "reasoning", "content": part.text}
    if isinstance(part, ToolCall):
        return {
            "type": "tool_call",
            "id": part.id,
            "name": part.name,
            "arguments": arguments_value(part.arguments),
        }
    if isinstance(part, ToolResult):
        return {"type": "tool_call_response", "id": part.call_id, "response": result_text(part)}
    # Pictures, documents and references: their data is not copied.
    return {"type": type(part).__name__.lower(), "mime_type": getattr(part, "media_type", "")}


def arguments_value(arguments: str) -> Any:
    """Return the arguments of a call as a JSON value; as they are where they are not JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _definition(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.parameters or {},
    }


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
