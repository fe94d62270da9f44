"""What a harness says for whoever places and orders a request: by ``nvext``, by header, down to engine and trace."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from singletree.conversation import AgentContext, Hints
from singletree.protocols import chat
from singletree.protocols.openai import nvext
from singletree.raw_tokens import completions

from .serving import body, serving

PATHS = ("/v1/messages", "/v1/chat/completions", "/v1/responses")
every_path = pytest.mark.parametrize("path", PATHS)
HINTS = {
    "latency_sensitivity": 0.5,
    "priority": 5,
    "strict_priority": 1,
    "osl": 1024,
    "speculative_prefill": True,
}
CONTEXT = {
    "session_type_id": "coding",
    "session_id": "run 1",
    "trajectory_id": "t",
    "parent_session_id": "p",
    "parent_trajectory_id": "q",
    "session_final": True,
}
HEADERS = {
    "x-dynamo-request-priority": "5",
    "x-dynamo-request-strict-priority": "1",
    "x-singletree-latency-sensitivity": "0.5",
    "x-singletree-osl": "1024",
    "x-singletree-speculative-prefill": "true",
    "x-dynamo-session-id": "run 1",
    "x-dynamo-parent-session-id": "p",
    "x-dynamo-session-final": "1",
    "x-claude-code-agent-id": "t",
    "x-claude-code-parent-agent-id": "q",
}
MODEL_OUTPUT = (
    " priority=5 strict_priority=1 latency_sensitivity=0.5 expected_tokens=1024 speculative_prefill=True"
    "{kind} session_id=run_1 trajectory_id=t parent_session_id=p parent_trajectory_id=q session_final=True"
    " is_subagent=True"
)
RANK = -(1 << 32) - 5


def test_a_body_is_read_whole() -> None:
    fields = {"nvext": {"agent_hints": HINTS, "agent_context": CONTEXT, "annotations": ["x"]}}
    for request in (
        chat.decode(
            json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields).encode()
        ),
        completions.decode(json.dumps({"model": "m", "prompt": "x"} | fields).encode()),
    ):
        assert request.hints == Hints(5, 1, 0.5, 1024, True)
        assert request.agent == AgentContext("coding", "run 1", "t", "p", "q", True)
        assert request.session == "run 1/t"


async def test_a_body_reaches_the_engine_and_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "singletree.requests")
    asked = body("/v1/chat/completions", "x", nvext={"agent_hints": HINTS, "agent_context": CONTEXT})
    async with serving() as served:
        assert (await served.client.post("/v1/chat/completions", asked)).status == 200
        assert served.engine.log[0].priority == RANK
        raw = {"model": "alias", "prompt": "x", "nvext": asked["nvext"]}
        assert (await served.client.post("/v1/completions", raw)).status == 200
        assert served.engine.log[1].priority == RANK
    lines = [record.getMessage() for record in caplog.records]
    assert all(line.endswith(MODEL_OUTPUT.format(kind=" session_type_id=coding")) for line in lines), lines


@every_path
async def test_headers_do_on_every_api(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "singletree.requests")
    async with serving() as served:
        assert (await served.client.post(path, body(path, "x"), HEADERS)).status == 200
        assert (await served.client.post(path, body(path, "x"))).status == 200
        assert [played.priority for played in served.engine.log] == [RANK, 0]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith(MODEL_OUTPUT.format(kind=""))
    assert "priority" not in second, "what is not said is not told"


async def test_a_header_wins_over_the_body() -> None:
    asked = body("/v1/chat/completions", "x", nvext={"agent_hints": {"priority": 5, "strict_priority": 1}})
    async with serving() as served:
        await served.client.post("/v1/chat/completions", asked, {"x-dynamo-request-priority": "-7"})
        assert served.engine.log[0].priority == 7 - (1 << 32)


def packed(hint: Any) -> str:
    """The header of Hermes' plugin agent-hint."""
    return base64.urlsafe_b64encode(json.dumps(hint).encode()).decode().rstrip("=")


@every_path
async def test_the_one_header_of_hermes_is_read(path: str) -> None:
    hint = {"session": "run 1", "call_index": 3, "lifecycle": "final", "priority": 5, "pin": True}
    async with serving() as served:
        await served.client.post(path, body(path, "x"), {"x-agent-hint": packed(hint)})
        assert served.engine.log[0].priority == -5
        assert served.service.sessions.get("run 1") is not None
        named = {"x-agent-hint": packed(hint), "x-dynamo-request-priority": "7", "x-session-id": "mine"}
        await served.client.post(path, body(path, "x"), named)
        assert served.engine.log[1].priority == -7, "a header of its own wins"


def test_the_header_of_hermes_is_read_as_far_as_it_is_known() -> None:
    read = nvext.with_agent_hint({"x-agent-hint": packed({"priority": "high", "session": "s", "pin": False})})
    assert {name: value for name, value in read.items() if name != "x-agent-hint"} == {
        "x-dynamo-session-id": "s",
        "x-singletree-keep": "False",
    }
    deep = base64.urlsafe_b64encode(b'{"a":' + b"[" * 20_000).decode()
    for unread in ("%%%", "\u00e9", packed([1]), packed("x"), "e30x", "", deep):
        assert nvext.with_agent_hint({"x-agent-hint": unread}) == {"x-agent-hint": unread}


@every_path
@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-dynamo-request-priority", "high"),
        ("x-dynamo-request-priority", "9" * 4000),
        ("x-dynamo-request-strict-priority", "-1"),
        ("x-singletree-latency-sensitivity", "nan"),
        ("x-singletree-osl", "1.5"),
        ("x-singletree-speculative-prefill", "maybe"),
        ("x-dynamo-session-id", "s" * 300),
    ],
)
async def test_a_header_that_means_nothing_is_refused(path: str, header: str, value: str) -> None:  # C44
    async with serving() as served:
        reply = await served.client.post(path, body(path, "x"), {header: value})
        assert not served.engine.log
    assert reply.status == 400
    assert f"{header} is " in reply.json["error"]["message"]
    assert len(reply.json["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"agent_hints": {"osl": -1}}, "nvext.agent_hints.osl"),
        ({"agent_hints": {"latency_sensitivity": -1}}, "nvext.agent_hints.latency_sensitivity"),
        ({"agent_hints": {"speculative_prefill": "yes"}}, "nvext.agent_hints.speculative_prefill"),
        ({"agent_hints": []}, "nvext.agent_hints"),
        ({"agent_context": {"session_id": "s" * 300}}, "nvext.agent_context.session_id"),
    ],
)
async def test_a_body_that_means_nothing_is_refused(fields: dict[str, Any], param: str) -> None:  # C44
    async with serving() as served:
        reply = await served.client.post(
            "/v1/chat/completions", body("/v1/chat/completions", "x", nvext=fields)
        )
    assert (reply.status, reply.json["error"]["param"]) == (400, param)


def test_ranks_are_in_the_order_of_tiers_then_priorities() -> None:
    ordered = [Hints(0, 2), Hints(9, 1), Hints(-9, 1), Hints(2**31 - 1), Hints(1), Hints(), Hints(-1)]
    assert sorted(ordered, key=lambda hints: hints.rank) == ordered
    assert Hints(-(2**31), 2**30).rank > -(2**63), "vLLM takes 64 bits"
