"""What one key made, another key neither sees, nor changes, nor measures; the operator's key sees the sessions."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from singletree.foresight import Foresight
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.http.route_table import routes_of
from singletree.server.http.service import Service
from singletree.server.models.model import Model
from singletree.testing.scripts import Script

from .carrying import capsules
from .memory import Client, Reply, events
from .owning import KEYS, tenants
from .serving import MODEL, Served
from .test_websocket import connected

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
THOUGHT = "<think>\nA secret thought.\n</think>\n\nPlain answer."
SCRIPTS: dict[str, str | Script] = {"t": THOUGHT, "slow": Script("Slow. " * 40, delay=0.005)}
QUESTION = "Same question? [[script:t]]"


async def chat(of: Client, *contents: str, **headers: str) -> Reply:
    """A request on Chat Completions: questions and answers by turns, without reasoning."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)
    ]
    reply = await of.post(CHAT, {"model": MODEL, "messages": messages}, headers)
    assert reply.status == 200, reply.body
    return reply


async def stored(of: Client, **more: Any) -> Any:
    """A stored response."""
    reply = await of.post(RESPONSES, {"model": MODEL, "input": QUESTION, **more})
    assert reply.status == 200, reply.body
    return reply.json


def prompt(served: Served, number: int = -1) -> str:
    """A prompt that the engine got."""
    return served.model.tokenizer.decode(served.engine.log[number].prompt_token_ids)


SHARED = {"config", "tracing", "records", "budgets", "keys", "shutdown", "admission", "_parts"}
"""Fields of ``Service`` that remember nothing of requests that a client could ask for."""

SHARED_OF_A_MODEL = {
    "template", "family", "why", "stability_off", "layout", "restore_reasoning", "thinking", "eyes",
    "blindness", "names", "context_window", "max_output_tokens", "created", "card", "profiles", "aliases", "unloading",
}  # fmt: skip
"""Fields of ``Model`` that are the same for all requests."""


async def test_each_memory_of_a_service_and_of_a_model_has_a_part_for_each_owner(tmp_path: Path) -> None:
    async with tenants(flags={"inspect": True, "capture": tmp_path}, capsules=capsules()) as many:
        whole = many.served.service
        a, b = (whole.of(owner) for owner in whole.keys.owners)
        # It is opened for the first request that needs it, for each owner by itself.
        whole.foresight = Foresight()
        whole.of("another")
        assert whole.of("another").foresight is None
        memories = {each.name for each in fields(Service)} - SHARED - {"others", "foresight"}
        assert memories >= {
            "sessions",
            "store",
            "jobs",
            "in_flight",
            "inspector",
            "media",
            "catalog",
        }
        for name in memories:
            parts = [getattr(service, name) for service in (whole, a, b)]
            assert len({id(part) for part in parts}) == 3, name
        models = [service.catalog.get(MODEL) for service in (whole, a, b)]
        own = {each.name for each in fields(Model) if each.init} - SHARED_OF_A_MODEL
        assert own == {"engine", "tokenizer", "memory", "prompt_cache", "capsules", "others"}
        for name in own:
            assert len({id(getattr(model, name)) for model in models}) == 3, name
        assert (whole.of(a.owner), a.catalog.get(MODEL)) == (a, models[1]), "they are made once"


@pytest.mark.parametrize("flags", [{"api_key": ()}, {"api_key": ("k",)}, {"share_between_keys": True}])
async def test_with_one_owner_nothing_is_taken_apart(flags: dict[str, Any]) -> None:
    async with tenants(flags=flags) as many:
        service = many.served.service
        assert service.keys.owners == ()
        assert {key.owner for key in service.keys._known()} == {""}
        assert service.of("") is service
        assert service.catalog.get(MODEL) is many.served.model
        assert service.describe_owners() == []


