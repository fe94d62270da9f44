"""Text to tokens and back over the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

from singletree.conversation import Request, Text, Turn
from singletree.errors import InvalidRequest
from singletree.protocols import wire
from singletree.raw_tokens import routes
from singletree.raw_tokens.routes import DetokenizeBody, TokenizeBody

MESSAGES = [{"role": "user", "content": "hi"}]


def decode(**fields: Any) -> tuple[TokenizeBody, Request | None]:
    return routes.decode_tokenize(json.dumps(fields).encode(), {})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "hi"}, (None, "hi", None)),
        ({"prompt": ""}, (None, "", None)),
        (
            {"model": "m", "prompt": "hi", "add_special_tokens": False, "return_token_strs": True},
            ("m", "hi", True),
        ),
        ({"prompt": "hi", "model": None, "messages": None, "add_special_tokens": None}, (None, "hi", None)),
    ],
)
def test_a_prompt(fields: dict[str, Any], expected: tuple[str | None, str, bool | None]) -> None:
    wanted, request = decode(**fields)
    assert (wanted.model, wanted.prompt, wanted.return_token_strs) == expected
    assert request is None


def test_messages_are_read_as_a_chat_is() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    wanted, request = decode(messages=MESSAGES, tools=[tool], chat_template_kwargs={"enable_thinking": False})
    assert wanted.prompt is None
    assert request is not None
    assert request.conversation.turns == (Turn("user", (Text("hi"),)),)
    assert [t.name for t in request.conversation.tools] == ["f"]
    assert request.thinking.enabled is False
    assert request.opens_turn


@pytest.mark.parametrize(
    ("fields", "generation"),
    [
        ({"add_special_tokens": True}, True),
        ({"add_generation_prompt": False}, False),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": "So"}], "continue_final_message": True},
            True,
        ),
    ],
)
def test_what_a_chat_is_printed_with(fields: dict[str, Any], generation: bool) -> None:
    _, request = decode(**{"messages": MESSAGES} | fields)
    assert request is not None
    assert request.opens_turn == generation


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "prompt", "neither prompt nor messages is given"),
        ({"prompt": "x", "messages": MESSAGES}, "prompt", "both prompt and messages are given"),
        ({"prompt": 3}, "prompt", "Expected `str"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "critic"}]}, "messages.0.role", "'critic'"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        decode(**fields)
    assert caught.value.param == param


def test_detokenize() -> None:
    assert wire.decode_body(b'{"model":"m","tokens":[1,2]}', DetokenizeBody) == DetokenizeBody([1, 2], "m")
    assert wire.decode_body(b'{"tokens":[]}', DetokenizeBody) == DetokenizeBody([])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{}", "tokens"),
        (b'{"tokens":[1,-2]}', "tokens.1"),
        (b'{"tokens":["a"]}', "tokens.0"),
        (b'{"tokens":3}', "tokens"),
        (b"{", None),
    ],
)
def test_detokenize_refuses(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.decode_body(body, DetokenizeBody)
    assert caught.value.param == param
