"""Records of requests: their fields, the tools between two requests, the file that stays within its limit."""

from __future__ import annotations

import json
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from singletree.errors import BadConfiguration
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.records.record_queue import (
    BLOCK_TOKENS,
    AnswerRecords,
    RecordFile,
    RecordQueue,
    sequence_hashes,
)
from singletree.records.request_records import RequestRecords
from singletree.server.telemetry import DROPPED_RECORDS

from .carrying import ONE, Client
from .serving import MODEL, TEMPLATE, TOKENIZER, serving

LAYOUT = TEMPLATE.layout(TOKENIZER)


async def recorded(path: Path, api: str, *, stream: bool) -> list[dict[str, Any]]:
    """The records of a turn with a call, and of the turn after its result."""
    records = RequestRecords(RecordQueue(RecordFile(path, 2**20)))
    async with serving({"a": ONE, "b": "Sunny."}, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        served.service.records = records
        client = Client(api, "[[script:a]] How is it?", stream=stream)
        for _ in range(2):
            client.take(await client.ask(served))
    records.close()
    return lines(path)


def lines(path: Path) -> list[dict[str, Any]]:
    """The records in the file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["/v1/messages", "/v1/responses"])
async def test_a_record_has_the_shape_of_the_turn_and_no_text(tmp_path: Path, api: str, stream: bool) -> None:
    path = tmp_path / "trace.jsonl"
    first, tool, second = await recorded(path, api, stream=stream)
    for record in (first, second):
        request = record["request"]
        assert record["schema"] == "dynamo.request.trace.v1"
        assert record["event_type"] == "request_end"
        assert record["event_time_unix_ms"] == request["request_received_ms"] + request["total_time_ms"]
        assert request["input_tokens"] == request["replay"]["input_length"]
        blocks = -(-request["input_tokens"] // BLOCK_TOKENS)
        assert len(request["replay"]["input_sequence_hashes"]) == blocks
        assert 0 <= request["ttft_ms"] <= request["total_time_ms"] + 1
    assert first["request"]["singletree"]["course"] == "first"
    assert second["request"]["singletree"]["course"] == "appended"
    (call,) = first["request"]["finish_reason_metadata"]["tool_calls"]
    assert call["name"] == "get_weather"
    assert (tool["event_type"], tool["tool"]["status"]) == ("tool_end", "succeeded")
    assert (tool["tool"]["tool_call_id"], tool["tool"]["tool_class"]) == (call["id"], "get_weather")
    assert tool["tool"]["started_at_unix_ms"] == first["event_time_unix_ms"]
    assert tool["tool"]["ended_at_unix_ms"] == second["request"]["request_received_ms"]
    assert first["agent_context"] == second["agent_context"] == tool["agent_context"]
    whole = first["request"]["input_tokens"] // BLOCK_TOKENS
    hashes = [record["request"]["replay"]["input_sequence_hashes"][:whole] for record in (first, second)]
    assert hashes[0] == hashes[1], "the second prompt begins with the first"
    for text in ("How is it", "weather.", "celsius", "Sunny"):
        assert text not in json.dumps([first, tool, second])


async def test_the_session_of_the_harness_and_its_parent_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    records = RequestRecords(RecordQueue(RecordFile(path, 2**20)))
    async with serving({"a": "yes"}) as served:
        served.service.records = records
        headers = {"x-claude-code-session-id": "u1", "x-dynamo-parent-session-id": "u0"}
        body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "[[script:a]]"}]}
        assert (await served.client.post("/v1/messages", body, headers)).status == 200
    records.close()
    (record,) = lines(path)
    assert record["agent_context"]["session_id"] == "u1"
    assert record["agent_context"]["parent_session_id"] == "u0"


def test_each_hash_covers_all_tokens_before_it() -> None:
    tokens = array("I", range(200))
    hashes = sequence_hashes(tokens)
    assert len(hashes) == 4
    assert sequence_hashes(tokens[:128]) == hashes[:2]
    tokens[0] = 7
    assert not set(sequence_hashes(tokens)) & set(hashes)


def test_the_files_stay_within_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    file = RecordFile(path, 4000)
    for number in range(500):
        file.write(AnswerRecords([{"number": number, "filler": "x" * 50}]))
    file.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4
    assert sum(each.stat().st_size for each in files) <= 4000
    assert lines(path)[-1]["number"] == 499


class Sink:
    """Takes records when it is let."""

    def __init__(self) -> None:
        self.may_write, self.taken, self.closed = threading.Event(), 0, False

    def write(self, answer: AnswerRecords) -> None:
        self.may_write.wait(30)
        self.taken += 1
        if self.taken == 1:
            raise ValueError("a record that this sink cannot take")

    def close(self) -> None:
        self.closed = True


def test_a_slow_sink_loses_records_and_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    slow, dropped = Sink(), DROPPED_RECORDS._value.get()
    queue = RecordQueue(slow)
    began = time.perf_counter()
    for _ in range(2000):
        queue.put(AnswerRecords([{}]))
    assert time.perf_counter() - began < 5
    slow.may_write.set()
    queue.close()
    assert slow.closed
    lost = DROPPED_RECORDS._value.get() - dropped
    assert slow.taken + lost == 2000
    assert lost >= 900
    assert len(caplog.records) == 2, "one line for all that was dropped, one for the record that failed"


@pytest.mark.parametrize(
    ("headers", "session", "run"),
    [
        ({"x-claude-code-session-id": "s"}, "s", "s#1"),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, "s", "a"),
        ({"session-id": "s", "thread-id": "s"}, "s", "s#1"),
        ({"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "s"}, "s", "t"),
        ({"session_id": "s"}, "s", "s#1"),
        ({"x-session-id": "s", "x-session-affinity": "s"}, "s", "s#1"),
        ({"x-session-id": "s", "x-parent-session-id": "p"}, "s", "s#1"),
        ({"x-grok-session-id": "s", "x-grok-conv-id": "c"}, "s", "c"),
        ({"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p"}, "s", "s#1"),
    ],
)
async def test_session_and_parent_come_from_the_headers_of_each_harness(
    tmp_path: Path, headers: dict[str, str], session: str, run: str
) -> None:
    path = tmp_path / "trace.jsonl"
    records = RequestRecords(RecordQueue(RecordFile(path, 2**20)))
    async with serving({"a": "yes"}) as served:
        served.service.records = records
        body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "[[script:a]]"}]}
        assert (await served.client.post("/v1/messages", body, headers)).status == 200
    records.close()
    (record,) = lines(path)
    agent = record["agent_context"]
    assert agent["session_id"] == session
    assert agent["trajectory_id"].endswith(run)
    parents = [value for name, value in headers.items() if "parent" in name]
    assert [value for name, value in agent.items() if name.startswith("parent")] == parents
    subagent = bool(parents) or "x-claude-code-agent-id" in headers
    assert record["request"]["singletree"]["is_subagent"] is subagent


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="--trace-path"):
        RecordFile(tmp_path / "no" / "folder", 1000)
