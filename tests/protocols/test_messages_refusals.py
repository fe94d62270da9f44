"""Requests that are refused: the field is named, in the API's words where a harness acts on them."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest

from singletree.errors import InvalidRequest
from singletree.protocols import messages

from .test_messages_decode import BASH, MINIMAL, assistant, decode, text, user


def refused(body: dict[str, Any] | bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        messages.decode(body if isinstance(body, bytes) else json.dumps(body).encode())
    return raised.value


CALL = {"type": "tool_use", "id": "i", "name": "f"}

REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": 3}, "model", "model: Expected `str`, got `int`"),
    ({"messages": []}, "messages", "messages: at least one message is required"),
    ({"messages": "x"}, "messages", "messages: Expected `array`, got `str`"),
    ({"messages": [{"content": "x"}]}, "messages.0.role", "messages.0.role: Field required"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "messages.0.content: Field required"),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages.0.role",
        "messages.0.role: 'tool' is not known; send one of user, assistant, system",
    ),
    (
        {"messages": [user(text("x"), {"type": "text"})]},
        "messages.0.content.1.text",
        "messages.0.content.1.text: Field required",
    ),
    (
        {"messages": [user({"text": "x"})]},
        "messages.0.content.0.type",
        "messages.0.content.0.type: Field required",
    ),
    (
        {"messages": [user({"type": "tool_use", "id": "i", "name": "f", "input": {}})]},
        "messages.0.content.0.type",
        "messages.0.content.0.type: tool_use is not allowed in user content",
    ),
    (
        {"messages": [assistant({"type": "tool_use", "name": "f", "input": {}})]},
        "messages.0.content.0.id",
        "messages.0.content.0.id: Field required",
    ),
    (
        {"messages": [user({"type": "tool_result", "content": "x"})]},
        "messages.0.content.0.tool_use_id",
        "messages.0.content.0.tool_use_id: Field required",
    ),
    (
        {
            "messages": [
                user({"type": "tool_result", "tool_use_id": "i", "content": [text("x"), {"type": "text"}]})
            ]
        },
        "messages.0.content.0.content.1.text",
        "messages.0.content.0.content.1.text: Field required",
    ),
    (
        {
            "messages": [
                user({"type": "tool_result", "tool_use_id": "i", "content": [{"type": "text", "text": 1}]})
            ]
        },
        "messages.0.content.0.content.0.text",
        "messages.0.content.0.content.0.text: Expected `str | null`, got `int`",
    ),
    (
        {
            "messages": [
                user(
                    {
                        "type": "tool_result",
                        "tool_use_id": "i",
                        "content": [{"type": "thinking", "thinking": "x"}],
                    }
                )
            ]
        },
        "messages.0.content.0.content.0.type",
        "messages.0.content.0.content.0.type: thinking is not allowed in tool_result content",
    ),
    (
        {"system": [{"type": "tool_result", "tool_use_id": "i"}]},
        "system.0.type",
        "system.0.type: tool_result is not allowed in system content",
    ),
    (
        {"messages": [assistant({"type": "web_search_tool_result", "content": []})]},
        "messages.0.content.0.tool_use_id",
        "messages.0.content.0.tool_use_id: Field required",
    ),
    (
        {"messages": [{"role": "system", "content": [{"type": "tool_addition", "tool": 3}]}]},
        "messages.0.content.0.tool",
        "messages.0.content.0.tool: Expected `object`, got `int`",
    ),
    (
        {"messages": [user({"type": "image"})]},
        "messages.0.content.0.source",
        "messages.0.content.0.source: Field required",
    ),
    (
        {"messages": [user({"type": "image", "source": {"type": "file", "file_id": "f"}})]},
        "messages.0.content.0.source.type",
        "messages.0.content.0.source.type: 'file' is not supported; files are not stored here: send the data "
        "as base64, or a url",
    ),
    (
        {"system": [{"type": "text", "text": 1}]},
        "system.0.text",
        "system.0.text: Expected `str | null`, got `int`",
    ),
    ({"tools": [{"description": "x"}]}, "tools.0.name", "tools.0.name: Field required"),
    (
        {"tools": [{"name": "f", "input_schema": "x"}]},
        "tools.0.input_schema",
        "tools.0.input_schema: Expected `object | null`, got `str`",
    ),
    (
        {"tool_choice": {"type": "required"}},
        "tool_choice.type",
        "tool_choice.type: 'required' is not known; send one of auto, any, tool, none",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "tool_choice: 'any' needs at least one tool in tools"),
    (
        {"tools": [BASH], "tool_choice": {"type": "tool", "name": "Nope"}},
        "tool_choice.name",
        "tool_choice.name: no tool 'Nope' in tools",
    ),
    (
        {"tools": [BASH], "tool_choice": {"type": "tool"}},
        "tool_choice.name",
        "tool_choice.name: Field required",
    ),
    (
        {"thinking": {"type": "on"}},
        "thinking.type",
        "thinking.type: 'on' is not known; send one of enabled, adaptive, between_tools, disabled",
    ),
    (
        {"output_config": {"format": {"type": "json_object"}}},
        "output_config.format.type",
        "output_config.format.type: 'json_object' is not known; send one of json_schema",
    ),
    (
        {"output_format": {"type": "json_schema"}},
        "output_format.schema",
        "output_format.schema: Field required",
    ),
    (
        {"compaction": {"type": "summarize"}},
        "compaction",
        "compaction: this server does not write summaries; ask for one in messages",
    ),
    ({"temperature": -1}, "temperature", "temperature is -1.0; send a number from 0 to 2"),
    ({"max_tokens": "9"}, "max_tokens", "max_tokens: Expected `int | null`, got `str`"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[r[2][:50] for r in REFUSED])
def test_refusals_name_the_field(fields: dict[str, Any], param: str, words: str) -> None:  # C44
    refusal = refused(MINIMAL | fields)
    assert (refusal.message, refusal.param) == (words, param)


@pytest.mark.parametrize("place", ["messages", "system", "tool_result"])
def test_an_unknown_block_type_is_named(place: str) -> None:
    odd = {"type": "hologram\r\n", "text": "x"}
    bodies = {
        "messages": {"messages": [user(text("x"), odd)]},
        "system": {"system": [text("x"), odd]},
        "tool_result": {
            "messages": [user({"type": "tool_result", "tool_use_id": "i", "content": [text("x"), odd]})]
        },
    }
    where = {
        "messages": "messages.0.content.1",
        "system": "system.1",
        "tool_result": "messages.0.content.0.content.1",
    }
    refusal = refused(MINIMAL | bodies[place])
    assert refusal.param == f"{where[place]}.type"
    known = (
        r"'hologram\r\n' is not a type of content block; send one of text, thinking, tool_use, tool_result"
    )
    assert refusal.message.startswith(f"{where[place]}.type: {known}")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model":"m"',
        b"\xff",
        b'{"model":"\xff","max_tokens":1,"messages":[]}',
        b'{"model":"m","max_tokens":1,"messages":[{"role":"assistant","content":'
        b'[{"type":"tool_use","id":"i","name":"f","input":{"a":"\xff"}}]}]}',
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":'
        b'[{"type":"tool_result","tool_use_id":"i","content":"\xff"}]}]}',
        b'{"model":"m","max_tokens":1,"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"m","max_tokens":1,"messages":[],"tools":[{"input_schema":' + b'{"a":' * 100_000,
    ],
    ids=lambda b: repr(b[:12]),
)
def test_bodies_that_are_no_json(body: bytes) -> None:
    assert refused(body).message


def test_a_clients_word_cannot_break_a_header_or_flood_it() -> None:
    warning = decode(tools=[{"type": "x\r\nset-cookie: a=ü" + "y" * 9999}]).warnings[0]
    assert warning.isascii()
    assert warning.isprintable()
    assert len(warning) < 250


OPENING, CLOSING = b'{"type":"document","source":{"type":"content","content":[', b"]}}"


def nested(depth: int) -> bytes:
    document = OPENING * depth + b'{"type":"text","text":"x"}' + CLOSING * depth
    return b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":[%b]}]}' % document


def test_nesting_is_read_as_deep_as_can_be() -> None:
    assert messages.decode(nested(20)).conversation.turns[0].text == "x"
    for depth in range(100, 2000, 100):
        with suppress(InvalidRequest):
            messages.decode(nested(depth))
    assert refused(nested(2000)).message.startswith("the request body is n")


def test_half_an_emoji_in_a_body_is_no_reason_to_refuse_it() -> None:
    body = json.dumps(
        MINIMAL | {"messages": [assistant({**CALL, "input": {"a": "\ud83d"}}), user(text("\ud83d"))]}
    )
    turns = messages.decode(body.encode()).conversation.turns
    assert json.loads(turns[0].tool_calls[0].arguments) == {"a": "\ufffd"}
    assert turns[1].text == "\ufffd"
