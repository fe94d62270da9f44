"""The inspector: what it answers about sessions, turns and prompts, and to whom."""

from __future__ import annotations

import asyncio
import json
from itertools import accumulate

import pytest

from singletree.engines.engine import Chunk, Route
from singletree.server.settings.config import Config
from singletree.stored_responses.store import Store

from .by_hand import EngineByHand
from .inspecting import API, CALL, SCRIPTS, TOOL, InspectedHarness, get, inspected, only_session
from .serving import MODEL, serving


async def test_a_turn_is_shown_token_by_token_beside_what_was_sent() -> None:
    async with inspected() as served:
        main = InspectedHarness(served.client)
        await main.ask("[[script:call]]", tools=[TOOL], stream=True)
        (turn,) = (await only_session(served.client))["turns"]
        assert main.link == f"/inspect#/sessions/{turn['session']}/turns/{turn['id']}"
        shown = await get(served.client, f"turns/{turn['id']}")
        ids = list(served.engine.log[0].token_ids)
    assert shown["turn"] == turn
    assert [each["kind"] for each in turn["segments"]] == ["reasoning", "markup", "text", "call", "markup"]
    (call,) = turn["calls"]
    assert (call["name"], call["complete"], call["result_ms"]) == ("ls", True, None)
    times = turn["times"]
    assert 0 <= times["prepare_ms"] <= times["first_token_ms"] <= call["start_ms"] <= call["dispatched_ms"]
    assert call["dispatched_ms"] <= times["total_ms"]
    tokens = shown["tokens"]
    assert tokens["id"] == ids[: tokens["count"]]
    assert "".join(tokens["text"]).removesuffix("<|im_end|>") == CALL
    assert len(tokens["ms"]) == len(tokens["part"]) == len(tokens["text"]) == tokens["count"]
    assert tokens["ms"] == sorted(tokens["ms"])
    kinds = [tokens["parts"][part]["kind"] for part in tokens["part"]]
    places = list(accumulate(map(len, tokens["text"]), initial=0))
    for words, kind in (('"ls"', "call"), ("Hm.", "reasoning"), ("I look", "text"), ("</think>", "markup")):
        assert kinds[places.index(CALL.index(words))] == kind
    names = [event["event"] for event in shown["wire"]]
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"
    assert all(json.loads(event["data"])["type"] == event["event"] for event in shown["wire"])
    assert all(event["bytes"] == len(event["data"].encode()) for event in shown["wire"])
    (started,) = (
        e for e in shown["wire"] if e["data"].find('"tool_use"') > 0 and e["event"] == "content_block_start"
    )
    # A call leaves when it is complete: behind its last argument.
    assert places[started["token"]] > CALL.index("{}")


async def test_the_answer_in_one_body_is_one_event() -> None:
    async with inspected() as served:
        content = await InspectedHarness(served.client).ask("[[script:call]]", tools=[TOOL])
        (turn,) = (await only_session(served.client))["turns"]
        (event,) = (await get(served.client, f"turns/{turn['id']}"))["wire"]
    assert event["event"] == "body"
    assert json.loads(event["data"])["content"] == content


async def test_the_time_of_a_tool_is_that_until_its_result_comes() -> None:
    async with inspected() as served:
        main = InspectedHarness(served.client)
        content = await main.ask("[[script:call]]", tools=[TOOL])
        await asyncio.sleep(0.05)
        await main.answer_calls(content, tools=[TOOL])
        first, second = (await only_session(served.client))["turns"]
    (call,) = first["calls"]
    assert call["tool_ms"] >= 50
    assert call["is_error"] is False
    assert call["tool_ms"] == pytest.approx(call["result_ms"] - call["dispatched_ms"], abs=0.2)
    assert first["times"]["gap_ms"] >= 50
    assert (second["course"], second["verdict"]["kind"], second["times"]["gap_ms"]) == (
        "appended",
        "hit",
        None,
    )


