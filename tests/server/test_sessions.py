"""Sessions: whose request it is, from which of their lines it goes on, and how much of them is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from singletree.conversation import Conversation, Request, Text, Turn
from singletree.engines.engine import Chunk
from singletree.lru import ENTRY_BYTES
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.protocols import chat, messages, responses
from singletree.server.sessions.divergence import PromptRecord
from singletree.server.sessions.request_headers import session_key
from singletree.server.settings.config import Config

from .by_hand import EngineByHand
from .serving import MODEL, TEMPLATE, TOKENIZER, Served, body, serving

LAYOUT = TEMPLATE.layout(TOKENIZER)
SESSIONS = "/v1/singletree/sessions"
CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
TOOL = {"name": "ls", "description": "lists", "input_schema": {"type": "object"}}

Body = dict[str, Any]


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({"x-claude-code-session-id": "u1"}, "u1"),
        ({"x-claude-code-session-id": "u1", "x-claude-code-agent-id": "a0"}, "u1/a0"),
        ({"x-claude-code-agent-id": "a0"}, None),
        ({"session-id": "u2", "thread-id": "u2", "x-client-request-id": "u2"}, "u2"),
        ({"session-id": "u2", "thread-id": "t3"}, "u2/t3"),
        ({"thread-id": "t3"}, "t3"),
        ({"session_id": "pi", "x-client-request-id": "r"}, "pi"),
        ({"x-session-affinity": "ses_1", "x-session-id": "ses_1"}, "ses_1"),
        ({"x-session-affinity": "ses_1"}, "ses_1"),
        ({"x-dynamo-session-id": "d"}, "d"),
        ({"x-grok-session-id": "g", "x-grok-conv-id": "c"}, "g/c"),
        ({"x-grok-session-id": "g", "x-grok-conv-id": "g"}, "g"),
        ({"x-grok-conv-id": "c"}, "c"),
        ({"agent-session-id": "a"}, "a"),
        ({"x-affinity": "b"}, "b"),
        ({"x-singletree-session": "mine", "x-claude-code-session-id": "u1"}, "mine"),
        ({"x-singletree-session": "  "}, None),
        ({"x-session-id": "x" * 1000}, "x" * 256),
        ({"traceparent": "00-1-2-01"}, None),
    ],
)
def test_the_headers_of_every_harness(headers: Mapping[str, str], key: str | None) -> None:
    conversation = Conversation((Turn("user", (Text("hi"),)),))
    assert session_key(headers, Request("m", conversation)) == key
    assert session_key(headers, Request("m", conversation, session="body")) == (key or "body")


def test_the_fields_of_every_protocol() -> None:
    history = {"messages": [{"role": "user", "content": "x"}], "model": "m", "max_tokens": 5}
    claude = {"metadata": {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": "u1"})}}
    older = {"metadata": {"user_id": "user_0a_account__session_0a1b2c3d-0000"}}
    other = {"metadata": {"user_id": "somebody"}}
    for fields, key in ((claude, "u1"), (older, "0a1b2c3d-0000"), (other, "somebody"), ({}, None)):
        assert messages.decode(json.dumps(history | fields).encode()).session == key
    assert chat.decode(json.dumps(history | {"prompt_cache_key": "k"}).encode()).session == "k"
    for given, key in (
        ({"agent_context": {"session_id": "run", "trajectory_id": "run:a"}}, "run/run:a"),
        ({"agent_context": {"session_id": "run"}}, "run"),
    ):
        assert chat.decode(json.dumps(history | {"nvext": given}).encode()).session == key
    asked = {"model": "m", "input": "x", "prompt_cache_key": "k"}
    assert responses.decode(json.dumps(asked).encode()).session == "k"


class Harness:
    """A client on Messages with one session. ``said`` are its messages."""

    def __init__(self, served: Served, first: str, headers: Mapping[str, str] | None = None) -> None:
        self._served = served
        self._headers = {
            "x-singletree-explain": "1",
            **({"x-session-id": "s"} if headers is None else headers),
        }
        self.messages: list[Body] = [{"role": "user", "content": first}]

    async def send(self, messages: list[Body], **more: Any) -> tuple[list[Any], dict[str, str]]:
        asked = {"model": MODEL, "max_tokens": 200, "messages": messages, **more}
        reply = await self._served.client.post("/v1/messages", asked, headers=self._headers)
        assert reply.status == 200, reply.body
        return json.loads(reply.body)["content"], dict(reply.headers)

    async def go_on(self, text: str = "", **more: Any) -> str:
        """One turn, and then a question; how its prompt went on."""
        content, headers = await self.send(self.messages, **more)
        self.messages += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": text or "more"},
        ]
        return headers["x-singletree-course"]


def remembering(**more: Any) -> Any:
    return serving({"call": CALL}, memory=TurnMemory(2**20), layout=LAYOUT, **more)


async def test_a_session_is_only_appended_to() -> None:
    async with remembering() as served:
        main = Harness(served, "hi")
        assert [await main.go_on() for _ in range(5)] == ["first", *["appended"] * 4]
        reported = (await served.client.get(f"{SESSIONS}/s")).json
        log = list(served.engine.log)
    for before, step, after in zip([None, *log], reported["steps"], log, strict=False):
        assert step["prompt_tokens"] == len(after.prompt_token_ids)
        assert step["cached_tokens"] == after.cached_tokens
        assert step["generated_tokens"] == len(after.token_ids)
        if before is not None:
            whole = [*before.prompt_token_ids, *before.token_ids]
            assert list(after.prompt_token_ids)[: step["matched_tokens"]] == whole[: step["matched_tokens"]]
            assert step["matched_tokens"] >= len(whole) - 1
    assert (reported["requests"], reported["lines"], reported["breaks"], reported["lost_tokens"]) == (
        5,
        1,
        0,
        0,
    )


async def test_side_requests_break_nothing() -> None:
    """Titles, searches and sub-agents come under the session's name."""
    async with remembering() as served:
        main = Harness(served, "hi")
        courses = []
        for n in range(4):
            courses.append(await main.go_on(f"step {n}"))
            side = Harness(served, f"a title for {n}")
            assert await side.go_on(system="You write titles.") == "first"
            again = [*main.messages[:-1], {"role": "user", "content": "In short?"}]
            _, headers = await main.send(again)
            assert headers["x-singletree-course"] == "appended"
        assert courses == ["first", "back", "back", "back"]
        metrics = (await served.client.get("/metrics")).body.decode()
    assert 'course="broken"' not in metrics
    assert "singletree_prefix_lost_tokens_total{" not in metrics


