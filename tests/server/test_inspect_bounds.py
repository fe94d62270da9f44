"""The inspector within its memory, beside other processes, and with texts that mean it ill."""

from __future__ import annotations

import asyncio
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from singletree.errors import BadConfiguration
from singletree.inspector.prompt_history import PromptEntry, PromptHistory, body_change
from singletree.inspector.routes import embed_json, page_file
from singletree.inspector.turn_record import InspectedSession, session_id
from singletree.inspector.wire_record import WireBudget, WireRecord
from singletree.lru import ENTRY_BYTES
from singletree.processes.served_process import join_processes
from singletree.server.settings.config import Config

from .inspecting import (
    API,
    InspectedHarness,
    PeersInMemory,
    Reader,
    get,
    inspected,
    only_session,
    peers_in_memory,
)
from .serving import Served


def _inspector(served: Served) -> Any:
    assert served.service.inspector is not None
    return served.service.inspector


async def test_memory_is_bounded_and_the_oldest_details_go_first() -> None:
    async with inspected(inspect_size=2**20) as served:
        inspector = _inspector(served)
        for n in range(12):
            agent = InspectedHarness(served.client, f"session {n}")
            for _ in range(3):
                await agent.ask("x" * 700)
                assert inspector.used <= inspector.limit
        inspector.limit = used = inspector.used
        await agent.ask("and on")
        assert inspector.used <= used
        listed = (await get(served.client, "sessions"))["sessions"]
        kept = {each["key"]: each["details"] for each in listed}
        details = [kept[f"session {n}"] for n in range(12)]
        assert details == sorted(details)
        assert (details[0], details[-1]) == (False, True)
        oldest = await get(served.client, f"sessions/{session_id('session 0')}")
        (turn, *_) = oldest["turns"]
        assert turn["tokens"]["prompt"] > 700  # what is small stays
        shown = await get(served.client, f"turns/{turn['id']}")
        assert (shown["tokens"], shown["wire"]) == (None, None)
        prompt = await get(served.client, f"turns/{turn['id']}/prompt")
        assert (prompt["spans"], prompt["tools"], prompt["request"]) == (None, None, None)
        newest = await get(served.client, f"sessions/{session_id('session 11')}")
        for turn in newest["turns"]:
            text = await _prompt_text(served, turn["id"])
            assert text.count("x" * 700) == min(3, turn["number"])


async def _prompt_text(served: Served, turn: str) -> str:
    prompt = await get(served.client, f"turns/{turn}/prompt")
    return "".join(span["text"] for span in prompt["spans"])


async def test_whole_sessions_go_and_the_page_is_notified() -> None:
    async with inspected(inspect_size=2**20) as served:
        for n in range(6):
            await InspectedHarness(served.client, f"session {n}").ask("hello")
        inspector = _inspector(served)
        inspector.limit = inspector.used // 3
        async with Reader(served.client) as reader:
            await reader.next()
            await InspectedHarness(served.client, "session 6").ask("hello")
            gone: list[str] = []
            while not gone:
                name, data = await reader.next()
                gone = data["sessions"] if name == "gone" else []
        assert session_id("session 0") in gone
        assert (await served.client.get(f"{API}/sessions/{gone[0]}")).status == 404
        keys = [each["key"] for each in (await get(served.client, "sessions"))["sessions"]]
        assert keys[0] == "session 6"
        assert "session 0" not in keys
        assert inspector.used <= inspector.limit


async def test_one_long_session_loses_its_oldest_turns_and_can_be_read_on() -> None:
    async with inspected(inspect_size=2**20) as served:
        inspector = _inspector(served)
        inspector.limit = 60_000
        inspector._bodies._limit = 4000
        main = InspectedHarness(served.client)
        for n in range(40):
            main.messages = main.messages[-12:]
            await main.ask(f"step {n} " + "y" * 40)
            assert inspector.used <= inspector.limit
        document = await only_session(served.client)
        turns = document["turns"]
        assert document["dropped_turns"] + len(turns) == 40
        assert [turn["number"] for turn in turns] == list(range(41 - len(turns), 41))
        assert turns[-1]["details"]
        assert "step 39" in await _prompt_text(served, turns[-1]["id"])


def test_the_sizes_that_are_counted_are_those_of_what_is_kept() -> None:
    async def grow() -> None:
        async with inspected() as served:
            main = InspectedHarness(served.client)
            for n in range(10):
                await main.ask(f"step {n}")
            inspector = _inspector(served)
            (session,) = inspector.sessions()
            counted = session.bytes
            session.prune()
            assert session.bytes == counted == session.counted
            assert inspector.used == counted + sum(
                len(body) + ENTRY_BYTES for body in inspector._bodies.values()
            )

    asyncio.run(grow())