async def test_a_prompt_is_coloured_by_who_made_it_and_what_was_in_place() -> None:
    async with inspected() as served:
        main = InspectedHarness(served.client)
        content = await main.ask("look [[script:call]]", tools=[TOOL], system="Be good.")
        await main.answer_calls(content, tools=[TOOL], system="Be good.")
        first, second = (await only_session(served.client))["turns"]
        prompt = await get(served.client, f"turns/{second['id']}/prompt")
        page = await get(served.client, f"turns/{second['id']}/prompt/tokens?start=5&end=9")
        log = served.engine.log
    assert (prompt["compared_with"], prompt["exact"], prompt["break"]) == (first["id"], True, None)
    spans = prompt["spans"]
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == prompt["count"] == len(log[1].prompt_token_ids)
    whole = "".join(span["text"] for span in spans)
    (model,) = (span for span in spans if span["from"] == "model")
    assert (model["kind"], model["text"]) == ("kept", CALL)
    assert {span["kind"] for span in spans if span["end"] <= prompt["matched"]} == {"kept"}
    assert [span["kind"] for span in spans if span["start"] >= prompt["matched"]] == ["new"] * sum(
        span["start"] >= prompt["matched"] for span in spans
    )
    assert [message["role"] for message in prompt["messages"]] == ["system", "user", "assistant", "tool"]
    for message, words in zip(prompt["messages"], ("Be good.", "look", "I look.", "a b c"), strict=True):
        own = "".join(span["text"] for span in spans if span["message"] == message["index"])
        assert words in own
        assert own.count("<|im_start|>") == (2 if words == "a b c" else 1)  # the last one opens the answer
    assert json.loads(prompt["request"]["body"])["messages"][-1]["content"][0]["content"] == "a b c"
    assert page["id"] == list(log[1].prompt_token_ids)[5:9]
    assert "".join(page["text"]) in whole


async def test_a_break_is_traced_to_its_first_token_and_message() -> None:
    async with inspected() as served:
        main = InspectedHarness(served.client)
        await main.ask("hello", system="Today is 2026-01-01.\nBe good.\nBe kind.")
        await main.ask("again", system="Today is 2026-01-02.\nBe good.\nBe kind.")
        document = await only_session(served.client)
        first, second = document["turns"]
        prompt = await get(served.client, f"turns/{second['id']}/prompt")
        both = await get(served.client, f"difference?a={first['id']}&b={second['id']}")
    broken = second["break"]
    assert (second["course"], second["verdict"]["kind"]) == ("broken", "prompt_broke")
    assert (broken["cause"], broken["message"], broken["made_by"]) == ("date_in_system", 0, "message")
    assert broken["token"] == prompt["first_difference"]["token"] == second["tokens"]["matched"]
    assert (prompt["first_difference"]["was"]["text"], prompt["first_difference"]["now"]["text"]) == (
        "1",
        "2",
    )
    (cause,) = document["causes"]
    assert (cause["count"], cause["lost_tokens"]) == (1, second["tokens"]["lost"])
    assert document["session"]["lost_tokens"] == second["tokens"]["lost"] > 0
    read_again = "".join(span["text"] for span in prompt["spans"] if span["kind"] == "rerendered")
    assert "Be good.\nBe kind." in read_again
    assert "hello" in read_again
    assert "Hello there." in read_again
    new = "".join(span["text"] for span in prompt["spans"] if span["kind"] == "new")
    assert "2.\n" in new
    assert "again" in new
    assert "kind" not in new
    states = [message["state"] for message in prompt["messages"]]
    assert states == ["changed", "same", "new", "new"]
    changed = both["messages"][0]
    assert (changed["state"], changed["a_text"][:20]) == ("changed", "Today is 2026-01-01.")
    assert [each["state"] for each in both["messages"]] == ["changed", "same", "added", "added"]


