"""Read the records of requests that ``--trace-path`` writes, or NVIDIA Dynamo's in the same form."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from singletree.errors import BadConfiguration
from singletree.records.request_records import SCHEMA


class Replay(msgspec.Struct, frozen=True):
    """The shape of a prompt: a hash for each of its blocks, which covers all tokens up to the end of the block."""

    trace_block_size: int
    input_length: int
    input_sequence_hashes: list[int]


class OwnFields(msgspec.Struct, frozen=True):
    """Of what singletree records beside Dynamo's fields (``records.request_records``), that which a replay needs."""

    choices: int = 1
    is_subagent: bool = False


class RequestEnd(msgspec.Struct, frozen=True):
    """One request. Times are in milliseconds, ``request_received_ms`` since 1970."""

    request_id: str
    request_received_ms: int
    input_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    total_time_ms: float | None = None
    replay: Replay | None = None
    singletree: OwnFields = OwnFields()


class ToolEnd(msgspec.Struct, frozen=True):
    """One tool that ran at the harness. Times are in milliseconds since 1970."""

    started_at_unix_ms: int = 0
    ended_at_unix_ms: int = 0


class Agent(msgspec.Struct, frozen=True):
    """Whose request it is."""

    session_id: str = ""
    trajectory_id: str = ""
    parent_session_id: str = ""


class _Line(msgspec.Struct, frozen=True):
    schema: str
    event_type: str
    event_time_unix_ms: int = 0
    agent_context: Agent = Agent()
    request: RequestEnd | None = None
    tool: ToolEnd | None = None


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One record: of a request, or of a tool.

    Attributes:
        agent: whose it is.
        started, ended: unix times in milliseconds.
        request, tool: what it records; one of them is set.
    """

    agent: Agent
    started: float
    ended: float
    request: RequestEnd | None = None
    tool: ToolEnd | None = None

    @property
    def lane(self) -> str:
        """Return the name of the conversation in which it happened."""
        return self.agent.trajectory_id or self.agent.session_id


def read_records(paths: Iterable[Path]) -> list[TraceRecord]:
    """Return the records of all files, by their start. Files whose names end in ``.gz`` are decompressed.

    Raises:
        BadConfiguration: a file cannot be read, or has no record.
    """
    records = sorted((each for path in paths for each in _read(path)), key=lambda record: record.started)
    if not records:
        raise BadConfiguration("the files have no records; `singletree serve --trace-path FILE` writes them")
    return records


def _read(path: Path) -> Iterator[TraceRecord]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield from _record(path, number, line)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadConfiguration(f"{path}: {reason}; give a file that --trace-path wrote") from None


def _record(path: Path, number: int, text: str) -> Iterator[TraceRecord]:
    try:
        value: Any = json.loads(text)
        # Dynamo's sinks may wrap a record.
        line = msgspec.convert(value.get("event", value), _Line)
    except (ValueError, AttributeError, RecursionError) as error:
        raise BadConfiguration(f"{path}, line {number}: no record of a request: {error}") from None
    if line.schema != SCHEMA:
        raise BadConfiguration(f"{path}, line {number}: the schema is {line.schema!r}; {SCHEMA} is supported")
    if line.request is not None:
        start = line.request.request_received_ms
        took = line.request.total_time_ms
        end = line.event_time_unix_ms if took is None else start + took
        yield TraceRecord(line.agent_context, start, max(start, end), request=line.request)
    elif line.tool is not None and line.event_type in ("tool_end", "tool_error"):
        tool = line.tool
        yield TraceRecord(line.agent_context, tool.started_at_unix_ms, tool.ended_at_unix_ms, tool=tool)
