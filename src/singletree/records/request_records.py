"""Write one record for each request, without texts, as lines of JSON: for replay and load tests.

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

from singletree.conversation import AgentContext, Hints, ToolResult, Turn
from singletree.errors import BadConfiguration
from singletree.events import ToolCallEnd, ToolCallStart, Usage
from singletree.lru import LruCache
from singletree.owners import owned_id
from singletree.pictures import comparable_tokens
from singletree.records.record_queue import (
    BLOCK_TOKENS,
    AnswerRecords,
    RecordFile,
    RecordQueue,
    RecordSink,
    RequestRecord,
)
from singletree.server.answers.observer import AnswerRecord
from singletree.server.sessions.step import Step
from singletree.server.settings.config import Config

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
    """Makes the records of requests and of the tools that ran between them, for ``queue``."""

    def __init__(self, queue: RecordQueue) -> None:
        self._queue = queue
        self._calls: LruCache[tuple[str, str], _Call] = LruCache(entries=_CALLS)

    def add(self, answer: AnswerRecord) -> None:
        step, usage = answer.step, answer.finished.usage
        now, received = _milliseconds(time.time()), _milliseconds(answer.trace.received)
        generation = answer.generations[0]
        agent = _agent_context(generation.request.agent, step)
        calls = list(_calls(generation.events))
        request: RequestRecord = {
            "request_id": answer.trace.request_id,
            "model": step.model,
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "request_received_ms": received,
            "total_time_ms": now - received,
            **_speed(answer.trace.first_seconds, usage, now - received),
            "finish_reason_metadata": {"finish_reason": answer.finished.reason, "tool_calls": calls},
            "singletree": _own_fields(answer),
        }
        prompt = generation.prompt
        if all(each.prompt is prompt for each in answer.generations):
            request["replay"] = {
                "trace_block_size": BLOCK_TOKENS,
                "input_length": len(prompt.token_ids),
                # The tokens, of which the thread makes the hashes: a long prompt takes a millisecond.
                "input_sequence_hashes": comparable_tokens(prompt.token_ids, prompt.pictures),
            }
        record = {**_head("request_end", now), "agent_context": agent, "request": request}
        tools = [
            {**_head("tool_end", received, "harness"), "agent_context": agent, "tool": tool}
            for tool in self._tools(step.place, prompt.turns, received)
        ]
        for call in calls:
            self._calls.put((step.place, call["id"]), _Call(call["name"], now))
        run = generation.request.agent.trajectory_id
        self._queue.put(AnswerRecords([*tools, record], prompt.turns, prompt.tools, generation.events, run))

    def close(self) -> None:
        self._queue.close()

    def _tools(self, session: str, turns: Sequence[Turn], received: int) -> Iterable[RequestRecord]:
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


def _agent_context(agent: AgentContext, step: Step) -> Mapping[str, Any]:
    ids = {
        "session_id": agent.session_id or step.session,
        "trajectory_id": agent.trajectory_id or f"{step.session}#{step.record_number}",
        "parent_session_id": agent.parent_session_id,
        "parent_trajectory_id": agent.parent_trajectory_id,
    }
    # Two owners may give their sessions the same name.
    owned = {name: owned_id(step.owner, id) for name, id in ids.items() if id}
    rest = {"session_type_id": agent.session_type_id, "session_final": agent.session_final}
    return {**owned, **{name: value for name, value in rest.items() if value}}


def _calls(events: Iterable[Any]) -> Iterable[RequestRecord]:
    started: dict[int, ToolCallStart] = {}
    for event in events:
        if isinstance(event, ToolCallStart):
            started[event.index] = event
        elif isinstance(event, ToolCallEnd) and (call := started.get(event.index)) is not None:
            yield {"choice_index": 0, "tool_call_index": event.index, "id": call.id, "name": call.name}


def _speed(first_seconds: float | None, usage: Usage, total_ms: int) -> RequestRecord:
    if first_seconds is None:
        return {}
    first = first_seconds * 1000
    return {
        "ttft_ms": round(first, 3),
        "avg_itl_ms": round(max(0.0, total_ms - first) / max(1, usage.completion_tokens - 1), 3),
        "kv_hit_rate": round(usage.cached_tokens / max(1, usage.prompt_tokens), 4),
    }


def _own_fields(answer: AnswerRecord) -> RequestRecord:
    """Return what Dynamo has no field for: what was asked for, how the prompt continues its session, who generated."""
    generation, step, trace = answer.generations[0], answer.step, answer.trace
    request, route = generation.request, generation.route
    given = {name: getattr(request.sampling, name) for name in _SAMPLING}
    fields: RequestRecord = {
        "answer_id": answer.id,
        "requested_model": request.model,
        "stream": request.stream,
        "choices": len(answer.generations),
        "tools": len(request.conversation.tools),
        "sampling": {name: value for name, value in given.items() if value is not None},
        "is_subagent": request.agent.is_subagent,
        "session": step.place,
        "course": step.course,
        "matched_tokens": step.matched,
        "lost_tokens": step.lost,
        "break": None if step.broken is None else step.broken.cause,
        "reasoning_tokens": generation.usage.reasoning_tokens,
        "replayed_turns": generation.prompt.replayed,
        "rules": list(generation.prompt.rules),
        "receipt": step.encode_receipt(),
    }
    if answer.finished.reason == "error":
        fields["error"] = trace.error_name or "error"
    if _TRACE_PARENT.fullmatch(trace.traceparent):
        fields["traceparent"] = trace.traceparent
    if route is not None:
        fields["worker"] = route.worker
        fields["predicted_cached_tokens"] = route.predicted_cached_tokens
        fields["failovers"] = route.failovers
        fields["route_reason"] = route.reason
        fields["waited_seconds"] = round(route.waited_seconds, 3)
    if request.hints != _NO_HINTS:
        given_hints = asdict(request.hints)
        fields["hints"] = {k: v for k, v in given_hints.items() if v != getattr(_NO_HINTS, k)}
    return fields


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def open_records(config: Config) -> RequestRecords:
    """Return what takes the records of requests: the file of ``--trace-path``, and the export of ``--otel``.

    Raises BadConfiguration where the file cannot be written, or OpenTelemetry is not installed.
    """
    sinks: list[RecordSink] = []
    if config.trace_path is not None:
        sinks.append(RecordFile(config.trace_path, config.trace_limit))
    if config.otel:
        try:
            from singletree.records import span_export
        except ImportError:
            raise BadConfiguration(
                "--otel: OpenTelemetry is not installed; pip install 'singletree[otel]'"
            ) from None
        sinks.append(
            span_export.SpanExport(span_export.find_exporter(), content=span_export.exports_content())
        )
    return RequestRecords(RecordQueue(*sinks))