async def test_a_title_that_is_asked_for_first_is_a_line_of_its_own() -> None:
    """OpenCode asks with the words of the task before it begins with the task."""
    async with remembering() as served:
        assert await Harness(served, "mend it").go_on(system="You write titles.") == "first"
        main = Harness(served, "mend it")
        assert [await main.go_on(system="You write code.") for _ in range(3)] == [
            "first",
            "appended",
            "appended",
        ]


async def test_sub_agents_that_run_side_by_side() -> None:
    async with remembering() as served:
        agents = [Harness(served, f"task {n}") for n in range(4)]
        for turn in range(3):
            for agent in agents:
                course = await agent.go_on(system="You are an agent.")
                assert course == ("appended" if turn else "first")


async def test_forks_and_retries_lose_nothing() -> None:
    async with remembering() as served:
        main = Harness(served, "hi")
        await main.go_on("one")
        fork = list(main.messages)
        await main.go_on("two")
        await main.go_on("three")
        _, headers = await main.send([*fork[:-1], {"role": "user", "content": "another way"}])
        assert (headers["x-singletree-course"], headers["x-singletree-lost-tokens"]) == ("back", "0")
        assert await main.go_on() == "appended"
        _, headers = await main.send(main.messages[:-2])
        assert headers["x-singletree-course"] == "back"


