"""Budgets of sessions, sub-agents and keys: warned, then refused in the words of each protocol; and the loop guard."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from singletree.budgets import Budget, Limit, read_budget, repetitions, rounds_of
from singletree.conversation import Text, ToolCall, ToolResult, Turn
from singletree.errors import BadConfiguration
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.sessions.step import Cost
from singletree.server.settings.config import Config

from .agent_traffic import CALL, LAYOUT, Agent
from .memory import Client, Reply
from .owning import tenants
from .serving import MODEL, body, serving

MESSAGES, CHAT, RESPONSES = PATHS = "/v1/messages", "/v1/chat/completions", "/v1/responses"
SCRIPTS = {"t": "Yes.", "call": CALL}
QUESTION = "[[script:t]]"
HEADER = "x-singletree-budget"


async def ask(of: Client, path: str = MESSAGES, session: str = "s", **headers: str) -> Reply:
    """A turn of a session."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await of.post(path, body(path, QUESTION), {"x-session-id": session, **named})


def words(answer: Reply) -> str:
    """The message of an error."""
    return str(answer.json["error"]["message"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_the_request_behind_the_last_token_is_refused(path: str, stream: bool) -> None:
    async with serving(SCRIPTS, config=Config(session_budget="generated=4")) as served:
        asked, headers = body(path, QUESTION, stream=stream), {"x-session-id": "s"}
        first = await served.client.post(path, asked, headers)
        second = await served.client.post(path, asked, headers)
        other = await served.client.post(path, asked, {"x-session-id": "another"})
        assert len(served.engine.log) == 2, "the engine is not asked"
    assert (first.status, other.status) == (200, 200)
    error = second.json["error"]
    if path == MESSAGES:
        assert (second.status, error["type"]) == (402, "billing_error")
    else:
        assert (second.status, error["code"]) == (400, "insufficient_quota")
    assert error["message"] == (
        "the budget of this session is used up: generated 5 of 4 tokens; start a new session, or raise --session-budget"
    )


async def test_it_is_warned_from_four_fifths_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "singletree.budgets")
    async with serving(SCRIPTS, config=Config(session_budget="generated=10")) as served:
        answers = [await ask(served.client) for _ in range(2)]
        answers += [await ask(served.client, x_singletree_budget="generated=12")]
        async with serving(SCRIPTS, config=Config(session_budget="generated=12")) as warned:
            answers += [await ask(warned.client) for _ in range(3)]
    warnings = [answer.headers.get("x-singletree-warning") for answer in answers]
    assert warnings[:2] == [None, None]
    assert answers[2].status == 402, "a header cannot raise a budget"
    assert warnings[3:5] == [None, None]
    assert warnings[5] == "the budget of this session is nearly used up: generated 10 of 12 tokens"
    assert [each.message for each in caplog.records] == [
        "session 's': generated 10 of 10 tokens; refused",
        "session 's': generated 10 of 12 tokens",
    ]


@pytest.mark.parametrize("path", PATHS)
async def test_the_receipt_of_a_stream_has_the_warning(path: str) -> None:
    async with serving(SCRIPTS, config=Config(session_budget="generated=6")) as served:
        await ask(served.client, path)
        more = {"stream_options": {"include_usage": True}} if path == CHAT else {}
        asked = json.dumps(body(path, QUESTION, stream=True, **more)).encode()
        headers = {"x-session-id": "s", "x-singletree-receipt": "1"}
        # Not through the grammar of the official SDKs, which knows no such field.
        async with served.client.open("POST", path, asked, headers) as (exchange, _):
            data = await exchange.rest()
    assert b'"warnings":["the budget of this session is nearly used up: generated 5 of 6 tokens"]' in data


async def test_a_header_sets_and_lowers_a_budget() -> None:
    async with serving(SCRIPTS) as served:
        assert (await ask(served.client, x_singletree_budget="generated=5")).status == 200
        refused = await ask(served.client, x_singletree_budget="generated=5, prefill=1M")
        assert refused.status == 402
        assert words(refused).endswith("raise x-singletree-budget")
        assert (await ask(served.client)).status == 200, "it holds for the requests that have it"
        wrong = await ask(served.client, x_singletree_budget="euros=5")
    assert wrong.status == 400
    assert words(wrong) == (
        "x-singletree-budget: 'euros=5' is not a limit; give some of prefill=N, generated=N, seconds=N, loops=N, "
        "separated by commas; a number may end in k, M or G"
    )


async def test_a_sub_agent_has_a_budget_within_that_of_its_session() -> None:
    config = Config(session_budget="generated=18", subagent_budget="generated=6")
    async with serving({"sub": "Found."}, config=config) as served:
        main = Agent(served, "[[script:sub]] Go.", {"x-claude-code-session-id": "s"}, tools=False)
        statuses: list[tuple[str, int]] = []
        for agent in ("a1", "a1", "a2", "", "a2", ""):
            headers = main.headers | ({"x-claude-code-agent-id": agent} if agent else {})
            answer = await served.client.post(MESSAGES, body(MESSAGES, "[[script:sub]]"), headers)
            statuses.append((agent, answer.status))
            if agent == "a1" and answer.status != 200:
                assert words(answer).startswith(
                    "the budget of this sub-agent is used up: generated 7 of 6 tokens"
                )
    assert statuses == [("a1", 200), ("a1", 402), ("a2", 200), ("", 200), ("a2", 402), ("", 402)]


async def test_each_key_has_a_budget() -> None:
    async with tenants(SCRIPTS, {"key_budget": "generated=9"}) as them:
        statuses = [(await ask(them.a, session=f"s{number}")).status for number in range(3)]
        of_b = (await ask(them.b)).status
        refused = await ask(them.a, session="new")
    assert statuses == [200, 200, 402]
    assert of_b == 200
    assert words(refused).endswith("; use another key, or raise --key-budget")


async def test_what_the_engine_read_and_its_seconds_count() -> None:
    async with serving(SCRIPTS, config=Config(session_budget="prefill=1k, seconds=0.000001")) as served:
        assert (await ask(served.client)).status == 200
        assert "seconds 0 of 0 s" in words(await ask(served.client))
        costs = served.service.sessions.costs.agents("s")[""]
    assert 0 < costs.prefilled < 1000


async def call_again(agent: Agent, result: str) -> int:
    """The agent's turn, a call, and its result; the status."""
    asked = {
        "model": MODEL,
        "max_tokens": 999,
        "messages": agent.messages,
        "tools": agent.tools,
    }
    answer = await agent.served.client.post(MESSAGES, asked, agent.headers)
    if answer.status == 200:
        [call] = [part for part in answer.json["content"] if part["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": result}]
        agent.messages += [
            {"role": "assistant", "content": answer.json["content"]},
            {"role": "user", "content": results},
        ]
    return answer.status


async def test_a_loop_is_stopped_and_the_user_may_go_on() -> None:
    config = Config(session_budget="loops=3")
    async with serving(SCRIPTS, config=config, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        agent = Agent(served, "[[script:call]] Go.", {"x-session-id": "s"})
        assert [await call_again(agent, "same") for _ in range(5)] == [200, 200, 200, 402, 402]
        agent.messages.append({"role": "user", "content": "[[script:call]] Try again."})
        assert [await call_again(agent, "same") for _ in range(4)] == [200, 200, 200, 402]
        moving = Agent(served, "[[script:call]] Go.", {"x-session-id": "other"})
        assert [await call_again(moving, str(number)) for number in range(6)] == [200] * 6


async def test_without_it_no_loop_is_stopped() -> None:
    config = Config(session_budget="generated=1M")
    async with serving(SCRIPTS, config=config, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        agent = Agent(served, "[[script:call]] Go.", {"x-session-id": "s"})
        assert [await call_again(agent, "same") for _ in range(6)] == [200] * 6


def rounds(names: Sequence[str]) -> Any:
    """Calls of tools with these names, each with the same result."""
    turns = []
    for number, name in enumerate(names):
        turns.append(Turn("assistant", (ToolCall(name, "{}", str(number)),)))
        turns.append(Turn("tool", (ToolResult(str(number), (Text("same"),)), ToolResult("unknown"))))
    return rounds_of(turns)


@pytest.mark.parametrize(
    ("names", "times"),
    [("", 0), ("a", 1), ("ab", 1), ("baaa", 3), ("abab", 2), ("xabcabcabc", 3), ("aab", 1)],
)
def test_repetitions(names: str, times: int) -> None:
    assert repetitions(rounds(names)) == times


def test_the_lower_limit_counts() -> None:
    flag = read_budget("prefill=2M,generated=1.5k", "--session-budget")
    header = read_budget("prefill=3M, generated=1k, loops=2", HEADER)
    assert flag.lowered(header) == Budget(
        {
            "prefill": Limit(2e6, "--session-budget"),
            "generated": Limit(1e3, HEADER),
            "loops": Limit(2, HEADER),
        }
    )
    spent = Cost(1, 10, new=10, generated=3, eviction=5, prefill_seconds=1.0)
    assert [(name, used) for name, used, _ in flag.used(spent)] == [("prefill", 15), ("generated", 3)]


@pytest.mark.parametrize(
    "flags",
    [
        {"session_budget": "prefill"},
        {"session_budget": "prefill=-1"},
        {"session_budget": "prefill=1T"},
        {"key_budget": "loops=3"},
    ],
    ids=json.dumps,
)
async def test_a_flag_that_is_no_budget_is_refused_at_the_start(flags: dict[str, Any]) -> None:
    with pytest.raises(BadConfiguration, match="budget"):
        async with serving(config=Config(**flags)):
            pass


async def test_raw_prompts_count_for_their_key() -> None:
    asked = {"model": MODEL, "prompt": QUESTION, "max_tokens": 9}
    async with serving(
        SCRIPTS, config=Config(key_budget="generated=12", session_budget="generated=1")
    ) as served:
        answers = [await served.client.post("/v1/completions", asked) for _ in range(4)]
        [sums] = served.service.sessions.key_costs().values()
    assert [answer.status for answer in answers] == [200, 200, 200, 400]
    assert (
        answers[2].headers["x-singletree-warning"].startswith("the budget of this API key is nearly used up")
    )
    usages = [answer.json["usage"] for answer in answers[:3]]
    assert sums.generated == sum(usage["completion_tokens"] for usage in usages)
    assert sums.prompt == sum(usage["prompt_tokens"] for usage in usages)
