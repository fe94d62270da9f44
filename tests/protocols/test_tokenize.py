"""Text to tokens and back over the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

from singletree.conversation import Text, Turn
from singletree.errors import InvalidRequest
from singletree.raw_tokens import routes
from singletree.raw_tokens.routes import DetokenizeBody, TokenizeRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def decode(**fields: Any) -> TokenizeRequest:
    return routes.decode_tokenize(json.dumps(fields).encode(), {})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "hi"}, TokenizeRequest("", "hi")),
        ({"prompt": ""}, TokenizeRequest("", "")),
        (
            {"model": "m", "prompt": "hi", "add_special_tokens": False, "return_token_strs": True},
            TokenizeRequest("m", "hi", add_special_tokens=False, return_token_strs=True),
        ),
        (
            {"prompt": "hi", "model": None, "messages": None, "add_special_tokens": None},
            TokenizeRequest("", "hi"),
        ),
    ],
)
def test_a_prompt(fields: dict[str, Any], expected: TokenizeRequest) -> None:
    assert decode(**fields) == expected


def test_messages_are_read_as_a_chat_is() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    request = decode(messages=MESSAGES, tools=[tool], chat_template_kwargs={"enable_thinking": False})
    assert request.prompt is None
    assert request.chat is not None
    assert request.chat.conversation.turns == (Turn("user", (Text("hi"),)),)
    assert [t.name for t in request.chat.conversation.tools] == ["f"]
    assert request.chat.thinking.enabled is False
    assert (request.add_special_tokens, request.chat.opens_turn) == (False, True)


@pytest.mark.parametrize(
    ("fields", "special", "generation"),
    [
        ({"add_special_tokens": True}, True, True),
        ({"add_generation_prompt": False}, False, False),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": "So"}], "continue_final_message": True},
            False,
            True,
        ),
    ],
)
def test_what_a_chat_is_printed_with(fields: dict[str, Any], special: bool, generation: bool) -> None:
    request = decode(**{"messages": MESSAGES} | fields)
    assert request.chat is not None
    assert (request.add_special_tokens, request.chat.opens_turn) == (special, generation)


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
    decoded = routes.decode_detokenize(b'{"model":"m","tokens":[1,2]}')
    assert decoded == DetokenizeBody([1, 2], "m")
    assert routes.decode_detokenize(b'{"tokens":[]}') == DetokenizeBody([])


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
        routes.decode_detokenize(body)
    assert caught.value.param == param


def test_answers() -> None:
    assert json.loads(routes.encode_tokenize([5, 6], max_model_len=8192)) == {
        "count": 2,
        "max_model_len": 8192,
        "tokens": [5, 6],
        "token_strs": None,
    }
    reported = json.loads(routes.encode_tokenize((5,), max_model_len=1, token_strs=["Ġhi"]))
    assert reported["token_strs"] == ["Ġhi"]
    assert json.loads(routes.encode_detokenize('hi "é"\n')) == {"prompt": 'hi "é"\n'}