async def test_keys_that_share_remember_together() -> None:
    async with tenants(SCRIPTS, {"share_between_keys": True}) as many:
        made = await stored(many.a)
        assert (await many.b.get(f"{RESPONSES}/{made['id']}")).json == made
        await chat(many.a, QUESTION)
        await chat(many.b, QUESTION, "Plain answer.", "And now? [[script:t]]")
        assert "A secret thought." in prompt(many.served)


async def test_reasoning_does_not_go_to_who_asks_the_same() -> None:
    async with tenants(SCRIPTS) as many:
        await chat(many.a, QUESTION)
        for who, knows in ((many.b, False), (many.admin, False), (many.a, True)):
            await chat(who, QUESTION, "Plain answer.", "And now? [[script:t]]")
            assert ("A secret thought." in prompt(many.served)) is knows


@pytest.mark.parametrize("salt", ["", "salt of mine"])
@pytest.mark.parametrize("session", ["", "main"])
async def test_nobody_measures_what_others_asked(session: str, salt: str) -> None:
    """By the session's report, by the engine's cache, or by the count of cached tokens."""
    headers = ({"x-session-id": session} if session else {}) | (
        {"x-singletree-cache-salt": salt} if salt else {}
    )
    async with tenants(SCRIPTS) as many:
        a = many.a
        for who, found in ((a, False), (many.b, False), (many.admin, False), (a, True), (many.b, True)):
            reply = await chat(who, QUESTION, **headers)
            assert (int(reply.headers["x-singletree-matched-tokens"]) > 0) is found
            details = reply.json["usage"].get("prompt_tokens_details") or {}
            assert (details.get("cached_tokens", 0) > 0) is found
        salts = [play.cache_salt for play in many.served.engine.log]
        assert len(set(salts)) == 3
        assert not any(key in each for key in KEYS for each in salts)


@pytest.mark.parametrize("session", ["", "main"])
async def test_within_a_key_a_salt_keeps_what_is_measured_apart(session: str) -> None:
    """As the engine's prefix cache does: what is matched is what the engine should have."""
    named = {"x-session-id": session} if session else {}
    async with tenants(SCRIPTS) as many:
        found = []
        for salt in ("one", "two", "", "one", "two", ""):
            headers = named | ({"x-singletree-cache-salt": salt} if salt else {})
            reply = await chat(many.a, QUESTION, **headers)
            details = reply.json["usage"].get("prompt_tokens_details") or {}
            cached, matched = details.get("cached_tokens", 0), reply.headers["x-singletree-matched-tokens"]
            assert (cached > 0) is (int(matched) > 0)
            found.append(cached > 0)
        assert found == [False] * 3 + [True] * 3


async def test_a_session_is_shown_to_its_key_and_to_the_operator() -> None:
    async with tenants(SCRIPTS) as many:
        for name, who in (("a", many.a), ("b", many.b)):
            await chat(who, QUESTION, **{"x-session-id": "main"})
            await chat(who, f"Another one of {name}. [[script:t]]")
        path = "/v1/singletree/sessions"
        of_a, of_b, of_all = [
            [each["id"] for each in (await who.get(path)).json["data"]]
            for who in (many.a, many.b, many.admin)
        ]
        assert "main" in of_a
        assert "main" in of_b
        assert (len(of_a), len(of_b), len(set(of_all))) == (2, 2, 4)
        assert (await many.nobody.get(path)).status == 401
        for id in of_all:
            report = await many.admin.get(f"{path}/{id}")
            assert (report.status, report.json["id"]) == (200, id)
            assert (await many.b.get(f"{path}/{id}")).status == 404
        nameless = next(id for id in of_a if id != "main")
        assert (await many.a.get(f"{path}/{nameless}")).status == 200
        assert (await many.b.get(f"{path}/{nameless}")).status == 404