async def test_a_changed_tool_is_shown_by_its_schema() -> None:
    def tool(kind: str) -> dict[str, object]:
        return {**TOOL, "input_schema": {"type": "object", "properties": {"n": {"type": kind}}}}

    other = {"name": "cat", "description": "prints", "input_schema": {"type": "object"}}
    async with inspected() as served:
        main = InspectedHarness(served.client)
        await main.ask("hello", tools=[tool("number"), other])
        await main.ask("again", tools=[tool("integer")])
        first, second = (await only_session(served.client))["turns"]
        both = await get(served.client, f"difference?a={first['id']}&b={second['id']}")
        prompt = await get(served.client, f"turns/{second['id']}/prompt")
    assert second["break"]["made_by"] == "tool"
    assert second["break"]["tools"] == {
        "added": [],
        "removed": ["cat"],
        "changed": ["ls"],
        "reordered": False,
    }
    assert [(each["name"], each["state"]) for each in both["tools"]] == [
        ("ls", "changed"),
        ("cat", "removed"),
    ]
    (change,) = both["tools"][0]["changes"]
    assert change == {"path": "parameters.properties.n.type", "a": '"number"', "b": '"integer"'}
    assert [(each["name"], each["state"]) for each in prompt["tools"]] == [("ls", "changed")]


async def test_a_rule_is_shown_at_the_message_that_it_changed() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.{n}; cc_entrypoint=cli;\nBe good."
    async with inspected() as served:
        main = InspectedHarness(served.client)
        for n in range(2):
            await main.ask("hello", system=header.format(n=n))
        first, second = (await only_session(served.client))["turns"]
        prompt = await get(served.client, f"turns/{first['id']}/prompt")
        later = await get(served.client, f"turns/{second['id']}/prompt")
    assert second["course"] == "appended"
    for shown in (prompt, later):
        assert (shown["messages"][0]["role"], shown["messages"][0]["rules"]) == ("system", ["billing_header"])
        assert all(not m["rules"] for m in shown["messages"][1:])
        assert {span["rule"] for span in shown["spans"] if span["message"] == 0} == {"billing_header"}
        assert shown["rules"][0]["reason"]


async def test_lanes_distinguish_forks_rewinds_and_side_requests_from_breaks() -> None:
    async with inspected() as served:
        main = InspectedHarness(served.client)
        for n in range(3):
            await main.ask(f"step {n}", tools=[TOOL])
        title = InspectedHarness(served.client)
        await title.ask("a title please", system="You write titles.")
        fork = [*main.messages[:2], {"role": "user", "content": "another way"}]
        await main.send(fork, tools=[TOOL])
        await main.ask("step 3", tools=[TOOL])
        document = await only_session(served.client)
    assert [lane["kind"] for lane in document["lanes"]] == ["main", "side", "fork"]
    assert [len(lane["turns"]) for lane in document["lanes"]] == [4, 1, 1]
    assert document["lanes"][2]["from"]["lane"] == 1
    assert (document["session"]["breaks"], document["session"]["lanes"]) == (0, 3)
    async with inspected() as served:
        main = InspectedHarness(served.client)
        for n in range(3):
            await main.ask(f"step {n}", tools=[TOOL])
        main.messages = main.messages[:2]
        for n in range(2):
            await main.ask(f"other {n}", tools=[TOOL])
        document = await only_session(served.client)
    assert [(lane["kind"], len(lane["turns"])) for lane in document["lanes"]] == [("main", 3), ("rewind", 2)]


async def test_a_compacted_conversation_is_a_lane_and_no_break() -> None:
    async with inspected() as served:
        main = InspectedHarness(served.client)
        for _ in range(3):
            await main.ask("more", system="Be good.", tools=[TOOL])
        main.messages = []
        for text in ("Summary: they said more.", "and now?"):
            await main.ask(text, system="Be good.", tools=[TOOL])
        document = await only_session(served.client)
    assert [(lane["kind"], len(lane["turns"])) for lane in document["lanes"]] == [
        ("main", 3),
        ("compaction", 2),
    ]
    assert document["session"]["breaks"] == 0


