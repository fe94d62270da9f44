"""Requests that are too large in one respect: each is refused by the limit that it exceeds, before work is done."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from singletree.constraints import enforceable
from singletree.errors import InvalidRequest
from singletree.protocols import chat, limits, messages, responses, wire
from singletree.protocols.chat import request as chat_request
from singletree.protocols.responses.tools import Toolbox

from .serving import MODEL, TOKENIZER, body, serving

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
FUNCTION = {"type": "function", "name": "f", "parameters": {}}
PART = {"type": "text", "text": "hi"}
SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(40)}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
EDIT = {"type": "clear_tool_uses_20250919"}


def _chat_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def _in_messages(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


TOO_LARGE: list[tuple[str, int, str, dict[str, Any]]] = [
    ("messages", 2, CHAT, {"messages": [{"role": "user", "content": "hi"}] * 3}),
    ("messages", 2, MESSAGES, {"messages": [{"role": "user", "content": "hi"}] * 3}),
    ("messages", 2, RESPONSES, {"input": [{"role": "user", "content": "hi"}] * 3}),
    ("tools", 2, CHAT, {"tools": [{"type": "function", "function": {"name": f"c{i}"}} for i in range(3)]}),
    ("tools", 2, CHAT, {"functions": [{"name": f"d{i}"} for i in range(3)]}),
    ("tools", 2, MESSAGES, {"tools": [{"name": f"m{i}", "input_schema": {}} for i in range(3)]}),
    ("tools", 2, RESPONSES, {"tools": [FUNCTION | {"name": f"r{i}"} for i in range(3)]}),
    (
        "tools",
        2,
        RESPONSES,
        {
            "tools": [
                {"type": "namespace", "name": "n", "tools": [FUNCTION | {"name": f"n{i}"} for i in range(3)]}
            ]
        },
    ),
    (
        "tools",
        2,
        RESPONSES,
        {
            "tools": [FUNCTION],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION] * 3},
        },
    ),
    (
        "schema_fields",
        30,
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "s", "parameters": SCHEMA}}]},
    ),
    ("schema_fields", 30, MESSAGES, {"tools": [{"name": "s", "input_schema": SCHEMA}]}),
    ("schema_fields", 30, RESPONSES, {"tools": [FUNCTION | {"parameters": SCHEMA}]}),
    ("schema_fields", 30, CHAT, _chat_format(SCHEMA)),
    ("schema_fields", 30, CHAT, {"guided_json": SCHEMA}),
    ("schema_fields", 30, CHAT, {"guided_json": json.dumps(SCHEMA)}),
    ("schema_fields", 30, MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    (
        "schema_fields",
        30,
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    ),
    ("grammar_characters", 20, CHAT, {"guided_grammar": 'root ::= "a" | "bcdefghijkl"'}),
    ("grammar_characters", 20, CHAT, {"guided_choice": ["eleven text", "eleven more"]}),
    ("pattern_characters", 20, CHAT, {"guided_regex": "a" * 21}),
    (
        "pattern_characters",
        20,
        RESPONSES,
        {
            "tools": [
                {
                    "type": "custom",
                    "name": "c",
                    "format": {"type": "grammar", "syntax": "regex", "definition": "a" * 21},
                }
            ]
        },
    ),
    ("logit_biases", 2, CHAT, {"logit_bias": {"1": 1, "2": 1, "3": 1}}),
    ("bad_word_characters", 8, CHAT, {"bad_words": ["word", "words"]}),
    ("context_edits", 2, MESSAGES, {"context_management": {"edits": [EDIT] * 3}}),
    ("pictures", 2, MESSAGES, _in_messages(*[PDF] * 3, PART)),
    ("pdf_documents", 2, MESSAGES, _in_messages(*[PDF] * 3, PART)),
]


@pytest.mark.parametrize(("limit", "most", "path", "sent"), TOO_LARGE)
async def test_a_request_beyond_a_limit_is_refused_by_its_name(
    limit: str, most: int, path: str, sent: dict[str, Any], set_limits: Callable[..., None]
) -> None:
    wire.limit_known_values(0)
    wire.limit_known_values(96 * 2**20)
    set_limits(**{limit: most})
    request = {name: value for name, value in body(path, "hi").items() if name not in sent} | sent
    async with serving({"hi": "yes"}) as served:
        reply = await served.client.post(path, request)
    assert reply.status == 400, reply.body
    error = reply.json["error"]["message"]
    assert f"send at most {most} " in error
    assert f"--limit {limit}=" in error


def test_strict_patterns_of_a_schema_are_bounded(set_limits: Callable[..., None]) -> None:
    set_limits(pattern_characters=20)
    enforceable.check_schema({"type": "string", "pattern": "a" * 20}, "at")
    with pytest.raises(
        InvalidRequest, match=r"at\.pattern: the pattern has 21 characters; write one of at most 20"
    ):
        enforceable.check_schema({"type": "string", "pattern": "a" * 21}, "at")


JSON_COUNTS = [
    (rb'{"a":1,"b":[true,"x,y:[{"]}', 4, 4),
    (rb'["\"[[[,,,",2]', 2, 1),
    (rb'["\\",[],{"\\\"":"{\\\\"}]', 5, 4),
    (b"[[[[[[", 6, 6),
]


@pytest.mark.parametrize(("text", "values", "fields"), JSON_COUNTS)
@pytest.mark.parametrize("piece", [1, 2, 3, 5, 100])
def test_values_are_counted_outside_strings_however_the_text_is_cut(
    text: bytes, values: int, fields: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_PIECE_BYTES", piece)
    counted = list(limits._counts(text))[-1]
    assert counted == (values, fields)


def test_a_body_of_many_values_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_decode", lambda *_: pytest.fail("it is decoded"))
    for filler, limit in ((b"[],", "json_fields"), (b'"",', "json_values"), (b"[", "json_fields")):
        sent = b'{"model":"m","messages":[],"x":[' + filler * 3_000_000
        with pytest.raises(InvalidRequest, match=f"--limit {limit}="):
            wire.decode_body(sent, chat_request.ChatBody)


def test_a_long_text_full_of_json_is_no_body_of_many_values() -> None:
    text = json.dumps([[0]] * 600_000)
    sent = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    assert chat.decode(sent).conversation.turns[0].text == text


def test_half_surrogate_pairs_are_mended_in_few_short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is one call that no other thread interrupts; each call takes some microseconds of Python."""
    parts: list[bytes] = []
    mend = wire._mend

    def noting(part: re.Match[bytes]) -> bytes:
        parts.append(part[0])
        return mend(part)

    monkeypatch.setattr(wire, "_mend", noting)
    unit, text = rb"\\ud800\ud800\ud83d\ude00\\\udc00", "\\ud800\ufffd\U0001f600\\\ufffd"
    assert wire._decode(b'"' + unit * 40_000 + b'"', str) == text * 40_000
    assert max(part.count(b"\\") for part in parts) <= 2000
    assert len(parts) < 250