async def test_a_prompt_that_is_sent_again_is_kept_once() -> None:
    async with remembering() as served:
        main = Harness(served, "hi")
        for _ in range(3):
            await main.send(main.messages)
        (session,) = served.service.sessions
        first, *others = [record.prompt for record in session.records.values()]
        assert len(others) == 2
        assert all(each is first for each in others)


async def test_what_is_left_of_a_compacted_session_is_a_new_line() -> None:
    async with remembering() as served:
        main = Harness(served, "hi")
        for _ in range(3):
            await main.go_on(system="Be good.")
        main.messages = [{"role": "user", "content": "Summary: they said hi."}]
        assert await main.go_on(system="Be good.") == "first"
        assert await main.go_on(system="Be good.") == "appended"
        (reported,) = (await served.client.get(SESSIONS)).json["data"]
    assert (reported["requests"], reported["lines"], reported["breaks"]) == (5, 2, 0)


async def test_sessions_without_a_name_are_identified_by_their_prompts() -> None:
    async with remembering() as served:
        clients = [Harness(served, f"task {n}", {}) for n in range(3)]
        for turn in range(3):
            for client in clients:
                assert await client.go_on() == ("appended" if turn else "first")
        listed = (await served.client.get(SESSIONS)).json["data"]
    assert [each["requests"] for each in listed] == [3, 3, 3]
    assert all(each["id"].startswith("nameless-") for each in listed)


async def test_a_request_is_compared_with_its_own_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[int]()
    matched = PromptRecord.matched

    def noting(record: PromptRecord, tokens: bytes) -> int:
        compared.append(len(tokens))
        return matched(record, tokens)

    monkeypatch.setattr(PromptRecord, "matched", noting)
    async with remembering() as served:
        clients = [Harness(served, f"task {n}", {"x-session-id": f"{n}"}) for n in range(60)]
        for turn in range(2):
            for client in clients:
                assert await client.go_on() == ("appended" if turn else "first")
    assert len(compared) == len(clients), (
        "one comparison for each second turn, whatever the number of sessions"
    )


async def test_a_session_without_a_name_is_found_while_it_is_used() -> None:
    async with remembering() as served:
        old = Harness(served, "one of many tasks, the old one", {})
        await old.go_on()
        for n in range(40):
            await Harness(served, f"one of many tasks, number {n}", {}).go_on()
            if n % 10 == 0:
                assert await old.go_on() == "appended"


async def test_strange_text_is_compared_like_any_other() -> None:
    strange = "\ud83d \u0000 <|im_start|> <|im_end|>"
    function = {"name": "ls", "description": strange, "parameters": {"type": "object", "title": strange}}
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": strange}],
        "tools": [{"type": "function", "function": function}],
        "prompt_cache_key": strange,
    }
    async with remembering() as served:
        for _ in range(2):
            reply = await served.client.post("/v1/chat/completions", json.dumps(asked).encode())
            assert reply.status in (200, 400), reply.body
        assert (await served.client.get(SESSIONS)).status == 200


async def test_two_that_go_on_from_one_line_at_once() -> None:
    engine = EngineByHand()
    async with serving(engine=engine, layout=LAYOUT, memory=TurnMemory(2**20)) as served:
        main = Harness(served, "hi")
        engine.emit(Chunk((65,), "stop", cached_tokens=0))
        await main.go_on()
        both = [[*main.messages[:-1], {"role": "user", "content": text}] for text in ("one way", "other way")]
        asking = [asyncio.create_task(main.send(written)) for written in both]
        await asyncio.sleep(0.01)
        for _ in both:
            engine.emit(Chunk((66,), "stop"))
        answers = await asyncio.gather(*asking)
        assert [headers["x-singletree-course"] for _, headers in answers] == ["appended", "appended"]
        for written, (content, _) in zip(both, answers, strict=True):
            engine.emit(Chunk((67,), "stop"))
            on = [*written, {"role": "assistant", "content": content}, {"role": "user", "content": "x"}]
            _, headers = await main.send(on)
            assert headers["x-singletree-course"] == "appended"


