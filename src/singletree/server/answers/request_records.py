"""Write one record for each request, without texts, as lines of JSON: for timelines, replay and load tests.

The records have the form of NVIDIA Dynamo's ``dynamo.request.trace.v1``
(https://docs.nvidia.com/dynamo/dev/observability/request-traces), so that its tools read them. What Dynamo has no field
for is in the object ``singletree``. The time that a tool took at the harness is the time from the end of the turn that
calls it to the arrival of the request that brings its result.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from singletree.conversation import Hints, ToolResult, Turn
from singletree.engines.engine import comparable_tokens
from singletree.events import Finished, ToolCallEnd, ToolCallStart
from singletree.lru import LruCache
from singletree.server.answers.choices import Choices
from singletree.server.answers.record_file import BLOCK_TOKENS
from singletree.server.answers.record_queue import AnswerRecords, RecordQueue, RequestRecord
from singletree.server.answers.tracing import Trace
from singletree.server.sessions.sessions import Step

SCHEMA = "dynamo.request.trace.v1"
_NO_HINTS = Hints()
_CALLS = 16_384
"""How many calls may wait for their results."""

_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""The header ``traceparent``, https://www.w3.org/TR/trace-context/"""
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
"""Settings of a request that its record has, where the request set them."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call whose result has not come back: its tool, and when its turn ended in unix milliseconds."""

    tool: str
    ended: int


class RequestRecords:
    """Makes the records of requests and of the tools that ran between them.

    Args:
        queue: takes the records.
    """

    def __init__(self, queue: RecordQueue) -> None:
        self._queue = queue
        self._calls: LruCache[tuple[str, str], _Call] = LruCache(entries=_CALLS)

    def add(self, trace: Trace, choices: Choices, step: Step, finished: Finished) -> None:
        """Record the end of an answer.

        Args:
            trace: the request's times and id.
            choices: the generations.
            step: the place of the request in its session.
            finished: how the answer ended.
        """
        now, received = _milliseconds(time.time()), _milliseconds(trace.received)
        generation = choices.first
        agent = _agent_context(choices, step)
        calls = list(_calls(generation.events))
        request: RequestRecord = {
            "request_id": trace.request_id,
            "model": step.model,
            "input_tokens": finished.usage.prompt_tokens,
            "output_tokens": finished.usage.completion_tokens,
            "cached_tokens": finished.usage.cached_tokens,
            "request_received_ms": received,
            "total_time_ms": now - received,
            **_speed(trace, finished, now - received),
            "finish_reason_metadata": {"finish_reason": finished.reason, "tool_calls": calls},
            "singletree": _own_fields(trace, choices, step, finished),
        }
        prompt = generation.prompt
        if all(each.prompt is prompt for each in choices.generations):
            request["replay"] = {
                "trace_block_size": BLOCK_TOKENS,
                "input_length": len(prompt.token_ids),
                # The tokens, of which the thread makes the hashes: a long prompt takes a millisecond.
                "input_sequence_hashes": comparable_tokens(prompt.token_ids, prompt.pictures),
            }
        record = {**_head("request_end", now), "agent_context": agent, "request": request}
        tools = [
            {**_head("tool_end", received, "harness"), "agent_context": agent, "tool": tool}
            for tool in self._tools(step.session, prompt.turns, received)
        ]
        for call in calls:
            self._calls.put((step.session, call["id"]), _Call(call["name"], now))
        run = generation.request.agent.trajectory_id
        self._queue.put(AnswerRecords([*tools, record], prompt.turns, prompt.tools, generation.events, run))

    def close(self) -> None:
        """Write what waits; nothing may be added after that."""
        self._queue.close()

    def _tools(self, session: str, turns: Sequence[Turn], received: int) -> Iterable[RequestRecord]:
        """Yield an object for each tool whose result came with the request, if the call was recorded."""
        for turn in reversed(turns):
            if turn.role == "assistant":
                return
            for part in turn.parts:
                if not isinstance(part, ToolResult):
                    continue
                call = self._calls.pop((session, part.call_id))
                if call is not None:
                    yield {
                        "tool_call_id": part.call_id,
                        "tool_class": call.tool,
                        "status": "failed" if part.is_error else "succeeded",
                        "started_at_unix_ms": call.ended,
                        "ended_at_unix_ms": received,
                        "duration_ms": received - call.ended,
                    }


