"""Chat Completions in: messages, in every shape that harnesses give them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocols import event_stream, shapes
from protocols.chat_bodies import CLIENTS, READ, USER, assistant, decode, function
from singletree.conversation import Document, Image, Reasoning, Text, ToolCall, ToolResult, Turn
from singletree.protocols import chat


def turns(*messages: Any) -> tuple[Turn, ...]:
    return decode(messages=list(messages)).conversation.turns


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("hi", (Text("hi"),)),
        ("", ()),
        (None, ()),
        ([], ()),
        ([{"type": "text", "text": "hi"}], (Text("hi"),)),
        ([{"type": "text", "text": ""}, {"type": "text", "text": "b"}], (Text("b"),)),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], (Text("a"), Text("b"))),
    ],
)
def test_content_is_the_same_in_every_form(role: str, content: Any, parts: tuple[Any, ...]) -> None:
    # C1 C36: the role stays where it stands
    assert turns(USER, {"role": role, "content": content}, USER)[1] == Turn(role, parts)  # type: ignore[arg-type]


def test_content_may_be_absent() -> None:
    assert turns({"role": "user"}) == (Turn("user"),)


def test_any_order_of_roles_is_taken() -> None:  # C36
    roles = ["assistant", "assistant", "system", "user", "user", "developer", "system", "assistant"]
    assert [t.role for t in turns(*({"role": r, "content": "x"} for r in roles))] == roles


def test_reasoning_text_and_calls_are_read_in_this_order() -> None:  # C5
    message = assistant(
        tool_calls=[function("read", "{}"), function("list", "{}", "c2")],
        content="I read.",
        reasoning_content="Hm.",
    )
    parts = (
        Reasoning("Hm."),
        Text("I read."),
        ToolCall("read", "{}", "c1"),
        ToolCall("list", "{}", "c2"),
    )
    assert turns(message) == (Turn("assistant", parts),)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "Hm. "},
        {"reasoning": "Hm. "},
        {"reasoning_content": "Hm. ", "reasoning": "Hm. "},
        {"reasoning_details": [{"type": "reasoning.text", "text": "Hm."}, {"text": " ", "index": 1}]},
        {"reasoning_details": [{"type": "reasoning.summary", "summary": "Hm. "}]},
        {"reasoning": "Hm. ", "reasoning_details": [{"type": "reasoning.text", "text": "Hm. "}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm. "}]}]},
        {"content": [{"type": "thinking", "thinking": "Hm. "}]},
    ],
)
def test_reasoning_in_every_field(fields: dict[str, Any]) -> None:  # C5
    assert turns(assistant(**fields))[0].parts == (Reasoning("Hm. "),)


def test_encrypted_reasoning_details_come_through() -> None:  # C34
    details = [{"type": "reasoning.encrypted", "data": "x", "index": 0}]
    [part] = turns(assistant(reasoning_details=details))[0].parts
    assert part.extra == {"reasoning_details": details}


@pytest.mark.parametrize(
    "arguments",
    [
        '{"b":  "x",\n "a": 1.0, "a": 10000000000000000000000, "\\u00ed": "í"}',
        "not json",
        '"text"',
        "[1]",
        "{} ",
    ],
)
def test_arguments_are_kept_byte_for_byte(arguments: str) -> None:  # C3
    [call] = turns(assistant(content=None, tool_calls=[function("read", arguments)]))[0].tool_calls
    assert call == ToolCall("read", arguments, "c1")


def test_arguments_given_as_an_object_keep_order_and_numbers() -> None:  # C3
    message = b'{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{"a" : 1.0,"a":2}}}]}'
    body = b'{"model":"m","messages":[%b]}' % message
    [call] = chat.decode(body).conversation.turns[0].tool_calls
    assert call == ToolCall("f", '{"a": 1.0, "a": 2}', "")
    assert not call.verbatim


@pytest.mark.parametrize("arguments", ["", " ", None])
def test_no_arguments_are_an_empty_object(arguments: str | None) -> None:  # C12
    [call] = turns(assistant(tool_calls=[function("now", arguments)]))[0].tool_calls
    assert call.arguments == "{}"


def test_what_was_answered_comes_back_as_it_was() -> None:  # C3 C5 C33
    for shape in shapes.SHAPES:
        made = event_stream.body(chat, decode(tools=[READ]), shape.turn, shape.finished)
        [turn] = turns(json.loads(made)["choices"][0]["message"])
        shown = (c for c in shape.turn.tool_calls if c.complete or c.arguments)
        calls = tuple(ToolCall(c.name, c.arguments or "{}", c.id) for c in shown)
        # One field holds all spans of reasoning, with a break between them.
        reasoning = "\n\n".join(part.text for part in shape.turn.parts if isinstance(part, Reasoning))
        assert (turn.text, turn.reasoning, turn.tool_calls) == (shape.turn.text, reasoning, calls)


def test_a_run_of_results_is_one_turn() -> None:
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"r{i}"} for i in range(3)]
    expected = tuple(ToolResult(f"c{i}", (Text(f"r{i}"),)) for i in range(3))
    assert turns(*results[:2], USER, results[2]) == (
        Turn("tool", expected[:2]),
        Turn("user", (Text("hi"),)),
        Turn("tool", expected[2:]),
    )


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ()),
        ("", ()),
        ([{"type": "text", "text": "r"}], (Text("r"),)),
        (
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
            (Image("image/png", "AA=="),),
        ),
    ],
)
def test_the_content_of_a_result(content: Any, parts: tuple[Any, ...]) -> None:  # C35
    [turn] = turns({"role": "tool", "tool_call_id": "c1", "name": "read", "content": content})
    assert turn.parts == (ToolResult("c1", parts),)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image_url", "image_url": {"url": "https://x/y.png"}}, Image(url="https://x/y.png")),
        ({"type": "image_url", "image_url": "https://x/y.png"}, Image(url="https://x/y.png")),
        (
            {"type": "image_url", "image_url": {"url": "DATA:image/PNG;base64,AA==", "detail": "low"}},
            Image("image/png", "AA=="),
        ),
        (
            {"type": "image_url", "image_url": {"url": "data:text/plain,hi"}},
            Image(url="data:text/plain,hi"),
        ),
        (
            {
                "type": "file",
                "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AA=="},
            },
            Document("application/pdf", "AA==", title="a.pdf"),
        ),
    ],
)
def test_pictures_and_files(part: dict[str, Any], expected: Any) -> None:
    assert turns({"role": "user", "content": [part]})[0].parts == (expected,)


def test_a_refusal_is_text() -> None:
    assert turns(assistant(content=None, refusal="No."))[0].parts == (Text("No."),)
    assert turns(assistant(content=[{"type": "refusal", "refusal": "No."}]))[0].parts == (Text("No."),)


def test_custom_calls() -> None:  # C25
    call = {"id": "c1", "type": "custom", "custom": {"name": "apply_patch", "input": '*** "x"\n'}}
    [made] = turns(assistant(tool_calls=[call]))[0].tool_calls
    assert made == ToolCall("apply_patch", '{"input": "*** \\"x\\"\\n"}', "c1")
    assert not made.verbatim


def test_names_of_participants_come_through() -> None:
    assert turns({"role": "user", "name": "Ann", "content": "hi"})[0].extra == {"name": "Ann"}


@pytest.mark.parametrize("name", CLIENTS)
def test_what_each_harness_sends(name: str) -> None:
    request = chat.decode(json.dumps(CLIENTS[name]).encode())
    decoded = request.conversation.turns
    assert decoded[2].parts[0] == Reasoning("Hm.")
    assert json.loads(decoded[2].tool_calls[0].arguments) == {"p": 1}
    [result] = decoded[3].parts
    assert isinstance(result, ToolResult)
    assert (result.call_id, result.parts) == (decoded[2].tool_calls[0].id, (Text("word"),))
    assert request.options.include_usage
    assert request.options.reasoning_fields == (("reasoning",) if name == "pi" else ("reasoning_content",))
    assert request.sampling.max_tokens
    assert request.warnings == ()
