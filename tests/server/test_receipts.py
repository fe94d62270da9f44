"""Receipts: what each turn cost, by whose fault tokens were read again, and the sums."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from singletree.conversation import AgentContext
from singletree.engines.engine import Chunk, EngineInfo, Route
from singletree.errors import EngineFailed
from singletree.events import Usage, WeightVersion
from singletree.prefix_breaks.causes import CAUSES
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.records.record_queue import RecordFile, RecordQueue
from singletree.records.request_records import RequestRecords
from singletree.server.sessions.session_report import cost_of
from singletree.server.sessions.step import CACHE_BLOCK, FAULTS, Break, Cost, CostSums, Step, total

from .agent_traffic import CALL, Agent
from .by_hand import EngineByHand
from .memory import events
from .owning import tenants
from .serving import MODEL, TEMPLATE, TOKENIZER, Served, body, serving

LAYOUT = TEMPLATE.layout(TOKENIZER)
SESSIONS = "/v1/singletree/sessions"
ASKED = {"x-singletree-receipt": "1"}


async def session(served: Served, key: str) -> Any:
    """What the server reports of a session."""
    return (await served.client.get(f"{SESSIONS}/{key}")).json


def balances(receipt: dict[str, Any]) -> bool:
    """Whether the tokens of the prompt add up."""
    parts = ("cached_tokens", "new_tokens", "reread_tokens", "unreported_tokens")
    return bool(receipt["prompt_tokens"] == sum(receipt[part] for part in parts))


def made(step: Step, before: Step | None, usage: Usage, generation: Any, known: int) -> Cost:
    """The cost of a turn of which so much is known."""
    sums = CostSums()
    if known:
        sums.charge("s", "", Cost())
    opened: Any = SimpleNamespace(
        step=step, compared=None if before is None else SimpleNamespace(step=before)
    )
    return cost_of(opened, generation, usage, 10.0, 12.0, sums)


counts = st.integers(0, 2000)


@given(
    prompt=counts, matched=counts, lost=counts, cached=st.none() | counts, has_before=st.booleans(),
    first=st.sampled_from([0.0, 11.0]), route=st.sampled_from([None, Route("a"), Route("b", failovers=1)]),
    replayed=counts, fault=st.sampled_from(FAULTS), started=st.sampled_from([0.0, 1e12]), known=st.integers(0, 1),
)  # fmt: skip
def test_new_cached_and_read_again_are_the_prompt(
    prompt: int, matched: int, lost: int, cached: int | None, has_before: bool, first: float, route: Route | None,
    replayed: int, fault: Any, started: float, known: int,
) -> None:  # fmt: skip
    broken = Break("x", "", "", None, "", "", "", "", lost, fault=fault) if lost else None
    step = Step(
        "s", 0.0, "m", 1, "appended", prompt, min(matched, prompt), lost,
        cached=None if cached is None else min(cached, prompt), route=route, payer=("s", ""), _broken=broken,
    )  # fmt: skip
    before = Step("s", 0.0, "m", 1, "first", 1, 0, route=Route("a"), seconds=1.0) if has_before else None
    written = SimpleNamespace(replayed=replayed, piece_ends=[min(replayed, prompt)])
    engine = SimpleNamespace(info=lambda: EngineInfo("e", 1, started_at=started))
    generation = SimpleNamespace(
        prompt=written, first_token_at=first, route=route, model=SimpleNamespace(engine=engine)
    )
    cost = made(step, before, Usage(prompt, 7, step.cached or 0), generation, known)
    assert cost.prompt == cost.cached + cost.new + cost.unreported + sum(cost.reread.values())
    assert cost.prompt == prompt
    assert all(value >= 0 for value in cost)
    assert balances(cost.encode())


def test_each_cause_of_a_break_has_a_fault() -> None:
    assert {cause.fault for cause in CAUSES} <= set(FAULTS)
    at_fault = {cause.name: cause.fault for cause in CAUSES if cause.fault != "harness"}
    assert at_fault == {
        "thinking_dropped": "template",
        "template": "template",
        "answer_respelled": "eviction",
        "unknown": "unknown",
    }


async def test_the_sums_are_those_of_the_usage_to_the_token(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    records = RequestRecords(RecordQueue(RecordFile(path, 2**20)))
    scripts = {"main": CALL, "done": "Done.", "sub": "Found.", "slow": "word " * 400}
    async with serving(scripts, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        served.service.records = records
        main = Agent(served, "[[script:main,done]] Go. " + "word " * 200, {"x-claude-code-session-id": "s"})
        answers = [await main.ask()]
        for name in ("a1", "a2", "a1"):
            headers = main.headers | {"x-claude-code-agent-id": name}
            answers.append(await Agent(served, f"[[script:sub]] Look {name}.", headers).ask())
        child = {"x-session-id": "c", "x-parent-session-id": "s"}
        answers.append(await Agent(served, "[[script:sub]] Look there.", child).ask())
        answers.append(await main.ask())
        engine = list(served.engine.log)
        # One with two answers, and one whose client leaves.
        several = {**body("/v1/chat/completions", "[[script:sub]]"), "n": 2}
        chat = (await served.client.post("/v1/chat/completions", several, {"x-session-id": "s"})).json[
            "usage"
        ]
        left = body("/v1/messages", "[[script:slow]]", stream=True)
        async with served.client.open("POST", "/v1/messages", left, {"x-session-id": "s"}) as (exchange, _):
            await exchange.started.wait()
            exchange.leave()
        listed = (await served.client.get(SESSIONS)).json
        report = await session(served, "s")
        metrics = (await served.client.get("/metrics")).body.decode()
    records.close()
    lines = [json.loads(line)["request"] for line in path.read_text().splitlines() if '"request_end"' in line]
    receipts = [line["singletree"]["receipt"] for line in lines]
    assert all(map(balances, receipts))
    for play, receipt in zip(engine, receipts, strict=False):
        assert receipt["prompt_tokens"] == len(play.prompt_token_ids)
        assert receipt["cached_tokens"] == play.cached_tokens
        assert receipt["generated_tokens"] == len(play.token_ids)
    for line, receipt in zip(lines, receipts, strict=True):
        assert receipt["prompt_tokens"] == line["input_tokens"]
        assert receipt["cached_tokens"] == line["cached_tokens"]
        assert receipt["generated_tokens"] == line["output_tokens"]

    usages = [answer["usage"] for answer in answers]
    read = (
        sum(each["input_tokens"] + each["cache_read_input_tokens"] for each in usages) + chat["prompt_tokens"]
    )
    written = sum(each["output_tokens"] for each in usages) + chat["completion_tokens"]
    cost, last = report["cost"], receipts[-1]
    assert cost["session"] == "s"
    assert set(cost["agents"]) == {"", "a1", "a2", "c"}
    assert cost["agents"]["a1"]["turns"] == 2
    assert (cost["turns"], listed["keys"][""]["turns"]) == (8, 8)
    assert cost["prompt_tokens"] == read + last["prompt_tokens"]
    assert cost["generated_tokens"] == written + last["generated_tokens"]
    for count, kind in (("prompt", "prompt"), ("cached", "cached"), ("generated", "completion")):
        counter = rf'singletree_tokens_total{{kind="{kind}",model="{MODEL}"}} (\S+)'
        [value] = re.findall(counter, metrics)
        [same] = re.findall(rf'singletree_receipt_tokens_total{{kind="{count}"}} (\S+)', metrics)
        counted = cost[f"{count}_tokens"]
        assert counted == listed["keys"][""][f"{count}_tokens"] == float(value) == float(same)
        assert counted == sum(receipt[f"{count}_tokens"] for receipt in receipts)
    by_session = {each["id"]: each["cost"] for each in listed["data"]}
    assert by_session["s/a1"] == {"session": "s", "agent": "a1", **cost["agents"]["a1"]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
async def test_a_client_that_asks_gets_the_receipt_in_the_usage(path: str, stream: bool) -> None:
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        engine.emit(
            Chunk((65,), cached_tokens=2, route=Route("http://one")),
            Chunk((66,), "stop", weight_versions=(WeightVersion("step-7", 0, 2),)),
        )
        more = {"stream_options": {"include_usage": True}} if stream and "chat" in path else {}
        asked = json.dumps(body(path, "hi", stream=stream, **more)).encode()
        # Not through the grammar of the official SDKs, which knows no such field.
        async with served.client.open("POST", path, asked, {**ASKED, "x-session-id": "s"}) as (exchange, _):
            data = await exchange.rest()
        reported = (await session(served, "s"))["steps"][0]["receipt"]
    if not stream:
        usage = json.loads(data)["usage"]
    elif "messages" in path:
        usage = next(d["usage"] for n, d in events(data) if n == "message_delta")
    elif "chat" in path:
        usage = json.loads(data.split(b"\n\n")[-3].partition(b"data: ")[2])["usage"]
    else:
        usage = next(d["response"]["usage"] for n, d in events(data) if n == "response.completed")
    receipt = usage["singletree"]
    assert receipt == reported
    assert balances(receipt)
    assert (receipt["cached_tokens"], receipt["generated_tokens"]) == (2, 2)
    assert (receipt["engine"], receipt["weight_version"]) == ("http://one", "step-7")


async def test_a_body_has_the_receipt_in_a_header() -> None:
    async with serving({"a": "Yes."}) as served:
        headers = {"x-singletree-explain": "1", "x-session-id": "s"}
        answer = await served.client.post("/v1/messages", body("/v1/messages", "[[script:a]]"), headers)
        receipt = (await session(served, "s"))["steps"][0]["receipt"]
        plain = await served.client.post("/v1/messages", body("/v1/messages", "[[script:a]]"))
    fields = dict(each.split("=") for each in answer.headers["x-singletree-receipt"].split("; "))
    assert int(fields["prompt_tokens"]) == receipt["prompt_tokens"]
    assert int(fields["generated_tokens"]) == receipt["generated_tokens"]
    assert "singletree" not in answer.json["usage"]
    assert "x-singletree-receipt" not in plain.headers


LONG = "word " * 100


async def ask(
    served: Served, engine: EngineByHand, text: str, *chunks: Chunk | Exception, system: str = ""
) -> int:
    """One turn of the session ``s``, a conversation that grows."""
    engine.emit(*chunks)
    messages = [*getattr(served.client, "messages", []), {"role": "user", "content": text}]
    asked = {"model": MODEL, "max_tokens": 9, "messages": messages, **({"system": system} if system else {})}
    answer = await served.client.post("/v1/messages", asked, {"x-session-id": "s"})
    if answer.status == 200:
        messages.append({"role": "assistant", "content": answer.json["content"]})
        served.client.messages = messages  # type: ignore[attr-defined]
    return answer.status


async def faults(served: Served) -> list[dict[str, int]]:
    """What was read again in each turn of the session, by fault."""
    return [step["receipt"]["reread_by_fault"] for step in (await session(served, "s"))["steps"]]


class Restarting(EngineByHand):
    """Says since when it runs."""

    started_at = 0.0

    def info(self) -> EngineInfo:
        """See ``Engine``."""
        return EngineInfo("by hand", 8192, started_at=self.started_at)


async def test_whose_fault_it_was() -> None:
    engine = Restarting()
    one, two = Route("http://one"), Route("http://two")
    async with serving(engine=engine, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        await ask(served, engine, LONG, Chunk((65,), "stop", cached_tokens=0, route=one), system="a")
        await ask(served, engine, "all", Chunk((65,), "stop", cached_tokens=500, route=one), system="a")
        await ask(served, engine, "none", Chunk((65,), "stop", cached_tokens=0, route=one), system="a")
        await ask(served, engine, "moved", Chunk((65,), "stop", cached_tokens=0, route=two), system="a")
        engine.started_at = 1e12
        await ask(served, engine, "again", Chunk((65,), "stop", cached_tokens=0, route=two), system="a")
        engine.started_at = 0.0
        # The system prompt changes, and the engine has lost what was before it, but for a block.
        await ask(served, engine, "other", Chunk((65,), "stop", cached_tokens=0, route=two), system="b")
        found = await faults(served)
        steps = (await session(served, "s"))["steps"]
    matched = [step["matched_tokens"] for step in steps]
    assert found[:3] == [{}, {}, {"eviction": matched[2]}]
    assert found[3:5] == [{"router": matched[3]}, {"restart": matched[4]}]
    assert matched[5] < CACHE_BLOCK
    assert found[5] == {"harness": steps[5]["lost_tokens"]}
    assert steps[5]["break"]["cause"] == "system_changed"
    assert all(balances(step["receipt"]) for step in steps)


async def test_what_the_engine_did_not_report_is_nobodys_fault() -> None:
    engine = EngineByHand()
    async with serving(engine=engine, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        await ask(served, engine, LONG, Chunk((65,), "stop"))
        await ask(served, engine, "more", Chunk((65,), "stop"))
        assert await ask(served, engine, "fails", EngineFailed("the engine broke")) == 500
        first, second, failed = (step["receipt"] for step in (await session(served, "s"))["steps"])
        matched = (await session(served, "s"))["steps"][1]["matched_tokens"]
    assert (first["unreported_tokens"], first["new_tokens"]) == (0, first["prompt_tokens"])
    assert (second["unreported_tokens"], second["cached_tokens"]) == (matched, 0)
    assert failed["unreported_tokens"] == failed["prompt_tokens"]
    assert failed["prefill_seconds"] == failed["decode_seconds"] == 0
    assert all(map(balances, (first, second, failed)))


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_session_of_before_a_restart_is_read_again_by_its_fault(is_known: bool) -> None:
    """The turns come back by their own tokens, from a memory that outlives the server, but the session is new."""
    memory, engine = TurnMemory(2**20), EngineByHand()
    async with serving(engine=engine, memory=memory, layout=LAYOUT) as served:
        await ask(served, engine, LONG, Chunk((65,), "stop", cached_tokens=0))
        messages = served.client.messages  # type: ignore[attr-defined]
    async with serving(engine=engine, memory=memory, layout=LAYOUT) as served:
        if is_known:  # Only the session's prompts were forgotten.
            served.service.sessions.costs.charge("s", "", Cost())
        served.client.messages = messages  # type: ignore[attr-defined]
        await ask(served, engine, "more", Chunk((65,), "stop", cached_tokens=0))
        [step] = (await session(served, "s"))["steps"]
    [(fault, tokens)] = step["receipt"]["reread_by_fault"].items()
    assert fault == ("eviction" if is_known else "restart")
    assert len(LONG) < tokens < step["prompt_tokens"]


async def test_prefill_and_decode_are_timed_apart() -> None:
    engine = EngineByHand()
    async with serving(engine=engine) as served:
        asked = body("/v1/messages", "hi")
        async with served.client.open("POST", "/v1/messages", asked, {"x-session-id": "s"}) as (exchange, _):
            await engine.waiting.wait()
            await asyncio.sleep(0.2)
            engine.emit(Chunk((65,), cached_tokens=0, route=Route("", waited_seconds=0.05)))
            await asyncio.sleep(0.1)
            engine.emit(Chunk((66,), "stop"))
            await exchange.rest()
        [step] = (await session(served, "s"))["steps"]
    receipt = step["receipt"]
    assert 0.14 <= receipt["prefill_seconds"] <= step["seconds"] - receipt["decode_seconds"]
    assert receipt["decode_seconds"] >= 0.09


async def test_each_key_sees_its_own_sums_and_the_operator_all() -> None:
    async with tenants({"t": "Yes."}) as them:
        for of, times in ((them.a, 1), (them.b, 2)):
            for _ in range(times):
                await of.post("/v1/messages", body("/v1/messages", "[[script:t]]"), {"x-session-id": "s"})
        of_a, of_b = [(await of.get(SESSIONS)).json["keys"] for of in (them.a, them.b)]
        of_all = (await them.admin.get(SESSIONS)).json
        report = (await them.a.get(f"{SESSIONS}/s")).json
    assert [each["turns"] for each in of_a.values()] == [1]
    assert [each["turns"] for each in of_b.values()] == [2]
    assert {owner: each["turns"] for owner, each in of_all["keys"].items() if each["turns"]} == {
        owner: each["turns"] for owner, each in (of_a | of_b).items()
    }
    assert report["cost"]["turns"] == 1


def test_the_sums_of_a_session_are_bounded() -> None:
    sums = CostSums()
    sums.charge("s", "a", Cost(1, 10))
    for number in range(400):
        sums.charge("s", f"agent-{number}", Cost(1, 1))
    agents = sums.agents("s")
    assert len(agents) <= 257
    assert total(agents.values()).prompt == 410
    for number in range(5000):
        sums.charge(f"s{number}", "", Cost(1, 1))
    assert sums.agents("s0") == {}
    assert sums.all[1] == 10 + 400 + 5000


def test_sessions_below_a_session_are_its_agents() -> None:
    sums = CostSums()
    place = sums.place
    assert place("nameless-1", AgentContext()) == ("nameless-1", "")
    assert place("s/a", AgentContext(session_id="s", trajectory_id="a")) == ("s", "a")
    assert place("c", AgentContext(session_id="c", parent_session_id="s")) == ("s", "c")
    assert place("d", AgentContext(session_id="d", parent_session_id="c")) == ("s", "d")
    assert place("s", AgentContext(session_id="s", parent_session_id="s")) == ("s", "")


def test_tokens_are_whole_numbers_on_the_wire() -> None:
    sums = CostSums()
    sums.charge("s", "", Cost(1, 3, 1, 2))
    assert json.dumps(sums.agents("s")[""].encode()["prompt_tokens"]) == "3"