async def test_sub_agents_are_sessions_below_their_parent() -> None:
    async with inspected() as served:
        main = InspectedHarness(served.client)
        main.headers = {"x-claude-code-session-id": "u1", "user-agent": "claude-cli/2.1.9 (external, cli)"}
        await main.ask("hello")
        agent = InspectedHarness(served.client)
        agent.headers = {**main.headers, "x-claude-code-agent-id": "a0"}
        await agent.ask("a part of it")
        found = {each["key"]: each for each in (await get(served.client, "sessions"))["sessions"]}
        parent, child = found["u1"], found["u1/a0"]
        assert (child["parent"], child["is_agent"], parent["is_agent"]) == (parent["id"], True, False)
        assert (parent["harness"], parent["client"]) == ("Claude Code", "claude-cli/2.1.9 (external, cli)")
        assert (await get(served.client, f"sessions/{parent['id']}"))["children"] == [child["id"]]
        agents = (await get(served.client, f"sessions/{child['id']}"))["lanes"]
        assert [lane["kind"] for lane in agents] == ["agent"]
        for query, count in (
            ("q=a0", 1), ("q=CLAUDE-cli", 2), ("q=nothing", 0), ("harness=Codex", 0), ("harness=Claude%20Code", 2),
            (f"model={MODEL}", 2), ("model=other", 0), ("broken=1", 0), ("live=1", 2), ("errors=1", 0), ("limit=1", 1),
        ):  # fmt: skip
            listed = await get(served.client, f"sessions?{query}")
            assert listed["shown"] == len(listed["sessions"]) == count, query
        assert (await served.client.get(f"{API}/sessions?limit=x")).status == 400


async def test_retries_are_folded() -> None:
    async with inspected() as served:
        main = InspectedHarness(served.client)
        messages = [{"role": "user", "content": "hello"}]
        for _ in range(3):
            await main.send(messages)
        document = await only_session(served.client)
    first = document["turns"][0]["id"]
    assert [turn["repeats"] for turn in document["turns"]] == [None, first, first]
    assert len(document["lanes"]) == 1
    assert (document["session"]["turns"], document["session"]["retries"]) == (1, 2)


async def test_an_engine_that_lost_its_cache_is_no_broken_prompt() -> None:
    engine = EngineByHand()
    async with inspected(engine=engine) as served:
        main = InspectedHarness(served.client)
        engine.emit(Chunk((65,), "stop", cached_tokens=0))
        await main.ask("hello " * 40)
        engine.emit(Chunk((66,), "stop", cached_tokens=16))
        await main.ask("again")
        engine.emit(Chunk((67,), "stop"))
        await main.ask("and again")
        engine.emit(Chunk((68,), "stop", cached_tokens=16, route=Route("another", failovers=1)))
        await main.ask("elsewhere")
        turns = (await only_session(served.client))["turns"]
    verdicts = [turn["verdict"] for turn in turns]
    assert [verdict["kind"] for verdict in verdicts] == [
        "first",
        "engine_evicted",
        "not_reported",
        "other_worker",
    ]
    receipts = [turn["receipt"] for turn in turns]
    assert receipts[1]["reread_by_fault"] == {"eviction": verdicts[1]["missing_tokens"]}
    assert receipts[3]["reread_by_fault"] == {"router": verdicts[3]["missing_tokens"]}
    assert verdicts[1]["missing_tokens"] == turns[1]["tokens"]["matched"] - 16
    assert [turn["break"] for turn in turns] == [None] * 4


async def test_a_failed_and_a_left_turn_show_how_they_ended() -> None:
    from singletree.errors import EngineFailed

    engine = EngineByHand()
    async with inspected(engine=engine) as served:
        engine.emit(EngineFailed("the engine broke"))
        asked = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        assert (await served.client.post("/v1/messages", asked, headers={"x-session-id": "s"})).status == 500
        async with served.client.open(
            "POST", "/v1/messages", {**asked, "stream": True}, headers={"x-session-id": "s"}
        ) as (exchange, _):
            engine.emit(Chunk((65,), cached_tokens=0))
            await exchange.started.wait()
            running = (await only_session(served.client))["turns"][1]
            assert (running["status"], running["verdict"]["kind"]) == ("running", "running")
            assert (await get(served.client, f"turns/{running['id']}"))["tokens"]["count"] == 1
            exchange.leave()
        failed, left = (await only_session(served.client))["turns"]
    assert failed["error"] == {"type": "EngineFailed", "message": "the engine broke"}
    assert [failed["status"], left["status"]] == ["error", "cancelled"]
    assert left["ended_at"] is not None


