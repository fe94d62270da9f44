"""Chat Completions in: what is refused, in which words; nothing that is sent makes another error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import event_stream, shapes
from protocols.chat_bodies import FULL, READ, USER, assistant, decode
from singletree.conversation import Request, Turn
from singletree.errors import InvalidRequest
from singletree.protocols import chat


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": 3}, "model", "Expected `str`, got `int`"),
        ({"messages": ...}, "messages", "Field required"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hi"}, "messages", "Expected `array`"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "Field required"),
        (
            {"messages": [USER, {"role": "critic"}]},
            "messages.1.role",
            "'critic'; send one of system, developer",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "Expected"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages.0.tool_call_id",
            "the call that this answers",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages.0.content.0.type",
            "do not accept audio: send a transcript",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]},
            "messages.0.content.0.type",
            "frames as image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "x" * 99}]}]},
            "messages.0.content.0.type",
            "send one of text, image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
            "required",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]},
            "messages.0.content.0.file.file_data",
            "send the data itself",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages.0.content",
            "only a message of role 'assistant'",
        ),
        ({"messages": [assistant(tool_calls=[{"id": "c"}])]}, "messages.0.tool_calls.0.function", "required"),
        (
            {"messages": [assistant(tool_calls=[{"function": {"arguments": ""}}])]},
            "messages.0.tool_calls.0.function.name",
            "required",
        ),
        (
            {"messages": [assistant(function_call={"arguments": "{}"})]},
            "messages.0.function_call.name",
            "required",
        ),
        ({"functions": [{"name": ""}]}, "functions.0.name", "is empty"),
        ({"functions": [{"name": "f"}], "tools": [READ]}, "functions", "send one of them"),
        ({"function_call": "auto", "tool_choice": "auto"}, "function_call", "send one of them"),
        ({"function_call": "required"}, "function_call", "'required'; send 'auto'"),
        ({"function_call": {"name": "g"}, "functions": [{"name": "f"}]}, "function_call", "names 'g'"),
        ({"n": 129}, "n", "n is 129; send a number from 1 to 128"),
        ({"n": 0}, "n", "n is 0"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "send stream=false"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20"),
        ({"nvext": "x"}, "nvext", "Expected `object | null`, got `str`"),
        ({"nvext": {"agent_hints": {"priority": "x"}}}, "nvext.agent_hints.priority", "got `str`"),
        ({"nvext": {"agent_hints": {"strict_priority": -1}}}, "nvext.agent_hints.strict_priority", ">= 0"),
        (
            {"nvext": {"agent_context": {"trajectory_id": 3}}},
            "nvext.agent_context.trajectory_id",
            "got `int`",
        ),
        ({"n": 10**4000}, "n", "n is 1000"),
        ({"seed": 10**4000}, "seed", "seed is 1000"),
        ({"top_k": -2}, "top_k", "from -1 to 2147483647"),
        ({"temperature": 2.5}, "temperature", "2.5; send a number from 0 to 2"),
        ({"temperature": "hot"}, "temperature", "Expected `float | null`, got `str`"),
        ({"top_p": -0.1}, "top_p", "from 0 to 1"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
        ({"logit_bias": {"the": 1}}, "logit_bias", "'the' is not a token id"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function", "with a name"),
        ({"tools": [{"type": "custom"}]}, "tools.0.custom", "required"),
        ({"tool_choice": "required"}, "tool_choice", "the request has no tools"),
        ({"tool_choice": "maybe"}, "tool_choice", "'maybe'; send 'auto'"),
        ({"tool_choice": {"type": "function"}, "tools": [READ]}, "tool_choice", "'function'; send"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [READ]},
            "tool_choice",
            "names 'x', which is not in tools",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'; send 'text'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        (
            {
                "messages": [assistant(content="So")],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
            "send one of them",
        ),
        ({"continue_final_message": True}, "continue_final_message", "the last message is of role 'user'"),
    ],
)
def test_refusals_name_the_problem_the_value_and_the_cure(
    fields: dict[str, Any], param: str, words: str
) -> None:
    error = refused(**fields)
    assert error.param == param
    assert words in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model":"m","messages":[' + b"[" * 99_999,
    ],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        chat.decode(body)


@pytest.mark.parametrize(
    "arguments",
    [b'"\xff"', b'"a\xed\xa0\x80"', b'{"a":"\xff"}'],
    ids=["byte", "half", "object"],
)
def test_arguments_that_are_no_text_are_refused(arguments: bytes) -> None:
    call = b'{"function":{"name":"f","arguments":%b}}' % arguments
    with pytest.raises(InvalidRequest) as caught:
        chat.decode(b'{"model":"m","messages":[{"role":"assistant","tool_calls":[%b]}]}' % call)
    assert caught.value.param in ("messages.0.tool_calls.0.function.arguments", None)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(["user", "tool", "assistant", "text", "auto", "required", "custom", "none", "-1"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in below for place in places(child, (*path, key)))]


def read_or_refused(body: bytes) -> Request | InvalidRequest:
    try:
        return chat.decode(body)
    except InvalidRequest as error:
        return error


PLACES = [place for place in places(FULL) if place]


@given(st.lists(st.tuples(st.sampled_from(PLACES), st.one_of(st.just(...), ODD)), min_size=1, max_size=3))
def test_a_changed_body_is_read_or_refused(changes: list[tuple[tuple[Any, ...], Any]]) -> None:  # C44
    body = json.loads(json.dumps(FULL))
    for (*path, last), value in changes:
        inside = body
        try:
            for key in path:
                inside = inside[key]
            if value is ...:
                del inside[last]
            else:
                inside[last] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    read = read_or_refused(json.dumps(body).encode())
    if isinstance(read, InvalidRequest):
        assert read.param != ""
        assert len(read.message) < 400
    else:
        made = event_stream.body(chat, read, Turn("assistant"), shapes.finished(), id="i")
        assert json.loads(made)["model"] == read.model


@given(st.binary(max_size=40), st.integers(0, len(json.dumps(FULL))), st.integers(0, 4))
def test_changed_bytes_are_read_or_refused(new: bytes, at: int, cut: int) -> None:  # C44
    body = json.dumps(FULL, ensure_ascii=False).encode()
    assert isinstance(read_or_refused(body[:at] + new + body[at + cut :]), Request | InvalidRequest)
