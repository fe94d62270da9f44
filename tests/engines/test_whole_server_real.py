"""The whole server over each engine, started as a user starts it, and asked over HTTP: ``make engines``."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

import anthropic
import openai
import pytest

from clients.served import explain
from engines import real_vllm
from engines.cache_rule import cached_as_predicted
from engines.tool_loop import DIALECTS, Dialect, Loop, play_tool_loop
from engines.vllm_recording import QUESTION
from engines.whole_server import PATIENCE, SETUPS, SLOTS, Setup, Stream, WholeServer
from server.memory import GRAMMARS

pytestmark = pytest.mark.engines

CHAT = "/v1/chat/completions"
ASKED = {"model": real_vllm.MODEL, "temperature": 0, "max_tokens": 40}
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
every_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.path)


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: setup.name)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    setup: Setup = request.param
    server = WholeServer(setup, tmp_path_factory.mktemp(setup.name))
    try:
        server.start()
        yield server
    finally:
        server.stop()


def test_the_three_apis_stream_what_they_answer(server: WholeServer) -> None:
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE)
    chat: Any = {**ASKED, "messages": FRANCE}
    whole = sdk.chat.completions.create(**chat).choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in sdk.chat.completions.create(**chat, stream=True)
    ]
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 1
    responses: Any = {"model": real_vllm.MODEL, "temperature": 0, "max_output_tokens": 40, "input": FRANCE}
    events = list(sdk.responses.create(**responses, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole
    assert sdk.responses.create(**responses).output_text == whole
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", timeout=PATIENCE)
    message: Any = {"model": real_vllm.MODEL, "max_tokens": 40, "messages": FRANCE}
    message["extra_body"] = {"temperature": 0}  # the SDK has no argument for it
    with claude.messages.stream(**message) as stream:
        assert "".join(stream.text_stream) == whole
    [block] = claude.messages.create(**message).content
    assert (block.type, getattr(block, "text", None)) == ("text", whole)
    assert "Paris" in (whole or "")
    assert [each.id for each in sdk.models.list()] == [real_vllm.MODEL]


async def loop(
    server: WholeServer, dialect: Dialect, session: str, turns: int, history: list[Any] | None = None
) -> Loop:
    async def post(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        return await asyncio.to_thread(server.post, path, body, {"x-singletree-session": session})

    # Named after the session: an equal conversation of another session would be in the engine's cache, too.
    begin = [{"role": "user", "content": f"{session}: how is the weather in Paris?"}]
    return await play_tool_loop(post, dialect, turns, history or begin)


@every_dialect
async def test_forced_calls_and_a_cache_that_grows(server: WholeServer, dialect: Dialect) -> None:
    """Each call keeps to its schema; each prompt is read from the engine's cache as far as it can be."""
    played = await loop(server, dialect, f"loop{dialect.path}", turns=4)
    steps = explain(server.url, f"loop{dialect.path}")
    assert [step["cached_tokens"] for step in steps] == played.cached_tokens
    assert [step["course"] for step in steps] == ["first"] + ["appended"] * 3
    cached_as_predicted(steps, server.setup.block, forced=True, late=server.setup.late)
    assert played.cached_tokens[1:] == sorted(played.cached_tokens[1:])
    assert played.cached_tokens[-1] > played.cached_tokens[1]


def test_the_cache_has_every_turn_but_its_last_token(server: WholeServer) -> None:
    messages: list[dict[str, str]] = []
    for number in range(5):
        messages.append({"role": "user", "content": f"{number}. Tell me about Paris. " + "Go on. " * 30})
        body = {**ASKED, "messages": messages, "max_tokens": 5 + 3 * number}
        status, reply = server.post(CHAT, body, {"x-singletree-session": "plain"})
        assert status == 200, reply
        messages.append(json.loads(reply)["choices"][0]["message"])
    steps = explain(server.url, "plain")
    assert [step["course"] for step in steps[1:]] == ["appended"] * 4
    cached_as_predicted(steps, server.setup.block)