async def made_by(a: Client) -> dict[str, list[str]]:
    """All that ``a`` made and that has an id: by the beginning of the routes' paths."""
    response, job = await stored(a), await stored(a, background=True)
    conversation = (await a.post("/v1/conversations", {"items": [{"role": "user", "content": "Hm."}]})).json[
        "id"
    ]
    [item] = (await a.get(f"/v1/conversations/{conversation}/items")).json["data"]
    await chat(a, QUESTION, **{"x-session-id": "main"})
    listed = (await a.get("/inspect/api/sessions?q=main")).json["sessions"]
    session = (await a.get(f"/inspect/api/sessions/{listed[0]['id']}")).json
    id, turn = session["session"]["id"], session["turns"][0]["id"]
    return {
        "/v1/responses/": [response["id"], job["id"]],
        "/v1/conversations/": [conversation, item["id"]],
        "/v1/singletree/sessions/": ["main"],
        "/inspect/api/sessions/": [id],
        "/inspect/api/turns/": [turn],
        "/inspect/api/difference": [turn],
        "/inspect/api/export": [id],
    }


QUERIES = {"/inspect/api/difference": "?a={id}&b={id}", "/inspect/api/export": "?session={id}"}
FOR_ALL = (
    "/v1/models",
    "/inspect/page",
    "/inspect/{rest",
    "/v1/responses/compact",
    "/v1/responses/input_tokens",
)
"""Beginnings of routes that show the same to everybody, or take no id in their path."""


async def test_no_route_knows_an_id_of_another_key() -> None:
    """Each answers exactly as for an id that nobody has."""
    flags = {"inspect": True, "inspect_content": True}
    async with tenants(SCRIPTS, flags) as many:
        made = await made_by(many.a)
        walked = 0
        routed = [(row.method, row.path) for row in routes_of(many.served.service) if row.scope != "open"]
        for method, route in routed:
            ids = next((ids for start, ids in made.items() if route.startswith(start)), None)
            if ids is None or route.startswith(FOR_ALL):
                assert "{" not in route or route.startswith(FOR_ALL), (
                    f"{route} takes an id: add what it names"
                )
                continue
            given = {"metadata": {}, "items": [{"role": "user", "content": "x"}]} if method == "POST" else b""
            path = (route + QUERIES.get(route, "")).replace("{id:path}", "{id}").replace("{item}", ids[-1])
            for id in ids[:1] if "{item}" in route else ids:
                asked = path.replace("{id}", id), path.replace("{id}", nobodys(id))
                theirs, unknown = [await many.b.request(method, each, given) for each in asked]
                assert theirs.status in (404, 400), (method, asked, theirs.body)
                reported = [reply.body.decode().replace(nobodys(id), id) for reply in (theirs, unknown)]
                assert (theirs.status, reported[0]) == (unknown.status, reported[1]), (method, asked)
                walked += 1
        assert walked >= 20
        for kind in ("response", "conversation"):
            for id in made[f"/v1/{kind}s/"][: 2 if kind == "response" else 1]:
                assert (await many.a.get(f"/v1/{kind}s/{id}")).status == 200, "nothing was deleted"
        assert (await many.a.get("/inspect/api/sessions")).json["total"] > 0


def nobodys(id: str) -> str:
    """An id of the same form that nobody has."""
    return id[:-4] + ("0000" if id[-4:] != "0000" else "1111") if len(id) > 8 else "none"


async def test_no_request_goes_on_from_what_another_key_stored() -> None:
    async with tenants(SCRIPTS) as many:
        made = await stored(many.a)
        item = made["output"][-1]["id"]
        conversation = (await many.a.post("/v1/conversations", {})).json["id"]
        for fields_, status in (
            ({"previous_response_id": made["id"]}, 400),
            ({"conversation": conversation}, 404),
            ({"input": [{"type": "item_reference", "id": item}]}, 400),
        ):
            body = {"model": MODEL, "input": "Go on. [[script:t]]", **fields_}
            theirs, own = [await who.post(RESPONSES, body) for who in (many.b, many.a)]
            assert own.status == 200, own.body
            unknown = json.loads(json.dumps(body).replace(made["id"], nobodys(made["id"])))
            for name in (item, conversation):
                unknown = json.loads(json.dumps(unknown).replace(name, nobodys(name)))
            nobody = await many.b.post(RESPONSES, unknown)
            assert (theirs.status, nobody.status) == (status, status), theirs.body
            text = nobody.body.decode()
            for name in (made["id"], item, conversation):
                text = text.replace(nobodys(name), name)
            assert theirs.body.decode() == text


