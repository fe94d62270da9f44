"""Requests as harnesses send them: the turns they hold, part by part, in their order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from singletree.conversation import (
    Document,
    Image,
    Part,
    Reasoning,
    Request,
    Role,
    Text,
    Thinking,
    ToolCall,
    ToolReference,
    ToolResult,
    Turn,
)
from singletree.protocols import messages
from singletree.request_options import RequestOptions

MINIMAL: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
BASH = {"name": "Bash", "description": "run", "input_schema": {"type": "object", "properties": {}}}


def decode(**fields: Any) -> Request:
    return messages.decode(json.dumps(MINIMAL | fields).encode())


def turns(*output: dict[str, Any], **fields: Any) -> tuple[Turn, ...]:
    return decode(messages=list(output), **fields).conversation.turns


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(output: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": output, **more}


def parts(*content: Any) -> tuple[Part, ...]:
    """The parts of one user message."""
    (turn,) = turns(user(*content))
    return turn.parts


def test_the_least_there_is() -> None:
    assert decode() == Request("m", decode().conversation, sampling=decode().sampling)
    assert decode().conversation.turns == (Turn("user", (Text("x"),)),)
    assert decode().sampling.max_tokens == 9


CLAUDE_CODE: dict[str, Any] = {
    "model": "qwen",
    "messages": [
        user(
            text("<system-reminder>a</system-reminder>"),
            text("Fix it", cache_control={"type": "ephemeral"}),
        ),
        {"role": "system", "content": [text("# Environment")]},
        assistant(
            {"type": "thinking", "thinking": "I look.", "signature": ""},
            text("I look."),
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            {"type": "tool_use", "id": "toolu_2", "name": "ToolSearch", "input": {}},
        ),
        user(
            {
                "type": "tool_result",
                "tool_use_id": "toolu_2",
                "content": [{"type": "tool_reference", "tool_name": "WebFetch"}],
            },
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", "is_error": False},
            text("Go on.", cache_control={"type": "ephemeral"}),
        ),
        {"role": "system", "content": "<total_tokens>5 tokens left</total_tokens>"},
    ],
    "system": [
        text("x-anthropic-billing-header: cc_version=2.1.329.929; cc_entrypoint=sdk-cli;"),
        text("You are an agent.", cache_control={"type": "ephemeral"}),
    ],
    "tools": [
        BASH,
        {"name": "DeferredToolPlaceholder", "description": "p", "input_schema": {}, "defer_loading": True},
        {"name": "WebFetch", "description": "f", "input_schema": {"b": 1, "a": 2}, "defer_loading": True},
    ],
    "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"0e3a"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive", "display": "updates"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


def test_claude_code() -> None:  # C1 C26 C37
    request = messages.decode(json.dumps(CLAUDE_CODE).encode(), {"anthropic-version": "2023-06-01"})
    assert request.conversation.turns == (
        Turn("system", (Text(CLAUDE_CODE["system"][0]["text"]), Text("You are an agent."))),
        Turn("user", (Text("<system-reminder>a</system-reminder>"), Text("Fix it"))),
        Turn("system", (Text("# Environment"),)),
        Turn(
            "assistant",
            (
                Reasoning("I look."),
                Text("I look."),
                ToolCall("Bash", '{"command": "ls"}', "toolu_1"),
                ToolCall("ToolSearch", "{}", "toolu_2"),
            ),
        ),
        Turn(
            "tool",
            (ToolResult("toolu_2", (ToolReference("WebFetch"),)), ToolResult("toolu_1", (Text("a.py"),))),
        ),
        Turn("user", (Text("Go on."),)),
        Turn("system", (Text("<total_tokens>5 tokens left</total_tokens>"),)),
    )
    assert [(t.name, t.deferred) for t in request.conversation.tools] == [
        ("Bash", False),
        ("DeferredToolPlaceholder", True),
        ("WebFetch", True),
    ]
    assert request.conversation.tools[2].parameters == {"b": 1, "a": 2}
    assert list(request.conversation.tools[2].parameters) == ["b", "a"]
    assert request.thinking == Thinking(True, "high")
    assert request.session == "0e3a"
    assert request.stream
    assert request.options == RequestOptions(reports_context_edits=True)
    assert request.warnings == ()


def test_cache_marks_are_kept_aside_and_are_no_difference() -> None:  # C1
    marked = parts(text("x", cache_control={"type": "ephemeral", "ttl": "1h"}))
    assert marked == parts(text("x"))
    assert marked[0].extra == {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert (
        decode(tools=[BASH | {"cache_control": {"type": "ephemeral"}}]).conversation
        == decode(tools=[BASH]).conversation
    )
    assert decode(cache_control={"type": "ephemeral"}) == decode()


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ('{"b":1.0,"a":"\\u00e9", "b":1e2}', '{"b": 1.0, "a": "é", "b": 1e2}'),
        ("{ }", "{}"),
        ('{"n":123456789012345678901,"z":-0}', '{"n": 123456789012345678901, "z": -0}'),
        ('{"a":{"b":[1,{"c":"x, y: z"}],"d":[]}}', '{"a": {"b": [1, {"c": "x, y: z"}], "d": []}}'),
        ('{"pair":"\\ud83d\\ude00"}', '{"pair": "😀"}'),
    ],
)
def test_tool_input_keeps_the_order_of_keys_and_the_spelling_of_numbers(sent: str, shown: str) -> None:  # C3
    """Its white space and escapes are the client's: ``input`` is an object, which each client prints in its own way."""
    call = sent_input(sent.encode())
    assert call.arguments == shown
    assert not call.verbatim


