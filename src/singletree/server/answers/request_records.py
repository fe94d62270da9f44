"""Write one record for each request, without texts, as lines of JSON: for timelines, replay and load tests.

The records have the form of NVIDIA Dynamo's ``dynamo.request.trace.v1``
(https://docs.nvidia.com/dynamo/dev/observability/request-traces), so that its tools read them. What Dynamo has no field
for is in the object ``singletree``. The time that a tool took at the harness is the time from the end of the turn that
calls it to the arrival of the request that brings its result.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import msgspec

from singletree.conversation import Hints, ToolResult, Turn
from singletree.engines.engine import comparable_tokens
from singletree.errors import BadConfiguration
from singletree.events import Finished, ToolCallEnd, ToolCallStart
from singletree.lru import LruCache
from singletree.server.answers.choices import Choices
from singletree.server.answers.tracing import Trace
from singletree.server.sessions.sessions import Step

LOG = logging.getLogger(__name__)

SCHEMA = "dynamo.request.trace.v1"
BLOCK_TOKENS = 64
"""Tokens of a prompt for which a record has one hash."""

_FILES = 4
"""The limit of the size is that of so many files: the one that is written, and older ones."""
_WAITING = 1024
"""How many records may wait for the disk; more are dropped and counted."""
_CLOSING_SECONDS = 5.0
_CALLS = 16_384
"""How many calls may wait for their results."""

_Record = dict[str, Any]


class RecordFile:
    """A file of records, one JSON object on each line. A thread writes them, so that no request waits for the disk.

    When the file is full, it is renamed to ``PATH.1``, and so on; the oldest file is deleted.

    Args:
        path: the file; records are appended.
        limit: largest size of all files together, in bytes.

    Attributes:
        dropped: how many records were dropped because the disk was too slow.

    Raises:
        BadConfiguration: the file cannot be written.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.dropped = 0
        try:
            self._handler = RotatingFileHandler(
                path, maxBytes=max(1, limit // _FILES), backupCount=_FILES - 1, encoding="utf-8"
            )
        except OSError as error:
            raise BadConfiguration(
                f"--trace-path {path}: {error.strerror}; give a file that can be written"
            ) from None
        self._handler.handleError = _log_failure  # type: ignore[method-assign]
        self._waiting: queue.Queue[list[_Record] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._write, name="request records", daemon=True)
        self._thread.start()

    def put(self, records: list[_Record]) -> None:
        """Write ``records`` soon; drop them if too many wait."""
        try:
            self._waiting.put_nowait(records)
        except queue.Full:
            if not self.dropped:
                LOG.warning("the disk is too slow for --trace-path: request records are dropped")
            self.dropped += len(records)

    def close(self) -> None:
        """Write what waits, and close the file."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSING_SECONDS)
        self._thread.join(_CLOSING_SECONDS)
        self._handler.close()

    def _write(self) -> None:
        while (records := self._waiting.get()) is not None:
            for record in records:
                replay = record.get("request", {}).get("replay")
                if replay is not None:
                    replay["input_sequence_hashes"] = sequence_hashes(replay["input_sequence_hashes"])
                line = msgspec.json.encode(record).decode()
                self._handler.handle(logging.makeLogRecord({"msg": line}))


def _log_failure(record: logging.LogRecord) -> None:
    LOG.warning("a request record could not be written", exc_info=True)


def sequence_hashes(tokens: array[int], block: int = BLOCK_TOKENS) -> list[int]:
    """Return a hash for each block of ``tokens``; it covers all tokens up to the end of its block."""
    data, width, digest = memoryview(tokens).cast("B"), tokens.itemsize * block, b""
    hashes = []
    for start in range(0, len(data), width):
        digest = blake2b(digest + data[start : start + width], digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return hashes


@dataclass(frozen=True, slots=True)
class _Call:
    """A call whose result has not come back: its tool, and when its turn ended in unix milliseconds."""

    tool: str
    ended: int


class RequestRecords:
    """Makes the records of requests and of the tools that ran between them.

    Args:
        file: takes the records.
    """

    def __init__(self, file: RecordFile) -> None:
        self._file = file
        self._calls: LruCache[tuple[str, str], _Call] = LruCache(entries=_CALLS)

    @property
    def dropped(self) -> int:
        """How many records were dropped because the disk was too slow."""
        return self._file.dropped

    def add(self, trace: Trace, choices: Choices, step: Step, finished: Finished) -> None:
        """_Record the end of an answer.

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
        request: _Record = {
            "request_id": trace.request_id,
            "model": step.model,
            "input_tokens": finished.usage.prompt_tokens,
            "output_tokens": finished.usage.completion_tokens,
            "cached_tokens": finished.usage.cached_tokens,
            "request_received_ms": received,
            "total_time_ms": now - received,
            **_speed(trace, finished, now - received),
            "finish_reason_metadata": {"finish_reason": finished.reason, "tool_calls": calls},
            "singletree": _own_fields(choices, step),
        }
        prompt = generation.prompt
        if len(choices.generations) == 1:
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
        self._file.put([*tools, record])

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._file.close()

    def _tools(self, session: str, turns: Sequence[Turn], received: int) -> Iterable[_Record]:
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


def _head(kind: str, at: int, source: str = "singletree") -> _Record:
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


def _calls(events: Iterable[Any]) -> Iterable[_Record]:
    """Yield the complete calls of a turn, without their arguments."""
    started: dict[int, ToolCallStart] = {}
    for event in events:
        if isinstance(event, ToolCallStart):
            started[event.index] = event
        elif isinstance(event, ToolCallEnd) and (call := started.get(event.index)) is not None:
            yield {"choice_index": 0, "tool_call_index": event.index, "id": call.id, "name": call.name}


def _speed(trace: Trace, finished: Finished, total: int) -> _Record:
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


def _own_fields(choices: Choices, step: Step) -> _Record:
    """Return what singletree knows besides: how the prompt continues its session, and who generated."""
    generation = choices.first
    fields: _Record = {
        "session": step.session,
        "course": step.course,
        "matched_tokens": step.matched,
        "lost_tokens": step.lost,
        "break": None if step.broken is None else step.broken.cause.name,
        "reasoning_tokens": generation.usage.reasoning_tokens,
        "replayed_turns": generation.prompt.replayed,
        "rules": list(generation.prompt.rules),
    }
    if generation.route is not None:
        fields["worker"] = generation.route.worker
        fields["predicted_cached_tokens"] = generation.route.predicted_cached_tokens
        fields["failovers"] = generation.route.failovers
        fields["route_reason"] = generation.route.reason
        fields["waited_seconds"] = round(generation.route.waited_seconds, 3)
    hints = generation.request.hints
    if given := {name: value for name, value in asdict(hints).items() if value != getattr(Hints(), name)}:
        fields["hints"] = given
    return fields


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