async def test_a_client_that_left_has_no_turn_to_go_on_from() -> None:
    engine = EngineByHand()
    async with serving(engine=engine, layout=LAYOUT, memory=TurnMemory(2**20)) as served:
        asked = body("/v1/messages", "hi")
        async with served.client.open("POST", "/v1/messages", asked, headers={"x-session-id": "s"}) as (
            exchange,
            _,
        ):
            engine.emit(Chunk((65,), cached_tokens=0))
            await asyncio.sleep(0.01)
            exchange.leave()
        engine.emit(Chunk((66,), "stop", cached_tokens=3))
        _, headers = await Harness(served, "hi").send([{"role": "user", "content": "hi"}])
    assert headers["x-singletree-course"] == "appended"
    assert headers["x-singletree-cached-tokens"] == "3"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
async def test_headers_on_request_or_by_flag(path: str, stream: bool) -> None:
    wanted = {
        "session",
        "course",
        "prompt-tokens",
        "matched-tokens",
        "new-tokens",
        "cached-tokens",
        "lost-tokens",
        # The headers of a stream are sent before its end.
        *(() if stream else ("receipt",)),
    }

    def reported(headers: Mapping[str, str]) -> set[str]:
        return {name.removeprefix("x-singletree-") for name in headers if name.startswith("x-singletree-")}

    asked = body(path, "hi", stream=stream)
    async with serving() as served:
        assert reported((await served.client.post(path, asked)).headers) == set()
        fields = {"x-singletree-explain": "1", "x-session-id": "a\xff b"}
        headers = (await served.client.post(path, asked, headers=fields)).headers
        assert reported(headers) == wanted
        assert headers["x-singletree-session"].isascii()
    async with serving(config=Config(explain=True)) as served:
        assert reported((await served.client.post(path, asked)).headers) == wanted


async def test_the_log_reports_numbers_and_no_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "singletree.requests")
    async with remembering() as served:
        main = Harness(served, "SECRET hi", {"x-session-id": "a b\n"})
        await main.go_on("SECRET")
        main.messages[0]["content"] = "SECRET ho"
        await main.go_on("SECRET")
    lines = [record.getMessage() for record in caplog.records]
    assert "session=a_b matched=0" in lines[0]
    assert "break=message_changed lost=" in lines[1]
    assert not any("SECRET" in line or "\n" in line for line in lines)


async def test_paths_of_sessions_take_a_key_and_name_what_they_do_not_know() -> None:
    async with serving(config=Config(api_key=("k",))) as served:
        for path in (SESSIONS, f"{SESSIONS}/s"):
            assert (await served.client.get(path)).status == 401
        key = {"x-api-key": "k"}
        assert (await served.client.get(SESSIONS, headers=key)).json["data"] == []
        reply = await served.client.get(f"{SESSIONS}/u1/a0", headers=key)
        assert reply.status == 404
        assert "'u1/a0'" in reply.json["error"]["message"]
        asked = {"x-claude-code-session-id": "u1", "x-claude-code-agent-id": "a0", **key}
        await served.client.post("/v1/messages", body("/v1/messages", "hi"), headers=asked)
        assert (await served.client.get(f"{SESSIONS}/u1/a0", headers=key)).json["id"] == "u1/a0"