async def test_an_item_of_another_key_with_the_same_id_takes_nothing_over() -> None:
    async with tenants(SCRIPTS) as many:
        made = await stored(many.a)
        stolen = {**made["output"][-1], "content": [{"type": "output_text", "text": "Forged."}]}
        await stored(
            many.b, input=[{"role": "user", "content": "x"}, stolen, {"role": "user", "content": QUESTION}]
        )
        reference = [{"type": "item_reference", "id": stolen["id"]}, {"role": "user", "content": QUESTION}]
        await stored(many.a, input=reference)
        assert "Forged." not in prompt(many.served)
        assert "Plain answer." in prompt(many.served)


async def test_a_running_response_is_cancelled_by_its_key_only() -> None:
    async with tenants(SCRIPTS) as many:
        made = await stored(many.a, input="[[script:slow]]", background=True, stream=False)
        for who in (many.b, many.admin):
            assert (await who.post(f"{RESPONSES}/{made['id']}/cancel", b"")).status == 404
            assert (await who.request("DELETE", f"{RESPONSES}/{made['id']}")).status == 404
            assert (await who.get(f"{RESPONSES}/{made['id']}?stream=true")).status == 404
        assert (await many.a.get(f"{RESPONSES}/{made['id']}")).json["status"] == "in_progress"
        cancelled = await many.a.post(f"{RESPONSES}/{made['id']}/cancel", b"")
        assert cancelled.json["status"] == "cancelled"


async def test_an_equal_request_of_another_key_cancels_none() -> None:
    async with tenants(SCRIPTS) as many:
        headers = {"idempotency-key": "k"}
        body = {"model": MODEL, "messages": [{"role": "user", "content": "[[script:slow]]"}], "stream": True}
        async with many.a.open("POST", CHAT, body, headers) as (first, _):
            await first.started.wait()
            await many.b.post(CHAT, body, headers)
            assert b'"finish_reason":"stop"' in await first.rest()


async def test_an_answer_of_another_key_is_not_compared_with() -> None:
    async with tenants(SCRIPTS) as many:
        asked = {"model": MODEL, "max_tokens": 99, "messages": [{"role": "user", "content": QUESTION}]}
        first = (await many.a.post(MESSAGES, asked)).json
        again = {**asked, "diagnostics": {"previous_message_id": first["id"]}}
        written = [(await who.post(MESSAGES, again)).json["diagnostics"] for who in (many.b, many.a)]
        unknown = {**asked, "diagnostics": {"previous_message_id": "msg_none"}}
        assert written[0] == (await many.b.post(MESSAGES, unknown)).json["diagnostics"]
        assert written[0] != written[1]


async def test_a_websocket_belongs_to_its_key() -> None:
    async with tenants(SCRIPTS) as many:
        made = await stored(many.a)
        async with connected(many.served, **{"x-api-key": KEYS[1]}) as other:
            other.create("Go on.", previous_response_id=made["id"])
            assert (await other.event())["error"]["code"] == "previous_response_not_found"
        async with connected(many.served, **{"x-api-key": KEYS[0]}) as own:
            own.create("Go on. [[script:t]]", previous_response_id=made["id"])
            assert (await own.response())["status"] == "completed"
        assert "A secret thought." in prompt(many.served)


