"""Convert records of requests to a timeline for https://ui.perfetto.dev, in Chrome's JSON format.

A session is a process, a conversation of it is a thread. Tools are asynchronous slices, because they run side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from singletree.cli.trace_records import RequestEnd, ToolEnd, TraceRecord

TimelineEvent = dict[str, Any]


def timeline(records: Iterable[TraceRecord]) -> dict[str, Any]:
    """Return the timeline of ``records`` as a JSON value. Its times are in microseconds since 1970."""
    processes: dict[str, int] = {}
    threads: dict[tuple[int, str], int] = {}
    events: list[TimelineEvent] = []
    for record in records:
        session = record.agent.session_id or "no session"
        process = processes.get(session)
        if process is None:
            process = processes[session] = len(processes) + 1
            parent = record.agent.parent_session_id
            events.append(
                _name("process_name", process, 0, f"{session} (of {parent})" if parent else session)
            )
        thread = threads.get((process, record.lane))
        if thread is None:
            thread = threads[process, record.lane] = len(threads) + 1
            events.append(_name("thread_name", process, thread, record.lane or "requests"))
        if record.request is not None:
            events += _request(record, record.request, process, thread)
        elif record.tool is not None:
            events += _tool(record, record.tool, process, thread)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _name(kind: str, process: int, thread: int, name: str) -> TimelineEvent:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _request(record: TraceRecord, request: RequestEnd, process: int, thread: int) -> Iterator[TimelineEvent]:
    place = {"pid": process, "tid": thread}
    start, end = record.started * 1000, record.ended * 1000
    read, cached = request.input_tokens or 0, request.cached_tokens or 0
    own = request.singletree
    facts = {
        "request": request.request_id,
        "model": request.model,
        "prompt_tokens": read,
        "cached_tokens": cached,
        "output_tokens": request.output_tokens,
        "course": own.course,
        "break": own.broken,
        "lost_tokens": own.lost_tokens,
        "worker": own.worker,
    }
    name = f"turn: {read - cached} of {read} tokens read, {request.output_tokens} generated"
    if own.broken:
        name += f", broken: {own.broken}"
    yield {"ph": "X", "cat": "request", "name": name, "ts": start, "dur": end - start, "args": facts, **place}
    if request.ttft_ms is not None:
        first = min(end, start + request.ttft_ms * 1000)
        for part, since, until in (("prefill", start, first), ("decode", first, end)):
            yield {"ph": "X", "cat": part, "name": part, "ts": since, "dur": until - since, **place}
    counts = {"cached": cached, "new": max(0, read - cached - own.lost_tokens), "lost": own.lost_tokens}
    yield {"ph": "C", "name": "prompt tokens", "ts": start, "pid": process, "args": counts}


def _tool(record: TraceRecord, tool: ToolEnd, process: int, thread: int) -> Iterator[TimelineEvent]:
    same = {
        "cat": "tool",
        "name": tool.tool_class or "tool",
        "id": tool.tool_call_id,
        "pid": process,
        "tid": thread,
    }
    yield {"ph": "b", "ts": record.started * 1000, "args": {"status": tool.status}, **same}
    yield {"ph": "e", "ts": record.ended * 1000, **same}
