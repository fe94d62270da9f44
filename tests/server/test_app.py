"""The application over in-memory ASGI: routes, keys, ids, bodies, errors in the asking protocol's words."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
import zstandard

from singletree.server.http.route_table import ROUTES
from singletree.server.settings.config import Config
from singletree.server.turn import protocol
from singletree.testing.scripts import Script

from .memory import Reply
from .serving import MODEL, body, serving

PATHS = ("/v1/messages", "/v1/chat/completions", "/v1/responses")
each_protocol = pytest.mark.parametrize("path", PATHS)


def error_of(path: str, reply: Reply) -> tuple[str, str]:
    """(type or code, message) of an error, its shape checked."""
    assert reply.headers["content-type"] == "application/json"
    value = reply.json
    if path.startswith("/v1/messages"):
        assert value["type"] == "error"
        assert value["request_id"] == reply.headers["x-request-id"]
        return value["error"]["type"], value["error"]["message"]
    error = value["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["code"] or error["type"], error["message"]


def text_of(path: str, reply: Reply) -> str:
    """The text of a whole answer."""
    value: Any = reply.json
    if path == "/v1/messages":
        return "".join(block["text"] for block in value["content"])
    if path == "/v1/chat/completions":
        return str(value["choices"][0]["message"]["content"])
    return "".join(part["text"] for item in value["output"] for part in item["content"])


BAD: list[tuple[str, bytes, int, str]] = [
    ("malformed", b'{"model": ', 400, "JSON"),
    ("no JSON at all", b"\xff\xfe", 400, "JSON"),
    ("empty", b"", 400, "JSON"),
    ("an array", b"[]", 400, "object"),
    ("model is a number", b'{"model": 3}', 400, "model"),
]


@each_protocol
@pytest.mark.parametrize(("content", "status", "names"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
async def test_bad_bodies(path: str, content: bytes, status: int, names: str) -> None:  # C44
    async with serving() as served:
        reply = await served.client.post(path, content)
    assert reply.status == status
    kind, message = error_of(path, reply)
    assert kind == "invalid_request_error"
    assert names in message


@each_protocol
@pytest.mark.parametrize("named", [{}, {"model": ""}], ids=["absent", "empty"])
async def test_a_request_without_a_model_is_for_the_only_one(path: str, named: dict[str, str]) -> None:
    """vLLM's and llama.cpp's own tests send none."""
    asked = {name: value for name, value in body(path, "[[echo:yes]]").items() if name != "model"}
    async with serving() as served:
        reply = await served.client.post(path, asked | named)
    assert (reply.status, text_of(path, reply), reply.json["model"]) == (200, "yes", MODEL)


@each_protocol
async def test_no_messages(path: str) -> None:  # C36
    empty = body(path, "x") | ({"input": []} if path == "/v1/responses" else {"messages": []})
    async with serving() as served:
        reply = await served.client.post(path, empty)
    assert reply.status == 400
    assert error_of(path, reply)[0] == "invalid_request_error"


@each_protocol
@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_model(path: str, stream: bool) -> None:
    async with serving() as served:
        reply = await served.client.post(path, body(path, "x", stream=stream) | {"model": "gpt-9"})
    kind, message = error_of(path, reply)
    assert (reply.status, kind) == (404, "not_found_error" if path == "/v1/messages" else "model_not_found")
    assert "gpt-9" in message
    assert MODEL in message


@each_protocol
@pytest.mark.parametrize("named", [MODEL, MODEL.upper(), "alias", f"{MODEL}[1m]"])
async def test_names_of_the_model(path: str, named: str) -> None:  # C43
    async with serving() as served:
        reply = await served.client.post(path, body(path, "[[echo:yes]]") | {"model": named})
    assert (reply.status, text_of(path, reply), reply.json["model"]) == (200, "yes", named)


@each_protocol
@pytest.mark.parametrize("stream", [False, True])
async def test_overflow_is_refused_before_the_stream(path: str, stream: bool) -> None:  # C43
    async with serving(context_window=100) as served:
        reply = await served.client.post(path, body(path, "x" * 300, stream=stream))
        asked = await served.client.post("/tokenize", {"messages": [{"role": "user", "content": "x" * 300}]})
        assert not served.engine.log
    kind, message = error_of(path, reply)
    count = asked.json["count"]
    assert reply.status == 400
    if path == "/v1/messages":
        assert message == f"prompt is too long: {count} tokens > 99 maximum"
    else:
        assert kind == "context_length_exceeded"
        assert "maximum context length is 99 tokens" in message


COMPRESSED = [
    ("gzip", gzip.compress),
    ("zstd", zstandard.ZstdCompressor().compress),
    ("x-gzip", gzip.compress),
]


@each_protocol
@pytest.mark.parametrize(("name", "compress"), COMPRESSED, ids=[c[0] for c in COMPRESSED])
async def test_compressed_bodies(path: str, name: str, compress: Any) -> None:  # C31
    plain = json.dumps(body(path, "[[echo:yes]]")).encode()
    async with serving(config=Config(body_limit=1000)) as served:
        post = served.client.post
        reply = await post(path, compress(plain), {"content-encoding": name})
        assert (reply.status, text_of(path, reply)) == (200, "yes")

        bomb = await post(path, compress(plain + b" " * 1_000_000), {"content-encoding": name})
        assert bomb.status == 413
        assert "1000 bytes" in error_of(path, bomb)[1]

        damaged = await post(path, b"\x00" + compress(plain)[1:], {"content-encoding": name})
        assert damaged.status == 400


async def test_two_frames_are_one_body() -> None:
    plain = json.dumps(body("/v1/messages", "[[echo:yes]]")).encode()
    async with serving() as served:
        for name, compress in COMPRESSED:
            both = compress(plain[:9]) + compress(plain[9:])
            reply = await served.client.post("/v1/messages", both, {"content-encoding": name})
            assert text_of("/v1/messages", reply) == "yes"
        stacked = zstandard.compress(gzip.compress(plain))
        refused = await served.client.post("/v1/messages", stacked, {"content-encoding": "gzip, zstd"})
        assert refused.status == 415


@each_protocol
async def test_limit_and_encoding(path: str) -> None:  # C31
    async with serving(config=Config(body_limit=1000)) as served:
        large = await served.client.post(path, body(path, "x" * 2000))
        odd = await served.client.post(path, b"{}", {"content-encoding": "lzma"})
    assert large.status == 413
    assert "1000 bytes" in error_of(path, large)[1]
    assert odd.status == 415
    assert "'lzma'" in error_of(path, odd)[1]


KEYS = [
    ({}, 401),
    ({"x-api-key": "wrong"}, 401),
    ({"x-api-key": "one"}, 200),
    ({"x-api-key": "two"}, 200),
    ({"authorization": "Bearer two"}, 200),
    ({"authorization": "bearer  one "}, 200),
    ({"authorization": "Basic one"}, 401),
    ({"authorization": "Bearer one", "x-api-key": "wrong"}, 200),
    ({"authorization": "Bearer gr\u00fcn"}, 401),
]


@each_protocol
@pytest.mark.parametrize(("headers", "status"), KEYS, ids=[str(k[0]) for k in KEYS])
async def test_keys(path: str, headers: dict[str, str], status: int) -> None:
    async with serving(config=Config(api_key=("one", "two"))) as served:
        reply = await served.client.post(path, body(path, "[[echo:yes]]"), headers)
        for free in ("/", "/health", "/api/hello", "/metrics"):
            assert (await served.client.get(free)).status == 200
    assert reply.status == status
    if status == 401:
        assert error_of(path, reply)[0] == (
            "authentication_error" if path == "/v1/messages" else "invalid_api_key"
        )


@each_protocol
async def test_wrong_methods_and_paths(path: str) -> None:
    async with serving() as served:
        wrong = await served.client.request("DELETE", path)
        lost = await served.client.get(f"{path}/nowhere/else")
    assert wrong.status == 405
    assert "POST" in wrong.headers["allow"]
    assert "DELETE" in error_of(path, wrong)[1]
    assert lost.status == 404
    assert path in error_of(path, lost)[1]


async def test_shared_paths_speak_the_language_of_who_asks() -> None:
    async with serving() as served:
        openai = await served.client.get("/v1/models/nope")
        anthropic = await served.client.get("/v1/models/nope", {"anthropic-version": "2023-06-01"})
    assert openai.json["error"]["code"] == "model_not_found"
    assert anthropic.json["error"]["type"] == "not_found_error"


async def test_models() -> None:
    async with serving() as served:
        get = served.client.get
        assert [m["id"] for m in (await get("/v1/models")).json["data"]] == [MODEL]
        assert (await get(f"/v1/models/{MODEL}")).json["context_window"] == 8192
        listed = (await get("/v1/models", {"anthropic-version": "2023-06-01"})).json
        assert (listed["first_id"], listed["data"][0]["type"]) == (MODEL, "model")
        assert (await get("/v1/models?client_version=0.169.0")).json["models"][0]["slug"] == MODEL


@each_protocol
async def test_every_answer_has_the_requests_id(path: str) -> None:  # C44
    async with serving() as served:
        given = await served.client.post(path, body(path, "[[echo:x]]"), {"x-request-id": "abc-1"})
        made = await served.client.post(path, b"{")
        forged = await served.client.post(path, b"{", {"x-request-id": "a\x7fb"})
    assert given.headers["x-request-id"] == given.headers["request-id"] == "abc-1"
    assert made.headers["x-request-id"].startswith("req_")
    assert forged.headers["x-request-id"].startswith("req_")


async def test_codex_learns_that_there_is_no_websocket() -> None:  # C30
    async with serving() as served:
        reply = await served.client.get("/v1/responses", {"upgrade": "websocket", "connection": "Upgrade"})
        plain = await served.client.get("/v1/responses")
    assert reply.status == 426
    assert plain.status == 405


async def test_head() -> None:
    async with serving() as served:
        for path in ("/", "/api/hello", "/health", "/v1/models"):
            assert (await served.client.request("HEAD", path)).status == 200
        assert (await served.client.request("HEAD", "/v1/messages")).body == b""


async def test_messages_can_be_switched_off() -> None:
    async with serving(config=Config(enable_anthropic_api=False)) as served:
        off = await served.client.post("/v1/messages", body("/v1/messages", "x"))
        on = await served.client.post("/v1/responses", body("/v1/responses", "[[echo:yes]]"))
    assert off.status == 404
    assert on.status == 200


async def test_counts_are_the_prompt_tokens() -> None:  # C27
    tools = [{"name": "ls", "description": "List.", "input_schema": {"type": "object", "properties": {}}}]
    asked = body("/v1/messages", "[[echo:yes]]", tools=tools, system="Be brief.")
    async with serving() as served:
        counted = await served.client.post(
            "/v1/messages/count_tokens", {k: asked[k] for k in asked if k != "max_tokens"}
        )
        reply = await served.client.post("/v1/messages", asked)
        also = await served.client.post("/v1/responses/input_tokens", body("/v1/responses", "x"))
    usage = reply.json["usage"]
    assert counted.json == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert also.json["input_tokens"] > 0


async def test_tokenize_and_back() -> None:
    async with serving() as served:
        post = served.client.post
        tokens = (await post("/tokenize", {"prompt": "h\u00e9<|im_end|>", "return_token_strs": True})).json
        assert (tokens["count"], tokens["max_model_len"], tokens["token_strs"][-1]) == (4, 8192, "<|im_end|>")
        text = (await post("/v1/detokenize", {"model": MODEL, "tokens": tokens["tokens"]})).json
        assert text == {"prompt": "h\u00e9<|im_end|>"}
        chat_tokens = await post("/v1/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
        shown = (await post("/detokenize", {"tokens": chat_tokens.json["tokens"]})).json["prompt"]
        assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@each_protocol
@pytest.mark.parametrize("stream", [False, True])
async def test_overload_says_when_to_come_back(path: str, stream: bool) -> None:  # C39
    async with serving({"busy": Script(overloaded=True)}) as served:
        reply = await served.client.post(path, body(path, "[[script:busy]]", stream=stream))
    assert reply.status == (529 if path == "/v1/messages" else 503)
    assert int(reply.headers["retry-after"]) >= 1


async def test_what_was_ignored_is_reported_in_a_header() -> None:
    tools = [{"type": "mystery"}]
    async with serving() as served:
        asked = body("/v1/chat/completions", "[[echo:x]]", tools=tools)
        reply = await served.client.post("/v1/chat/completions", asked)
    assert "mystery" in reply.headers["x-singletree-warning"]


async def test_stored_responses_are_refused() -> None:
    async with serving() as served:
        asked = body("/v1/responses", "x", previous_response_id="resp_1")
        reply = await served.client.post("/v1/responses", asked)
    assert reply.status == 400
    assert reply.json["error"]["param"] == "previous_response_id"


async def test_on_the_way_out() -> None:
    async with serving() as served:
        served.service.shutdown.set()
        assert (await served.client.get("/health")).status == 503
        refused = await served.client.post("/v1/messages", body("/v1/messages", "x"))
    assert refused.status == 529


async def test_metrics_count_tokens_and_never_show_a_prompt(caplog: pytest.LogCaptureFixture) -> None:  # C44
    caplog.set_level("DEBUG", "singletree")
    async with serving() as served:
        await served.client.post("/v1/messages", body("/v1/messages", "SECRET [[echo:ANSWER]]"))
        await served.client.post("/v1/messages", body("/v1/messages", "SECRET") | {"model": "SECRET"})
        await served.client.post("/v1/SECRET\n", b"{}")
        text = (await served.client.get("/metrics")).body.decode()
    assert 'singletree_tokens_total{kind="completion",model="org/test-model"} 7.0' in text
    assert 'singletree_requests_total{route="/v1/messages",status="404"} 1.0' in text
    assert "singletree_generations_in_flight 0.0" in text
    assert "SECRET" not in text
    lines = [record.getMessage() for record in caplog.records]
    assert any("completion=7" in line and "end=stop" in line for line in lines)
    assert not any("ANSWER" in line or "\n" in line for line in lines)
    assert not any("SECRET" in line for line in lines if "/v1/SECRET" not in line)


async def test_what_nobody_foresaw_is_a_500_in_the_protocols_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # C44
    monkeypatch.setattr("singletree.server.turn.pipeline.prepare", lambda *_: 1 / 0)
    async with serving() as served:
        for path in PATHS:
            reply = await served.client.post(path, body(path, "x"))
            assert reply.status == 500
            assert "ZeroDivision" not in error_of(path, reply)[1]


def test_every_route_is_listed_once_and_explained() -> None:
    assert len({(row.method, row.path) for row in ROUTES}) == len(ROUTES)
    assert [row.path for row in ROUTES if not row.loaded().summary] == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/messages", protocol.MESSAGES),
        ("/v1/messages/count_tokens", protocol.MESSAGES),
        ("/v1/chat/completions", protocol.CHAT),
        ("/v1/responses", protocol.RESPONSES),
        ("/v1/responses/input_tokens", protocol.RESPONSES),
        ("/v1/models", protocol.MESSAGES),
    ],
)
def test_a_path_of_its_own_wins_over_the_version_header(path: str, expected: protocol.ProtocolEntry) -> None:
    assert protocol.protocol_for(path, {"anthropic-version": "2023-06-01"}) is expected