async def test_a_turn_costs_what_is_new_in_it() -> None:
    async with inspected() as served:
        main = InspectedHarness(served.client)
        await main.ask("z" * 5000)
        (session,) = _inspector(served).sessions()
        sizes = [session.prompts.bytes]
        for n in range(20):
            await main.ask(f"step {n}")
            sizes.append(session.prompts.bytes)
        turns = list(session.turns)
        whole = [session.prompts.body(turn) for turn in turns]
    grown = [after - before for before, after in pairwise(sizes)]
    assert max(grown) < 3000 < 20_000 < sizes[0]  # tokens of four bytes
    assert all(body is not None and json.loads(body)["messages"][-1]["role"] == "user" for body in whole)


def test_a_prompt_is_put_together_again_from_what_each_adds() -> None:
    history = PromptHistory()
    bodies, wanted = [b"{}"], []
    before = None
    for n in range(200):
        base, known = history.base_for(before)
        bodies.append(b'{"a":[%b],"tools":[1,2,3]}' % b",".join(b"%d" % each for each in range(n * 3)))
        change = body_change(bodies[-1], None if base is None else bodies[-2])
        tokens = b"".join(each.to_bytes(4, "little") for each in range(n * 2 + 1))
        kept = 0 if known is None else max(0, known.prompt_tokens)
        depth = 0 if known is None else known.depth + 1
        history.add(
            f"t{n}",
            PromptEntry(
                base, depth, kept, n * 2 + 1, tokens[kept * 4 :], kept, ((n * 2, n * 2 + 1),), 0, (), change
            ),
        )
        history.add_turn(f"t{n}", b"gen!")
        wanted.append(tokens)
        before = f"t{n}"
    for n in (0, 1, 63, 64, 65, 130, 199):
        assert history.tokens(f"t{n}") == wanted[n]
        assert history.body(f"t{n}") == bodies[n + 1]
        assert history.replayed(f"t{n}")[-1] == (n * 2, n * 2 + 1)
    history.prune(["t199"])
    assert history.tokens("t199") == wanted[199]
    assert history.tokens("t0") is None
    assert history.body("t0") is None
    history.prune([])
    assert history.bytes == 0


def test_the_events_of_all_running_turns_share_a_budget() -> None:
    budget = WireBudget(1000)
    records = [WireRecord(keeps_data=True, limit=10_000, budget=budget) for _ in range(3)]
    for n in range(100):
        for record in records:
            record.add([("delta", b"{%d}" % n)], float(n), n)
    assert budget.used < 1100
    kept = [list(record.events()) for record in records]
    assert all(0 < len(events) < 100 for events in kept)
    assert [record.dropped for record in records] == [100 - len(events) for events in kept]
    for record in records:
        record.close()
    assert budget.used == 0
    assert [list(record.events()) for record in records] == kept
    assert kept[0][3]["data"] == "{3}"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.data: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.data.append(data)


HOSTILE = (
    "</script><script>alert(1)</script><!-- <script> ]]> \u2028 \u0000 <img src=x onerror=alert(2)> & &lt;"
)


async def test_hostile_texts_stay_data_in_an_exported_file() -> None:
    tool = {"name": "ls", "description": HOSTILE, "input_schema": {"type": "object"}}
    async with inspected({"evil": HOSTILE}) as served:
        main = InspectedHarness(served.client, HOSTILE.replace("\u0000", "").replace("\u2028", ""))
        main.headers["user-agent"] = "<script>alert(3)</script>"
        for n in range(2):
            await main.ask(f"{HOSTILE} [[script:evil]]", system=f"{n} {HOSTILE}", tools=[tool], stream=n == 1)
        document = await only_session(served.client)
        reply = await served.client.get(f"{API}/export?session={document['session']['id']}")
        plain = await served.client.get(f"{API}/export?session={document['session']['id']}&texts=0")
    assert "attachment" in reply.headers["content-disposition"]
    tags = _Tags()
    tags.feed(reply.body.decode())
    names = [tag for tag, _ in tags.found]
    assert names.count("script") == 2
    assert "img" not in names
    embedded = next(data for data in tags.data if data.startswith('{"version"'))
    assert "<" not in embedded
    value = json.loads(embedded)
    session = value["session"]
    assert value["answers"][f"{API}/sessions/{session}"]["turns"] == document["turns"]
    for turn in document["turns"]:
        shown = value["answers"][f"{API}/turns/{turn['id']}"]
        assert "alert(1)" in "".join(shown["tokens"]["text"])
        assert value["answers"][f"{API}/turns/{turn['id']}/prompt"]["count"] == turn["tokens"]["prompt"]
    (policy,) = (attributes["content"] for tag, attributes in tags.found if "http-equiv" in attributes)
    assert policy is not None
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]{44}'", policy)
    assert "default-src 'none'" in policy
    assert value["with_texts"] is True
    removed = plain.body.decode()
    removed = removed.replace(embed_json(document["session"]["key"])[1:-1], "")  # a name stays
    assert "alert(1)" not in removed
    exported = json.loads(removed.partition('id="singletree-export">')[2].partition("</script>")[0])
    assert exported["with_texts"] is False
    turn_id = document["turns"][0]["id"]
    assert exported["answers"][f"{API}/turns/{turn_id}"]["tokens"]["text"] is None
    assert exported["answers"][f"{API}/turns/{turn_id}/prompt"]["request"]["body"] is None