def test_token_ids_in_and_out(server: WholeServer) -> None:
    body = {"token_ids": QUESTION, "sampling_params": {"temperature": 0, "max_tokens": 20}, "stream": True}
    status, reply = server.post("/inference/v1/generate", body)
    assert status == 200, reply
    GRAMMARS["/inference/v1/generate"](reply)
    with Stream(server.url, "/inference/v1/generate", body) as stream:
        choices = [choice for event in stream.events() for choice in event["choices"]]
    count = sum(len(choice["token_ids"]) for choice in choices)
    spans = [{"version": server.setup.weights, "start": 0, "end": count}]
    assert choices[-1]["weight_versions"] == (spans if server.setup.weights else None)


def _endless(priority: int = 0, max_tokens: int = 1000) -> tuple[dict[str, Any], dict[str, str]]:
    body = {**ASKED, "messages": FRANCE, "stream": True, "ignore_eos": True, "max_tokens": max_tokens}
    return body, {"x-dynamo-request-priority": str(priority)}


def test_who_leaves_frees_a_slot_and_who_is_urgent_gets_it(server: WholeServer) -> None:
    """All slots are taken, and others wait. When one client leaves, the most urgent of them is next."""
    started: queue.Queue[str] = queue.Queue()
    with ExitStack() as stack:
        fillers = []
        for _ in range(SLOTS):
            filler = stack.enter_context(Stream(server.url, CHAT, *_endless()))
            fillers.append(filler.events())
            assert len([*islice(fillers[-1], 2)]) == 2
            last = filler

        def wait_in_line(name: str, priority: int) -> None:
            with Stream(server.url, CHAT, *_endless(priority, 4)) as stream:
                events = [event for event in stream.events() if event["choices"]]
                started.put(name if len(events) > 1 else f"{name}: {events}")

        names = {"first": 0, "second": 0, "urgent": 7, "third": 0}
        waiting = [threading.Thread(target=wait_in_line, args=each) for each in names.items()]
        for number, thread in enumerate(waiting, SLOTS + 1):
            thread.start()
            server.until_in_flight(number)
        assert len([*islice(fillers[0], 8)]) == 8, "the engine has gone on, and knows all that wait"
        assert started.empty()
        last.leave()
        assert started.get(timeout=PATIENCE) == "urgent"
        assert {started.get(timeout=PATIENCE) for _ in range(3)} == {"first", "second", "third"}
        for thread in waiting:
            thread.join()
    server.until_in_flight(0)


def test_a_background_response_is_cancelled(server: WholeServer) -> None:
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE)
    asked: Any = {"model": real_vllm.MODEL, "input": FRANCE, "max_output_tokens": 3000, "background": True}
    response = sdk.responses.create(**asked, extra_body={"ignore_eos": True})
    server.until_in_flight(1)
    assert sdk.responses.cancel(response.id).status == "cancelled"
    server.until_in_flight(0)


async def test_the_engine_dies_in_the_middle_of_sessions(server: WholeServer) -> None:
    """The turn that runs is continued or fails in its protocol's form; the sessions go on with the same tokens."""
    before = {dialect: await loop(server, dialect, f"killed{dialect.path}", turns=2) for dialect in DIALECTS}
    body, headers = _endless(max_tokens=120)
    with Stream(server.url, CHAT, body, headers) as stream:
        events = stream.events()
        assert len([*islice(events, 3)]) == 3
        server.kill_engine()
        left = [*events]
    if server.setup.revives:
        assert left[-1]["choices"][0]["finish_reason"] == "length", "the turn was continued"
    else:
        assert left[-1]["error"]["message"]
        status, reply = server.post(CHAT, {**ASKED, "messages": FRANCE})
        assert status in (500, 503), reply
    server.bring_back()
    for dialect in DIALECTS:
        replayed = server.metric("singletree_replayed_turns_total")
        await loop(server, dialect, f"killed{dialect.path}", 2, before[dialect].history)
        assert server.metric("singletree_replayed_turns_total") - replayed == 2 + 3
        steps = explain(server.url, f"killed{dialect.path}")[-2:]
        assert steps[1]["course"] == "appended"
        cached_as_predicted(steps, server.setup.block, forced=True, late=server.setup.late)