@pytest.mark.parametrize(
    ("given", "arguments", "complete"),
    [
        ({}, "{}", True),
        (None, "{}", True),
        ([1], "[1]", True),
        (3, "3", True),
        ("", "", False),
        ('{"a": ', '{"a": ', False),
    ],
)
def test_input_that_is_no_object(given: Any, arguments: str, complete: bool) -> None:
    (turn,) = turns(assistant({"type": "tool_use", "id": "i", "name": "f", "input": given}))
    assert turn.tool_calls == (ToolCall("f", arguments, "i", complete),)


def sent_input(spelled: bytes) -> ToolCall:
    block = b'{"type": "tool_use", "id": "i", "name": "f", "input":  %b }' % spelled
    body = b'{"model":"m","max_tokens":1,"messages":[{"role":"assistant","content":[%b]}]}' % block
    return messages.decode(body).conversation.turns[0].tool_calls[0]


def test_what_claude_code_keeps_of_a_cut_call_is_what_the_model_wrote() -> None:  # C15
    kept = rb'{"__unparsedToolInput":{"raw":"{\"command\": \"echo"}}'
    assert sent_input(kept) == ToolCall("f", '{"command": "echo', "i", complete=False)


def test_a_body_printed_with_indentation_does_not_indent_the_prompt() -> None:
    spelled = b'{\n            "b": 1.0,\n            "a": [\n "\\n\\u00e9", 1e2 ]\n }'
    assert sent_input(spelled).arguments == '{"b": 1.0, "a": ["\\né", 1e2]}'


def test_order_inside_a_message_is_kept() -> None:
    results = [{"type": "tool_result", "tool_use_id": i} for i in "abc"]
    assert turns(user(text("1"), results[0], results[1], text("2"), results[2])) == (
        Turn("user", (Text("1"),)),
        Turn("tool", (ToolResult("a"), ToolResult("b"))),
        Turn("user", (Text("2"),)),
        Turn("tool", (ToolResult("c"),)),
    )


def test_interleaved_assistant_blocks_stay_in_order() -> None:  # C5
    think = {"type": "thinking", "thinking": "t", "signature": "s"}
    call = {"type": "tool_use", "id": "i", "name": "f", "input": {}}
    (turn,) = turns(assistant(think, text("a"), call, think, call, text("b")))
    assert [type(p) for p in turn.parts] == [Reasoning, Text, ToolCall, Reasoning, ToolCall, Text]
    assert turn.parts[0].extra == {"signature": "s"}


ROLES: list[Role] = ["user", "assistant", "system"]
CONTENTS: list[tuple[Any, tuple[Part, ...]]] = [
    ("a", (Text("a"),)),
    ("", ()),
    ([], ()),
    (None, ()),
    ([text("")], ()),
    ([text("a"), text("")], (Text("a"),)),
]


@pytest.mark.parametrize("first", ROLES)
@pytest.mark.parametrize("second", ROLES)
def test_any_sequence_of_roles_stays_as_it_is(first: Role, second: Role) -> None:  # C1 C36
    for content, says in CONTENTS:
        messages = turns({"role": first, "content": content}, {"role": second, "content": "b"})
        assert messages == (Turn(first, says), Turn(second, (Text("b"),)))


def test_a_trailing_assistant_turn_is_the_last_turn() -> None:  # C36
    assert turns(user(text("x")), assistant(text("The answer is ")))[-1] == Turn(
        "assistant", (Text("The answer is "),)
    )


@pytest.mark.parametrize("system", [None, "", [], [text("")]])
def test_an_empty_system_prompt_is_none(system: Any) -> None:
    assert decode(system=system).conversation == decode().conversation


def test_string_equals_one_text_block() -> None:
    assert decode(system="s").conversation == decode(system=[text("s")]).conversation
    result = {"type": "tool_result", "tool_use_id": "a"}
    assert turns(user(result | {"content": "r"})) == turns(user(result | {"content": [text("r")]}))


