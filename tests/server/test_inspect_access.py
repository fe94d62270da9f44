"""The inspector: who may look at it, what it keeps without texts, and its event stream."""

from __future__ import annotations

import asyncio
import json
import pickle

import pytest

from singletree.engines.engine import Chunk
from singletree.inspector.inspector import Inspector

from .by_hand import EngineByHand
from .inspecting import API, TOOL, InspectedHarness, Reader, get, inspected, only_session
from .memory import Exchange, scope
from .serving import MODEL, serving

ROUTES = ("server", "sessions", "sessions/s0", "turns/t", "turns/t/prompt", "turns/t/prompt/tokens", "difference",
          "export", "events")  # fmt: skip


async def test_off_is_a_404_with_the_cure_and_nothing_is_recorded() -> None:
    async with serving({}) as served:
        for path in ("/inspect", "/inspect/", "/inspect/page/inspector.js", *(f"{API}/{r}" for r in ROUTES)):
            reply = await served.client.get(path)
            assert reply.status == 404, path
            assert "serve --inspect" in reply.json["error"]["message"]
        asked = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        reply = await served.client.post("/v1/messages", asked)
        assert "x-singletree-inspect" not in reply.headers
        assert served.service.inspector is None


async def test_the_page_loads_nothing_from_elsewhere() -> None:
    async with inspected() as served:
        for path in ("/inspect", "/inspect/", "/inspect/page/inspector.js", "/inspect/page/inspector.css"):
            reply = await served.client.get(path)
            assert reply.status == 200
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
        html = (await served.client.get("/inspect")).body.decode()
        assert '<div id="app"></div>' in html
        assert "<script>" not in html
        for name in ("..%2f__init__.py", "%2e%2e", "__init__.py", ".keep", "none.js"):
            assert (await served.client.get(f"/inspect/page/{name}")).status == 404


async def test_without_a_key_it_answers_on_this_machine_only() -> None:
    async with inspected() as served:
        for address, status in (
            ("127.0.0.1", 200),
            ("::1", 200),
            ("::ffff:127.0.0.1", 200),
            ("10.0.0.9", 403),
        ):
            assert await _status_for(served.client.app, address) == status
        assert await _status_for(served.client.app, None) == 403


async def _status_for(app: object, address: str | None) -> int:
    exchange = Exchange(b"")
    asked = scope("GET", f"{API}/server", {}, b"") | {"client": address and (address, 1)}
    await app(asked, exchange.receive, exchange.send)  # type: ignore[operator]
    assert exchange.status is not None
    return exchange.status


async def test_with_keys_every_answer_needs_one() -> None:
    async with inspected(api_key=("secret",)) as served:
        for route in ROUTES:
            assert (await served.client.get(f"{API}/{route}")).status == 401
            wrong = await served.client.get(f"{API}/{route}", headers={"authorization": "Bearer wrong"})
            assert wrong.status == 401
        assert (await get(served.client, "server", authorization="Bearer secret"))["content"]
        assert (await served.client.get("/inspect")).status == 200


async def test_without_content_no_text_is_kept() -> None:
    secret = "cardamom"
    script = (
        f"{secret} <tool_call>\n" + json.dumps({"name": "ls", "arguments": {"p": secret}}) + "\n</tool_call>"
    )
    tool = {**TOOL, "description": secret}
    async with inspected({"call": script}, content=False) as served:
        main = InspectedHarness(served.client)
        for n in range(2):
            await main.ask(f"{secret} [[script:call]]", tools=[tool], system=f"{secret} {n}", stream=n == 1)
        document = await only_session(served.client)
        found = [document]
        for turn in document["turns"]:
            found += [
                await get(served.client, f"turns/{turn['id']}"),
                await get(served.client, f"turns/{turn['id']}/prompt"),
            ]
        ids = [turn["id"] for turn in document["turns"]]
        found.append(await get(served.client, f"difference?a={ids[0]}&b={ids[1]}"))
        html = (await served.client.get(f"{API}/export?session=s")).body.decode()
        reply = await served.client.get(f"{API}/turns/{ids[0]}/prompt/tokens")
        assert reply.status == 404
        assert "--inspect-content" in reply.json["error"]["message"]
        assert isinstance(served.service.inspector, Inspector)
        memory = pickle.dumps(served.service.inspector.sessions())
    assert document["turns"][1]["course"] == "broken"
    assert document["turns"][1]["break"]["was"] is None
    assert secret not in json.dumps(found)
    assert secret not in html
    assert secret.encode() not in memory
    turn, prompt = found[3], found[4]
    assert turn["tokens"]["id"] is None
    assert turn["tokens"]["count"] == len(turn["tokens"]["ms"]) > 0
    assert all(event["data"] is None and event["bytes"] for event in turn["wire"])
    assert (prompt["exact"], prompt["request"]["body"]) == (False, None)
    assert [span["kind"] for span in prompt["spans"]].count("rerendered") >= 1
    assert [message["role"] for message in prompt["messages"]] == ["system", "user", "assistant", "user"]


async def test_events_come_while_a_turn_runs() -> None:
    engine = EngineByHand()
    async with inspected(engine=engine) as served, Reader(served.client) as reader:
        assert await reader.next() == ("hello", {"now": pytest.approx(0, abs=1e12), "sessions": []})
        asking = asyncio.create_task(InspectedHarness(served.client).ask("hello"))
        begun, _ = await reader.until("running")
        assert begun["session"]["running"] == 1
        engine.emit(Chunk((65,), cached_tokens=0))
        name, grown = await reader.next()
        assert (name, grown["turn"]["tokens"]["generated"]) == ("turn", 1)
        engine.emit(Chunk((66,), "stop"))
        await asking
        done, _ = await reader.until("done")
        assert done["turn"]["id"] == begun["turn"]["id"]
        assert (done["session"]["running"], done["session"]["generated_tokens"]) == (0, 2)


async def test_events_of_one_session_only() -> None:
    async with inspected() as served, Reader(served.client, f"{API}/events?session=b") as reader:
        await reader.next()
        for name in "aba":
            await InspectedHarness(served.client, name).ask("hello")
        done, before = await reader.until("done")
        assert done["session"]["key"] == "b"
        assert {each["session"]["key"] for each in before} <= {"b"}


async def test_a_page_that_does_not_read_holds_up_no_agent() -> None:
    async with inspected() as served, Reader(served.client) as reader:
        await reader.next()
        reader.exchange.stop_reading()
        main = InspectedHarness(served.client)
        for n in range(20):
            await main.ask(f"step {n}")
        await asyncio.sleep(0.25)
        for n in range(20):
            await main.ask(f"step {n}")
        reader.exchange.read_on()
        last = (await only_session(served.client))["turns"][-1]["id"]
        seen = set()
        while last not in seen:
            name, data = await reader.next()
            assert name == "turn"
            seen.add(data["turn"]["id"])
        inspector = served.service.inspector
        assert isinstance(inspector, Inspector)
    assert not inspector.changes  # the reader is gone


async def test_a_shut_down_ends_the_event_stream() -> None:
    async with inspected() as served, Reader(served.client) as reader:
        await reader.next()
        served.service.shutdown.set()
        assert await reader.exchange.rest() == b""