def test_the_page_can_be_put_into_one_file() -> None:
    script, style = (page_file(name)[0].decode() for name in ("inspector.js", "inspector.css"))
    assert "</script" not in script.lower()
    assert "<!--" not in script
    assert "</style" not in style.lower()
    assert "sourceMappingURL" not in script
    assert not re.search(r"^\s*import\b[^(]", script, re.MULTILINE)
    assert len(script) + len(style) < 200_000
    html = page_file("index.html")[0].decode()
    assert '<div id="app"></div>' in html
    assert not re.search(r"<script(?![^>]*\bsrc=)", html)
    assert "http://" not in html
    assert "https://" not in html


@pytest.mark.parametrize("text", [HOSTILE, "\ud800 half", "</SCRIPT >", "\u2029"])
def test_embedded_json_has_no_tag_and_loses_nothing(text: str) -> None:
    embedded = embed_json({"text": text, text: 1})
    assert not re.search(r"[<>&\u2028\u2029]", embedded)
    assert json.loads(embedded)["text"] == text.replace("\ud800", "\ufffd")


async def test_strange_names_and_texts_raise_nothing() -> None:
    strange = "\ud83d \u0000 <|im_start|> <|im_end|>"
    function = {"name": "ls", "description": strange, "parameters": {"type": "object", "title": strange}}
    asked = {
        "model": "org/test-model",
        "messages": [{"role": "user", "content": strange}],
        "tools": [{"type": "function", "function": function}],
        "prompt_cache_key": strange,
    }
    async with inspected() as served:
        for _ in range(2):
            reply = await served.client.post("/v1/chat/completions", json.dumps(asked).encode())
            assert reply.status == 200, reply.body
        document = await only_session(served.client)
        for turn in document["turns"]:
            for path in (f"turns/{turn['id']}", f"turns/{turn['id']}/prompt"):
                await get(served.client, path)
        assert (await served.client.get(f"{API}/export?session={document['session']['id']}")).status == 200


async def test_all_processes_answer_for_one_another() -> None:
    peers = peers_in_memory(2)
    async with inspected() as one, inspected() as two:
        for served, own in zip((one, two), peers, strict=True):
            join_processes(served.service, own)
        first, second = InspectedHarness(one.client), InspectedHarness(two.client)
        content = await first.ask(
            "[[script:call]]", tools=[{"name": "ls", "input_schema": {"type": "object"}}]
        )
        second.messages = first.messages
        tools = [{"name": "ls", "input_schema": {"type": "object"}}]
        await second.answer_calls(content, tools=tools)
        async with Reader(one.client) as reader:
            await reader.next()
            first.messages = second.messages
            await second.ask("more", tools=tools)
            done, _ = await reader.until("done")
            assert done["turn"]["process"] == 2
            assert done["session"]["turns"] == 3
        documents = [await only_session(served.client) for served in (one, two)]
        assert documents[0] == documents[1]
        turns = documents[0]["turns"]
        assert [(turn["number"], turn["process"], turn["lane"]) for turn in turns] == [
            (1, 1, 1),
            (2, 2, 1),
            (3, 2, 1),
        ]
        assert [turn["course"] for turn in turns] == ["first", "appended", "appended"]
        assert turns[0]["calls"][0]["tool_ms"] is not None
        assert turns[0]["times"]["gap_ms"] is not None
        for served in (one, two):
            for turn in turns:
                assert (await get(served.client, f"turns/{turn['id']}"))["tokens"]["count"]
                assert (await get(served.client, f"turns/{turn['id']}/prompt"))["exact"]
            both = await get(served.client, f"difference?a={turns[0]['id']}&b={turns[2]['id']}")
            assert both["same_tokens"] > 0
            listed = await get(served.client, "server")
            assert (listed["processes"], listed["processes_answered"], listed["sessions"]) == (2, 2, 1)
        assert isinstance(peers[1], PeersInMemory)
        peers[1].busy = True
        alone = await only_session(one.client)
        assert (alone["processes_answered"], len(alone["turns"])) == (1, 1)
        one.service.others = two.service.others = None


def test_the_lanes_of_a_session_follow_it() -> None:
    session = InspectedSession("s0", "key")
    assert session.lanes.place("a", None, continues=False, repeated=None) == (1, True)
    assert session.lanes.place("b", "a", continues=True, repeated=None) == (1, False)
    assert session.lanes.place("c", "a", continues=True, repeated=None) == (2, True)  # a is continued already
    assert session.lanes.place("d", "b", continues=True, repeated=1) == (1, False)
    for n in range(200):
        session.lanes.place(f"n{n}", None, continues=False, repeated=None)
    assert len(session.lanes.tips) <= 64


def test_a_size_that_is_too_small_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="--inspect-size is 5"):
        Config(inspect_size=5)