def test_a_byte_that_json_does_not_allow_is_refused_beside_half_a_pair() -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        wire.decode_body(rb'{"model":"\ud800' + b'\0\0"}', chat_request.ChatBody)


def test_names_of_tools_are_assigned_in_one_step_each() -> None:
    tools = Toolbox()
    spaces = [{"type": "namespace", "name": "a" + "_" * (i % 2), "tools": [FUNCTION]} for i in range(4)]
    tools.add(spaces, "tools")
    assert [tool.name for tool in tools.tools] == ["a__f", "a___f"]
    tools.add([FUNCTION | {"name": "a__f"}], "tools")
    assert tools.tools[-1].name == "a__f_2"
    assert tools.model_names("a__f") == ["a__f_2"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, "/v1/completions", "/tokenize", "/detokenize"])
async def test_a_long_body_is_decoded_in_a_thread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    decode = wire.decode_body

    def noting(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return decode(*given)

    monkeypatch.setattr(wire, "decode_body", noting)
    sent: dict[str, Any] = body(path, "hi")
    if path in ("/v1/completions", "/tokenize"):
        sent = {"model": MODEL, "prompt": "hi"}
    elif path == "/detokenize":
        sent = {"model": MODEL, "tokens": [1, 2]}
    async with serving({"hi": "yes"}) as served:
        for size in (0, 70_000, 600_000):
            await served.client.post(path, sent | {"user": "x" * size})
    main = threading.main_thread()
    assert [thread is main for thread in threads] == [True, path != "/v1/completions", False]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_many_messages_are_decoded_in_a_thread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tried first, and what is decoded until it takes too long is not decoded again."""
    threads: list[threading.Thread] = []
    decode = wire.decode_raw

    def noting(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return decode(*given)

    monkeypatch.setattr(wire, "decode_raw", noting)
    sent = body(path, "hi")
    field = "input" if path == RESPONSES else "messages"
    messages = [{"role": "user", "content": f"{path} {number} {'x' * 60}"} for number in range(1500)]
    async with serving({}) as served:
        await served.client.post(path, sent | {field: messages})
    main = threading.main_thread()
    inline = sum(thread is main for thread in threads)
    assert 500 < inline < 1000
    assert len(threads) - inline >= 1500 - inline
    assert len(threads) < 1520


async def test_token_ids_beyond_the_window_are_refused_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(TOKENIZER), "decode", lambda *_: pytest.fail("it is decoded"))
    async with serving({}) as served:
        reply = await served.client.post("/v1/completions", {"model": MODEL, "prompt": [1] * 8192})
    assert reply.status == 400
    assert reply.json["error"]["code"] == "context_length_exceeded"


async def test_texts_of_tokens_are_made_once_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Any] = []
    decode = type(TOKENIZER).decode

    def noting(self: Any, ids: Any) -> str:
        decoded.append(ids)
        return decode(self, ids)

    monkeypatch.setattr(type(TOKENIZER), "decode", noting)
    async with serving({}) as served:
        sent = {"model": MODEL, "prompt": "ab" * 500, "return_token_strs": True}
        reply = await served.client.post("/tokenize", sent)
    assert reply.json["token_strs"] == ["a", "b"] * 500
    assert len(decoded) == 2


def test_decoding_a_body_leaves_no_protocol_out() -> None:
    deep = b'{"model":"m","max_tokens":1,"messages":' + b"[" * 100_000
    for decode in (chat.decode, messages.decode, responses.decode):
        with pytest.raises(InvalidRequest):
            decode(deep)