async def test_log_probabilities_are_shown_where_they_were_asked_for() -> None:
    engine = EngineByHand()
    async with inspected(engine=engine) as served:
        for stream in (False, True):
            engine.emit(
                Chunk((65,), logprobs=[((65, -0.5),)]), Chunk((66,), "stop", logprobs=[((66, -0.25),)])
            )
            asked = {
                "model": MODEL,
                "messages": [{"role": "user", "content": "x"}],
                "logprobs": True,
                "stream": stream,
            }
            reply = await served.client.post("/v1/chat/completions", asked, headers={"x-session-id": "s"})
            assert reply.status == 200
        engine.emit(Chunk((65,), "stop"))
        await InspectedHarness(served.client).ask("y")
        turns = (await only_session(served.client))["turns"]
        shown = [(await get(served.client, f"turns/{turn['id']}"))["tokens"]["logprob"] for turn in turns]
    assert shown == [[-0.5, -0.25], [-0.5, -0.25], None]


async def test_the_report_of_a_session_has_the_link() -> None:
    async with inspected() as served:
        main = InspectedHarness(served.client)
        await main.ask("hello")
        reported = (await served.client.get("/v1/singletree/sessions/s")).json
        assert reported["inspect"] == main.link.partition("/turns")[0]
    async with serving(SCRIPTS, config=Config()) as served:
        asked = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        await served.client.post("/v1/messages", asked, headers={"x-session-id": "s"})
        assert "inspect" not in (await served.client.get("/v1/singletree/sessions/s")).json


async def test_a_request_that_is_sent_again_while_it_runs_is_one_turn_and_a_retry() -> None:
    engine = EngineByHand()
    async with inspected(engine=engine) as served:
        asked = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"x-session-id": "s", "idempotency-key": "k"}
        first = asyncio.create_task(served.client.post("/v1/messages", asked, headers=headers))
        await engine.waiting.wait()
        engine.waiting.clear()
        second = asyncio.create_task(served.client.post("/v1/messages", asked, headers=headers))
        assert (await first).status == 409
        await engine.waiting.wait()
        engine.emit(Chunk((65,), "stop", cached_tokens=0))
        assert (await second).status == 200
        document = await only_session(served.client)
    assert [turn["status"] for turn in document["turns"]] == ["superseded", "done"]
    assert [turn["repeats"] for turn in document["turns"]] == [None, document["turns"][0]["id"]]
    assert [lane["turns"] for lane in document["lanes"]] == [[turn["id"] for turn in document["turns"]]]
    assert (document["session"]["turns"], document["session"]["errors"]) == (1, 0)


@pytest.mark.parametrize("background", [False, True])
async def test_a_response_is_recorded_once_also_in_the_background(background: bool) -> None:
    async with inspected() as served:
        served.service.store = Store(None, 2**20)
        asked = {"model": MODEL, "input": "hello", "stream": True, "background": background}
        reply = await served.client.post("/v1/responses", asked, headers={"x-session-id": "s"})
        assert reply.status == 200
        (turn,) = (await only_session(served.client))["turns"]
        shown = await get(served.client, f"turns/{turn['id']}")
        served.service.store.close()
    assert (turn["status"], turn["protocol"], turn["stream"]) == ("done", "responses", True)
    assert shown["wire"][-1]["event"] == "response.completed"
    assert turn["answer_id"] in shown["wire"][-1]["data"]
    assert turn["tokens"]["generated"] == shown["tokens"]["count"] > 0