def _head(kind: str, at: int, source: str = "singletree") -> RequestRecord:
    return {"schema": SCHEMA, "event_type": kind, "event_time_unix_ms": at, "event_source": source}


def _agent_context(choices: Choices, step: Step) -> Mapping[str, Any]:
    agent = choices.first.request.agent
    named = {
        "session_type_id": agent.session_type_id,
        "session_id": agent.session_id or step.session,
        "trajectory_id": agent.trajectory_id or f"{step.session}#{step.record_number}",
        "parent_session_id": agent.parent_session_id,
        "parent_trajectory_id": agent.parent_trajectory_id,
        "session_final": agent.session_final,
    }
    return {name: value for name, value in named.items() if value}


def _calls(events: Iterable[Any]) -> Iterable[RequestRecord]:
    """Yield the complete calls of a turn, without their arguments."""
    started: dict[int, ToolCallStart] = {}
    for event in events:
        if isinstance(event, ToolCallStart):
            started[event.index] = event
        elif isinstance(event, ToolCallEnd) and (call := started.get(event.index)) is not None:
            yield {"choice_index": 0, "tool_call_index": event.index, "id": call.id, "name": call.name}


def _speed(trace: Trace, finished: Finished, total: int) -> RequestRecord:
    if trace.first_seconds is None:
        return {}
    first = trace.first_seconds * 1000
    between = max(1, finished.usage.completion_tokens - 1)
    prompt = max(1, finished.usage.prompt_tokens)
    return {
        "ttft_ms": round(first, 3),
        "avg_itl_ms": round(max(0.0, total - first) / between, 3),
        "kv_hit_rate": round(finished.usage.cached_tokens / prompt, 4),
    }


def _own_fields(trace: Trace, choices: Choices, step: Step, finished: Finished) -> RequestRecord:
    """Return what Dynamo has no field for: what was asked for, how the prompt continues its session, who generated."""
    generation, request = choices.first, choices.first.request
    given = {name: getattr(request.sampling, name) for name in _SAMPLING}
    fields: RequestRecord = {
        "answer_id": choices.id,
        "requested_model": request.model,
        "stream": request.stream,
        "choices": len(choices.generations),
        "tools": len(request.conversation.tools),
        "sampling": {name: value for name, value in given.items() if value is not None},
        "is_subagent": request.agent.is_subagent,
        "session": step.session,
        "course": step.course,
        "matched_tokens": step.matched,
        "lost_tokens": step.lost,
        "break": None if step.broken is None else step.broken.cause.name,
        "reasoning_tokens": generation.usage.reasoning_tokens,
        "replayed_turns": generation.prompt.replayed,
        "rules": list(generation.prompt.rules),
    }
    if finished.reason == "error":
        fields["error"] = trace.error_name or "error"
    if _TRACE_PARENT.fullmatch(trace.traceparent):
        fields["traceparent"] = trace.traceparent
    if generation.route is not None:
        fields["worker"] = generation.route.worker
        fields["predicted_cached_tokens"] = generation.route.predicted_cached_tokens
        fields["failovers"] = generation.route.failovers
        fields["route_reason"] = generation.route.reason
        fields["waited_seconds"] = round(generation.route.waited_seconds, 3)
    hints = generation.request.hints
    if hints != _NO_HINTS:
        fields["hints"] = {k: v for k, v in asdict(hints).items() if v != getattr(_NO_HINTS, k)}
    return fields


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
