"""A server that captures: every answer of a session is in its file before its client has all of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.types import Message

from server.inspecting import LAYOUT, TOOL
from server.memory import Client
from server.serving import MODEL, Served, body, serving
from singletree.errors import BadConfiguration
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.server.settings.config import Config
from singletree.stored_responses.store import Store
from singletree.training.capture import SessionCapture, open_capture
from singletree.training.exports import FORMS, history
from singletree.training.graph import SessionGraph, check_session, read_session, trajectories
from singletree.training.routes import CAPTURE_ROUTES
from singletree.training.session_files import SessionFile

CALL = '<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
SCRIPTS: Mapping[str, Any] = {"call": CALL, "answer": "<think>\nYes.\n</think>\n\nIt is 42."}
PATHS = ("/v1/messages", "/v1/chat/completions", "/v1/responses")


@asynccontextmanager
async def capturing(folder: Path, **more: Any) -> AsyncIterator[Served]:
    """A server that captures into ``folder``."""
    config = Config(capture=folder, **more)
    async with serving(SCRIPTS, config=config, memory=TurnMemory(2**20), layout=LAYOUT) as served:
        yield served
        await flush(served)
        cast(SessionCapture, served.service.capture).close()


async def flush(served: Served) -> None:
    """Wait for what is written at the end of answers that were cut."""
    await cast(SessionCapture, served.service.capture).run("flush", lambda file: None)


async def graph_of(served: Served, folder: Path, session: str = "a") -> SessionGraph:
    """The session, compared with what the engine was given."""
    await flush(served)
    graph = read_session(folder / f"{session}.jsonl")
    assert check_session(graph) == []
    return graph


def _as_engine(served: Served, graph: SessionGraph) -> None:
    assert [call.prompt.tolist() for call in graph.calls.values()] == [
        list(played.prompt) for played in served.engine.log
    ]
    assert [call.completion.tolist() for call in graph.calls.values()] == [
        list(played.token_ids) for played in served.engine.log
    ]


async def ask(served: Served, path: str, sent: dict[str, Any], **headers: str) -> bytes:
    async with served.client.open("POST", path, sent, headers) as (exchange, _):
        content = await exchange.rest()
    assert exchange.status == 200, content
    return content


@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_base_url_names_the_session(path: str, stream: bool, tmp_path: Path) -> None:
    async with capturing(tmp_path) as served:
        await ask(served, f"/sessions/a{path}", body(path, "hi [[script:call]]", stream=stream))
        await ask(served, path, body(path, "not captured", stream=stream))
        graph = await graph_of(served, tmp_path)
        (call,) = graph.calls.values()
        assert call.prompt.tolist() == list(served.engine.log[0].prompt)
        assert call.completion.tolist() == list(served.engine.log[0].token_ids)
        assert call.end is not None
        assert (call.end.finish, call.end.content) == ("stop", len(call.completion) - 1)
        assert call.start.route == path
        assert call.start.logprobs == "raw"
        assert len(trajectories(graph)[0].logprobs()) == call.length
    assert os.listdir(tmp_path) == ["a.jsonl"]


async def test_an_api_key_names_the_session(tmp_path: Path) -> None:
    async with capturing(tmp_path, api_key=("k",)) as served:
        sent = body("/v1/chat/completions", "hi")
        await ask(served, "/v1/chat/completions", sent, authorization="Bearer k/sessions/b")
        await ask(served, "/v1/messages", body("/v1/messages", "hi"), **{"x-api-key": "k/sessions/b"})
        reply = await served.client.post("/v1/messages", sent, headers={"x-api-key": "x/sessions/b"})
        assert reply.status == 401
        await flush(served)
        assert len(read_session(tmp_path / "b.jsonl").calls) == 2


async def _converse(served: Served, turns: int, *, edit: bool = False) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi [[script:" + ",".join(["call"] * 9) + "]]"}
    ]
    for turn in range(turns):
        sent = {"model": MODEL, "max_tokens": 400, "messages": messages, "tools": [TOOL]}
        content = json.loads(await ask(served, "/sessions/a/v1/messages", sent))["content"]
        if edit and turn == 1:
            content = [
                {**block, "text": "I looked."} if block["type"] == "text" else block for block in content
            ]
        messages.append({"role": "assistant", "content": content})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "a b c"}
            for block in content
            if block["type"] == "tool_use"
        ]
        messages.append({"role": "user", "content": results or "go on"})


async def test_a_conversation_is_one_trajectory(tmp_path: Path) -> None:
    async with capturing(tmp_path) as served:
        await _converse(served, 10)
        reply = await served.client.post("/sessions/a/complete", {"reward": 0.5})
        graph = await graph_of(served, tmp_path)
        _as_engine(served, graph)
        (only,) = trajectories(graph)
        assert only.trained == sum(len(played.token_ids) for played in served.engine.log)
        assert sum(only.loss_mask()) == only.trained
        capture = reply.json["capture"]
        assert (capture["status"], capture["share_in_one_trajectory"], capture["drifted"]) == (
            "complete",
            1.0,
            0,
        )
        # The tenth answer is plain text: the script has nine calls.
        assert (capture["reward"], capture["terminal"]) == (0.5, [*graph.calls][-1])


async def test_an_edited_turn_is_seen(tmp_path: Path) -> None:
    async with capturing(tmp_path) as served:
        await _converse(served, 4, edit=True)
        graph = await graph_of(served, tmp_path)
        _as_engine(served, graph)
        assert [graph.masked(call) for call in graph.calls.values()] == ["", "edited", "", ""]


async def test_the_end_is_written_before_the_client_has_it(tmp_path: Path) -> None:
    """The last frame waits for the file."""
    async with capturing(tmp_path) as served:
        capture = cast(SessionCapture, served.service.capture)
        hold = asyncio.Event()
        loop = asyncio.get_running_loop()
        sent = body("/v1/messages", "[[gen:20:1:0.005]]", stream=True)
        async with served.client.open("POST", "/sessions/a/v1/messages", sent) as (exchange, _):
            await exchange.read()

            def wait(file: SessionFile) -> None:
                asyncio.run_coroutine_threadsafe(hold.wait(), loop).result()

            capture.submit("other", wait)
            reading = asyncio.create_task(exchange.rest())
            await asyncio.sleep(0.5)
            assert len(served.engine.log[0].token_ids) == 21
            assert not reading.done()
            hold.set()
            assert b"message_stop" in await reading
            assert read_session(tmp_path / "a.jsonl").lacks == []


async def test_an_answer_whose_client_left_is_cut(tmp_path: Path) -> None:
    async with capturing(tmp_path) as served:
        sent = body("/v1/messages", "[[gen:2000:1:0.01]]", stream=True)
        async with served.client.open("POST", "/sessions/a/v1/messages", sent) as (exchange, task):
            await exchange.read()
            exchange.leave()
            await asyncio.wait([task])
        graph = await graph_of(served, tmp_path)
        (call,) = graph.calls.values()
        assert graph.masked(call) == "cut"
        assert trajectories(graph)[0].trained == 0


async def test_an_engine_that_fails_cuts_the_answer(tmp_path: Path) -> None:
    async with capturing(tmp_path) as served:
        await served.engine.close()
        reply = await served.client.post("/sessions/a/v1/messages", body("/v1/messages", "hi"))
        assert reply.status >= 500
        graph = await graph_of(served, tmp_path)
        assert [graph.masked(call) for call in graph.calls.values()] == ["cut"]


async def test_a_request_that_is_repeated_leaves_one_answer(tmp_path: Path) -> None:
    """A harness that gives up waiting sends its request again while the first one runs."""
    async with capturing(tmp_path) as served:
        sent = body("/v1/messages", "[[gen:40:1:0.01]]", stream=True)
        names = {"idempotency-key": "c"}
        path = "/sessions/a/v1/messages"
        async with served.client.open("POST", path, sent, names) as (first, _):
            await first.read()
            await ask(served, path, sent, **names)
            await first.rest()
        graph = await graph_of(served, tmp_path)
        assert [graph.masked(call) for call in graph.calls.values()] == ["cut", ""]


async def test_one_prompt_in_several_sessions_is_asked_in_each(tmp_path: Path) -> None:
    """Rollouts of a group begin alike, at the same time."""
    async with capturing(tmp_path) as served:
        sent = body("/v1/messages", "[[gen:20:1:0.005]]")
        names = {"x-claude-code-session-id": "c"}
        await asyncio.gather(
            *(ask(served, f"/sessions/{name}/v1/messages", sent, **names) for name in ("a", "b", "d"))
        )
        for name in ("a", "b", "d"):
            graph = await graph_of(served, tmp_path, name)
            assert [graph.masked(call) for call in graph.calls.values()] == [""]


async def test_a_background_response_is_captured(tmp_path: Path) -> None:
    async with capturing(tmp_path) as served:
        served.service.store = Store(tmp_path / "responses.sqlite", 2**20)
        served.service.store.open()
        sent = body("/v1/responses", "hi", background=True, store=True)
        made = json.loads(await ask(served, "/sessions/a/v1/responses", sent))
        await served.client.get(f"/v1/responses/{made['id']}?stream=true")
        graph = await graph_of(served, tmp_path)
        assert [*graph.calls] == [made["id"]]
        _as_engine(served, graph)
        served.service.store.close()


async def test_a_websocket_is_captured(tmp_path: Path) -> None:
    async with capturing(tmp_path) as served:
        sent: asyncio.Queue[Message] = asyncio.Queue()
        received: asyncio.Queue[Message] = asyncio.Queue()
        for message in (
            {"type": "websocket.connect"},
            {
                "type": "websocket.receive",
                "text": json.dumps({"type": "response.create", **body("/v1/responses", "hi")}),
            },
        ):
            received.put_nowait(message)
        path = "/sessions/a/v1/responses"
        scope = {
            "type": "websocket",
            "path": path,
            "raw_path": path.encode(),
            "headers": [],
            "subprotocols": [],
        }

        async def talk() -> None:
            await served.client.app(scope, received.get, sent.put)

        talking = asyncio.create_task(talk())
        async with asyncio.timeout(10):
            while "response.completed" not in (await sent.get()).get("text", ""):
                pass
        graph = await graph_of(served, tmp_path)
        _as_engine(served, graph)
        assert graph.lacks == []
        received.put_nowait({"type": "websocket.disconnect", "code": 1000})
        await talking


async def test_choices_that_nobody_continued_are_ambiguous(tmp_path: Path) -> None:
    async with capturing(tmp_path) as served:
        await ask(served, "/sessions/a/v1/chat/completions", body("/v1/chat/completions", "hi", n=3))
        graph = await graph_of(served, tmp_path)
        assert [graph.masked(call) for call in graph.calls.values()] == ["ambiguous"] * 3


async def test_a_stop_string_ends_the_turn_where_it_was_kept(tmp_path: Path) -> None:
    async with capturing(tmp_path) as served:
        sent = body("/v1/chat/completions", "[[echo:one two three]]", stop=["two"])
        await ask(served, "/sessions/a/v1/chat/completions", sent)
        graph = await graph_of(served, tmp_path)
        (call,) = graph.calls.values()
        assert call.end is not None
        assert call.end.content == len("one ")


async def test_raw_prompts_are_captured(tmp_path: Path) -> None:
    async with capturing(tmp_path) as served:
        await ask(served, "/sessions/a/v1/completions", {"model": MODEL, "prompt": "hi"})
        _as_engine(served, await graph_of(served, tmp_path))


async def test_texts_are_kept_only_where_they_are_asked_for(tmp_path: Path) -> None:
    for content in (False, True):
        async with capturing(tmp_path, capture_content=content) as served:
            await ask(served, f"/sessions/{content}/v1/messages", body("/v1/messages", "secret word"))
            text = (tmp_path / f"{content}.jsonl").read_text(encoding="utf-8")
            assert ("secret word" in text) is content


async def test_a_write_that_failed_makes_the_session_incomplete(tmp_path: Path, monkeypatch: Any) -> None:
    async with capturing(tmp_path) as served:
        real = SessionFile._append

        def fail(file: SessionFile, make: Any) -> None:
            raise OSError(28, "No space left on device")

        await ask(served, "/sessions/a/v1/messages", body("/v1/messages", "one"))
        monkeypatch.setattr(SessionFile, "_append", fail)
        await ask(served, "/sessions/a/v1/messages", body("/v1/messages", "two"))
        monkeypatch.setattr(SessionFile, "_append", real)
        await ask(served, "/sessions/a/v1/messages", body("/v1/messages", "three"))
        graph = await graph_of(served, tmp_path)
        assert graph.status == "incomplete"
        assert graph.lacks == ["a line could not be written: No space left on device"]
        assert len(graph.calls) == 2


async def test_the_routes_of_sessions(tmp_path: Path) -> None:
    async with capturing(tmp_path) as served:
        made = (await served.client.post("/sessions", {"metadata": {"task": 7}})).json
        name = made["session_id"]
        assert made["url"] == f"/sessions/{name}/v1"
        await ask(served, f"{made['url']}/messages", body("/v1/messages", "hi"))
        assert (await served.client.get("/sessions")).json[0]["metadata"] == {"task": 7}
        assert (await served.client.get(f"/sessions/{name}")).json["trace_count"] == 1
        (trace,) = (await served.client.get(f"/sessions/{name}/traces")).json
        assert trace["completion_token_ids"] == list(served.engine.log[0].token_ids)
        assert (await served.client.get(f"/traces/{trace['trace_id']}")).json == trace
        for form in ("singletree", "trl", "atif"):
            assert (await served.client.get(f"/sessions/{name}/traces?form={form}")).json
        wrong = await served.client.post(f"/sessions/{name}/complete", {"terminal": "no"})
        assert wrong.status == 400
        assert (await served.client.request("DELETE", f"/sessions/{name}")).json == {"deleted": 1}
        assert (await served.client.get(f"/sessions/{name}")).status == 404
        for bad in ("/sessions/..%2fx", "/sessions/a%2fb/traces", "/sessions/.x"):
            assert (await served.client.get(bad)).status in (400, 404)
        assert (await served.client.get(f"/sessions/{name}/metrics")).status == 404


async def test_keys_have_sessions_of_their_own(tmp_path: Path) -> None:
    async with capturing(tmp_path, api_key=("one", "two")) as served:
        sent = body("/v1/messages", "hi")
        await ask(served, "/sessions/a/v1/messages", sent, **{"x-api-key": "one"})
        assert (await served.client.get("/sessions/a", {"x-api-key": "one"})).status == 200
        assert (await served.client.get("/sessions/a", {"x-api-key": "two"})).status == 404
        assert (await served.client.get("/sessions/a")).status == 401


async def test_without_the_flag_there_are_no_sessions() -> None:
    async with serving() as served:
        assert (await served.client.post("/sessions", {})).status == 404
        sent = body("/v1/messages", "hi")
        assert (await served.client.post("/sessions/a/v1/messages", sent)).status == 404


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfiguration, match="--capture"):
        SessionCapture(tmp_path / "file" / "folder")


async def test_a_capture_key_is_a_right_of_its_own(tmp_path: Path) -> None:
    async with capturing(tmp_path, api_key=("one", "two"), admin_key=("o",), capture_key=("c",)) as served:
        sent = body("/v1/messages", "hi")
        await ask(served, "/sessions/a/v1/messages", sent, **{"x-api-key": "one"})
        for path, used in (
            ("/sessions/a/v1/messages", "c"),
            ("/v1/models", "c"),
            ("/v1/singletree/sessions", "c"),
        ):
            reply = await served.client.request(
                "POST" if "a/v1" in path else "GET", path, sent, {"x-api-key": used}
            )
            assert reply.status == 403
        (owner, _) = served.service.keys.owners
        name = f"{owner}/a"
        for row in CAPTURE_ROUTES:
            path = row.path.replace("{id}", name.replace("/", "%2F"))
            for key in ("one", "two", "o", ""):
                reply = await served.client.request(row.method, path, {}, {"x-api-key": key} if key else {})
                assert reply.status == (403 if key else 401), (path, key)
        trainer = Client(served.client.app, {"x-api-key": "c"})
        assert [each["session_id"] for each in (await trainer.get("/sessions")).json] == [name]
        (trace,) = (await trainer.get(f"/sessions/{owner}%2Fa/traces")).json
        assert trace["completion_token_ids"] == list(served.engine.log[0].token_ids)
        assert (await trainer.get(f"/traces/{owner}%2F{trace['trace_id']}")).json == trace
        made = await trainer.post(f"/sessions/{owner}%2Fa/complete", {"reward": 0.5})
        assert (made.json["session_id"], made.json["capture"]["reward"]) == (name, 0.5)
        for bad in ("0" * 16 + "%2Fa", "..%2Fa", f"{owner}%2F..", f"%2F{owner}%2Fa"):
            assert (await trainer.get(f"/sessions/{bad}")).status in (400, 404)
        assert (await trainer.post("/sessions", {"session_id": f"{owner}/b"})).json["url"] == "/sessions/b/v1"


async def test_without_a_capture_key_no_key_names_an_owner(tmp_path: Path) -> None:
    async with capturing(tmp_path, api_key=("one", "two"), admin_key=("o",)) as served:
        await ask(served, "/sessions/a/v1/messages", body("/v1/messages", "hi"), **{"x-api-key": "one"})
        path = f"/sessions/{served.service.keys.owners[0]}%2Fa"
        assert [
            (await served.client.get(path, {"x-api-key": key})).status for key in ("one", "two", "o")
        ] == [400] * 3


async def test_a_capture_key_is_needed_where_serving_is_open(tmp_path: Path) -> None:
    async with capturing(tmp_path, capture_key=("c",)) as served:
        await ask(served, "/sessions/a/v1/messages", body("/v1/messages", "hi"))
        assert [
            (await served.client.get("/sessions/a", each)).status for each in ({}, {"x-api-key": "c"})
        ] == [401, 200]


def test_a_capture_key_is_no_api_key() -> None:
    with pytest.raises(BadConfiguration, match="--capture-key and --api-key have 1 key in common"):
        Config(api_key=("k",), capture_key=("k",))


def find_numbers(text: str) -> list[tuple[int, int]]:
    """A hook: numbers of more than three digits, and a word."""
    return [found.span() for found in re.finditer(r"\d{4,}|gehéim€", text)]


def fail_with_text(text: str) -> list[tuple[int, int]]:
    """A hook that has a fault."""
    raise ValueError(text)


def find_outside(text: str) -> list[tuple[int, int]]:
    """A hook of another text."""
    return [(0, len(text) + 1)]


@pytest.mark.parametrize("path", PATHS)
async def test_what_the_hook_finds_is_not_in_the_file(path: str, tmp_path: Path) -> None:
    flags = {"capture_content": True, "capture_redact": f"{__name__}:find_numbers"}
    async with capturing(tmp_path, **flags) as served:
        question = "my gehéim€ 123456789 [[echo:It is gehéim€, 471147114 and 42.]]"
        await ask(served, f"/sessions/a{path}", body(path, question))
        graph = await graph_of(served, tmp_path)
        (call,) = graph.calls.values()
        tokenizer = served.service.catalog.get(MODEL).tokenizer
        texts = (tmp_path / "a.jsonl").read_text(encoding="utf-8")
        texts += tokenizer.decode(call.prompt) + tokenizer.decode(call.completion)
        for form in FORMS.values():
            texts += json.dumps([*form(graph)], ensure_ascii=False)
        assert not [word for word in ("gehéim€", "ehéim", "23456", "47114") if word in texts]
        assert "my ******* *********" in texts
        (trajectory,) = trajectories(graph)
        real = list(served.engine.log[0].token_ids)
        kept = trajectory.token_ids()[call.prompt_length :].tolist()
        mask, logprobs = (
            each[call.prompt_length :] for each in (trajectory.loss_mask(), trajectory.logprobs())
        )
        changed = [at for at, (one, other) in enumerate(zip(real, kept, strict=True)) if one != other]
        assert changed
        assert [at for at, trained in enumerate(mask) if not trained] == changed
        assert [at for at, value in enumerate(logprobs) if value is None] == changed
        assert trajectory.trained == len(real) - len(changed)


async def test_a_redacted_conversation_is_still_one_trajectory(tmp_path: Path) -> None:
    async with capturing(tmp_path, capture_content=True, capture_redact=f"{__name__}:find_numbers") as served:
        messages: list[dict[str, Any]] = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"{turn}: 55555 [[echo:it was 7777{turn}.]]"})
            sent = {"model": MODEL, "max_tokens": 400, "messages": messages}
            content = json.loads(await ask(served, "/sessions/a/v1/messages", sent))["content"]
            messages.append({"role": "assistant", "content": content})
        graph = await graph_of(served, tmp_path)
        (only,) = trajectories(graph)
        assert [span.masked for span in only.spans] == [""] * 4
        assert all(call.end is not None and call.end.redacted for call in graph.calls.values())
        assert [len(history(call)) for call in graph.calls.values()] == [1, 3, 5, 7]


@pytest.mark.parametrize("hook", ["fail_with_text", "find_outside"])
async def test_a_hook_that_fails_leaves_nothing_readable(hook: str, tmp_path: Path) -> None:
    async with capturing(tmp_path, capture_content=True, capture_redact=f"{__name__}:{hook}") as served:
        await ask(served, "/sessions/a/v1/messages", body("/v1/messages", "a gehéim€ word"))
        await flush(served)
        await served.client.post("/sessions", {"session_id": "a"})
        graph = read_session(tmp_path / "a.jsonl")
        assert (graph.status, [*graph.calls]) == ("incomplete", [])
        assert "geh" not in (tmp_path / "a.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["no_module_at_all:find", f"{__name__}:nothing", "", "json"])
def test_a_hook_that_is_not_there_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="--capture-redact"):
        open_capture(Config(capture=tmp_path, capture_redact=name))