async def test_a_compacted_conversation_is_read_by_its_key_only() -> None:
    async with tenants(SCRIPTS, capsules=capsules()) as many:
        made = await many.a.post(
            "/v1/responses/compact", {"model": MODEL, "input": [{"role": "user", "content": QUESTION}]}
        )
        assert made.status == 200, made.body
        for who, reads in ((many.b, False), (many.a, True)):
            items = [*made.json["output"], {"role": "user", "content": "On. [[script:t]]"}]
            await stored(who, input=items)
            assert ("Plain answer." in prompt(many.served)) is reads


async def test_the_inspector_shows_a_key_its_own_turns() -> None:
    flags = {"inspect": True, "inspect_content": True}
    async with tenants(SCRIPTS, flags) as many:
        for who in (many.a, many.b):
            await chat(who, QUESTION, **{"x-session-id": "main"})
        api = "/inspect/api"
        lists = [(await who.get(f"{api}/sessions")).json for who in (many.a, many.b, many.admin)]
        assert [each["total"] for each in lists] == [1, 1, 2]
        of_a, of_b = [each["sessions"][0]["id"] for each in lists[:2]]
        assert of_a != of_b
        for id in (of_a, of_b):
            for path in (f"sessions/{id}", f"export?session={id}"):
                assert (await many.admin.get(f"{api}/{path}")).status == 200
        assert (await many.b.get(f"{api}/export?session=main")).status == 200, (
            "a name is that of the key's own"
        )
        used = [(await who.get(f"{api}/server")).json["used_bytes"] for who in (many.a, many.b, many.admin)]
        assert used[0] + used[1] <= used[2]
        assert (await many.nobody.get(f"{api}/sessions")).status == 401


async def test_metrics_have_no_names_of_sessions_and_owners() -> None:
    async with tenants(SCRIPTS) as many:
        await chat(many.a, QUESTION, **{"x-session-id": "name-of-a-session"})
        shown = (await many.nobody.get("/metrics")).body.decode()
        assert "name-of-a-session" not in shown
        assert not any(owner in shown for owner in many.served.service.keys.owners)


async def test_a_stream_and_a_stored_stream_belong_to_their_key() -> None:
    async with tenants(SCRIPTS) as many:
        body = {"model": MODEL, "input": QUESTION, "background": True, "stream": True}
        streamed = await many.a.post(RESPONSES, body)
        id = events(streamed.body)[0][1]["response"]["id"]
        assert (await many.a.get(f"{RESPONSES}/{id}?stream=true")).body == streamed.body
        assert (await many.b.get(f"{RESPONSES}/{id}?stream=true")).status == 404


async def test_one_limit_holds_for_all_keys() -> None:
    memory = TurnMemory(6000)
    async with tenants(SCRIPTS, {"session_memory": 20_000}, memory=memory) as many:
        for number in range(12):
            for who in (many.a, many.b):
                await chat(who, f"{number} {QUESTION}", **{"x-session-id": f"s{number}"})
        sessions = many.served.service.sessions
        assert 0 < memory.bytes <= 6000
        assert 0 < sessions._sessions.bytes <= 20_000
        owners = [many.served.service.of(owner).sessions for owner in many.served.service.keys.owners]
        assert sum(len(list(each)) for each in owners) == len(list(sessions)) < 24
        assert sum(each._sessions.bytes for each in owners) == sessions._sessions.bytes


async def test_a_part_that_cannot_be_made_is_not_kept_half_made(tmp_path: Path) -> None:
    async with tenants(flags={"capture": tmp_path}) as many:
        whole = many.served.service
        owner = whole.keys.owners[0]
        whole._parts.clear()
        blocked = tmp_path / owner
        if blocked.is_dir():
            blocked.rmdir()
        blocked.write_bytes(b"")
        for _ in range(2):
            with pytest.raises(FileExistsError):
                whole.of(owner)
        blocked.unlink()
        assert whole.of(owner).media is not whole.media