async def test_room_is_bounded() -> None:
    async with remembering(config=Config(session_memory=20_000)) as served:
        for n in range(40):
            await Harness(served, "x" * 500, {"x-session-id": f"s{n}"}).go_on()
        sessions = served.service.sessions
        assert sessions._sessions.bytes <= 20_000
        kept = list(sessions)
        assert kept[0].key == "s39"
        assert 2 < len(kept) < 40
        assert sessions._sessions.bytes == sum(each.bytes + ENTRY_BYTES for each in kept)
        await Harness(served, "x" * 6000, {"x-session-id": "large"}).go_on()
        assert sessions._sessions.bytes <= 20_000


async def test_lines_of_one_session_are_bounded() -> None:
    async with remembering() as served:
        for n in range(50):
            await Harness(served, f"{n}").go_on(system=f"{n}")
        (session,) = served.service.sessions
    assert (len(session.records), session.requests, session.records_made) == (32, 50, 50)


async def test_nothing_is_kept_without_room() -> None:
    async with remembering(config=Config(session_memory=0)) as served:
        main = Harness(served, "hi")
        assert [await main.go_on(), await main.go_on()] == ["first", "first"]
        assert list(served.service.sessions) == []


FUNCTION = {"type": "function", "name": "ls", "description": "lists", "parameters": {"type": "object"}}
COMPACT = {"role": "user", "content": "You are performing a CONTEXT CHECKPOINT COMPACTION. [[script:call]]"}


async def compacted(served: Served, **more: Any) -> tuple[list[Body], Mapping[str, str]]:
    """A tool loop on Responses, and then Codex's request for a summary: its output, and its headers."""
    messages: list[Body] = [{"role": "user", "content": "[[script:call]] hi"}]
    settings = {"model": MODEL, "store": False, "prompt_cache_key": "c"}
    asked = settings | {"input": messages, "tools": [FUNCTION]}
    first = (await served.client.post("/v1/responses", asked)).json
    call = first["output"][-1]
    messages += [
        *first["output"],
        {"type": "function_call_output", "call_id": call["call_id"], "output": "a"},
    ]
    asked = settings | {"input": messages, "tools": [FUNCTION]}
    messages += (await served.client.post("/v1/responses", asked)).json["output"]
    asked = settings | {"input": [*messages, COMPACT], "parallel_tool_calls": False} | more
    reply = await served.client.post("/v1/responses", asked, headers={"x-singletree-explain": "1"})
    assert reply.status == 200, reply.body
    return reply.json["output"], reply.headers


async def test_a_compaction_keeps_the_tools_of_its_session() -> None:  # C6
    async with remembering() as served:
        output, headers = await compacted(served)
        metrics = (await served.client.get("/metrics")).body.decode()
        before, after = list(served.engine.log)[-2:]
        log = list(before.prompt_token_ids) + list(before.token_ids)
    assert headers["x-singletree-course"] == "appended"
    assert list(after.prompt_token_ids)[: len(log)] == log
    assert [item["type"] for item in output] == ["message"], "no call is made of tools that were not sent"
    assert "ls" in output[0]["content"][0]["text"]
    assert 'singletree_stability_rules_total{rule="compaction_tools"} 1.0' in metrics


async def test_no_other_request_gets_tools_that_it_did_not_send() -> None:
    async with remembering() as served:
        await compacted(served)
        for written in (
            [{"role": "user", "content": "hi"}],
            [{"role": "user", "content": "[[script:call]] hi"}, COMPACT],
            [{"role": "user", "content": "You write titles."}, {"role": "user", "content": "hi"}],
        ):
            asked = {"model": MODEL, "prompt_cache_key": "c", "input": written}
            await served.client.post("/v1/responses", asked)
            assert "lists" not in TOKENIZER.decode(served.engine.log[-1].prompt_token_ids)
    async with remembering(stability_off=frozenset({"compaction_tools"})) as served:
        _, headers = await compacted(served)
        assert headers["x-singletree-break"] == "tools_dropped; tools"
    async with remembering() as served:
        _, headers = await compacted(served, prompt_cache_key="another")
        assert headers["x-singletree-course"] == "first"