def test_thinking_blocks() -> None:  # C37
    (turn,) = turns(
        assistant(
            {"type": "redacted_thinking", "data": "EmwKAh"},
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking", "thinking": "", "signature": "capsule"},
            {"type": "thinking", "thinking": "a", "signature": "ErUB/of+another=="},
            {"type": "thinking", "thinking": "b"},
        )
    )
    assert turn.parts == (Reasoning(""), Reasoning("a"), Reasoning("b"))
    assert [p.extra for p in turn.parts] == [
        {"signature": "capsule"},
        {"signature": "ErUB/of+another=="},
        None,
    ]


def test_what_was_ignored_is_reported_once() -> None:
    redacted = {"type": "redacted_thinking", "data": "E"}
    assert decode(messages=[assistant(redacted, redacted), user(text("x"))]).warnings == (
        "redacted_thinking blocks are ignored: only the server that encrypted it can read it",
    )


PNG = {"type": "base64", "media_type": "image/png", "data": "iVBOR"}


def test_tool_result_contents() -> None:  # C35
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "is_error": True,
        "content": [
            text("r"),
            text(""),
            {"type": "image", "source": PNG},
            {"type": "document", "source": PNG | {"media_type": "application/pdf"}, "title": "T"},
            {"type": "tool_reference", "tool_name": "WebFetch"},
            {"type": "search_result", "source": "https://a", "title": "A", "content": [text("found")]},
        ],
    }
    written = (
        Text("r"),
        Image("image/png", "iVBOR"),
        Document("application/pdf", "iVBOR", title="T"),
        ToolReference("WebFetch"),
        Text("A\n\nhttps://a"),
        Text("found"),
    )
    assert turns(user(result)) == (Turn("tool", (ToolResult("a", written, is_error=True),)),)


def test_images_and_documents() -> None:
    url, data = {"type": "url", "url": "https://a/b"}, {"type": "url", "url": "data:image/png;base64,iVBOR"}
    plain = {"type": "text", "media_type": "text/plain", "data": "body"}
    blocks = {"type": "content", "content": [text("c"), {"type": "image", "source": PNG}]}
    assert parts(
        {"type": "image", "source": url},
        {"type": "image", "source": data},
        {"type": "document", "source": url, "title": "T", "context": "C"},
        {"type": "document", "source": plain, "title": "T", "context": "C", "citations": {"enabled": True}},
        {"type": "document", "source": blocks, "title": "T"},
        {"type": "document", "source": {"type": "content", "content": "whole"}},
    ) == (
        Image(url="https://a/b"),
        Image("image/png", "iVBOR"),
        Text("C"),
        Document(url="https://a/b", title="T"),
        Text("T\n\nC\n\nbody"),
        Text("T"),
        Text("c"),
        Image("image/png", "iVBOR"),
        Text("whole"),
    )


def test_tools_of_anthropics_own_servers_in_earlier_turns() -> None:
    found = {
        "type": "web_search_result",
        "title": "A",
        "url": "https://a",
        "encrypted_content": "E",
        "page_age": None,
    }
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
    decoded = turns(
        assistant(
            text("I search."),
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [found]},
            {"type": "web_fetch_tool_result", "tool_use_id": "s2", "content": pdf},
            {
                "type": "tool_search_tool_result",
                "tool_use_id": "s3",
                "content": {"tool_references": [{"type": "tool_reference", "tool_name": "WebFetch"}]},
            },
            {"type": "mcp_tool_use", "id": "m1", "name": "echo", "server_name": "s", "input": {}},
            {"type": "mcp_tool_result", "tool_use_id": "m1", "content": [text("r")], "is_error": False},
            {"type": "compaction", "content": "So far."},
            text("Done."),
        )
    )
    assert decoded == (
        Turn("assistant", (Text("I search."), ToolCall("web_search", '{"query": "q"}', "s1"))),
        Turn(
            "tool",
            (
                ToolResult(
                    "s1",
                    (Text('[{"type":"web_search_result","title":"A","url":"https://a","page_age":null}]'),),
                ),
                ToolResult(
                    "s2",
                    (Text('{"type":"document","source":{"type":"base64","media_type":"application/pdf"}}'),),
                ),
                ToolResult("s3", (ToolReference("WebFetch"),)),
            ),
        ),
        Turn("assistant", (ToolCall("echo", "{}", "m1"),)),
        Turn("tool", (ToolResult("m1", (Text("r"),)),)),
        Turn("assistant", (Text("So far."), Text("Done."))),
    )


def test_tools_added_in_the_middle_become_visible_there() -> None:
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Bash"}}
    inline = {
        "type": "tool_addition",
        "tool": {"type": "tool_definition", "definition": BASH | {"name": "Late"}},
    }
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Bash"}}
    request = decode(
        messages=[user(text("x")), {"role": "system", "content": [added, inline, removed]}], tools=[BASH]
    )
    notice = Text("The tool Bash is not available any more.")
    assert request.conversation.turns[1] == Turn(
        "system", (ToolReference("Bash"), ToolReference("Late"), notice)
    )
    assert [(t.name, t.deferred) for t in request.conversation.tools] == [("Bash", False), ("Late", True)]
    assert not request.warnings
