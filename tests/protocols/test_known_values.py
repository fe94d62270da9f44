"""What was decoded before comes back as the same object, and only where it means the same."""

from __future__ import annotations

import json
import operator
from random import Random
from typing import Any

import msgspec
import pytest

from singletree.conversation import Request
from singletree.errors import InvalidRequest
from singletree.lru import LruCache
from singletree.protocols import chat, messages, responses, wire
from singletree.protocols.responses.state import item_form

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
QUESTION = {"role": "user", "content": "What is here?"}


def decoded(body: dict[str, Any], protocol: Any) -> Request:
    request: Request = protocol.decode(json.dumps({"model": "m", **body}).encode())
    return request


def chat_body() -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "ls", "parameters": SCHEMA}}
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    return {
        "messages": [
            {"role": "system", "content": "Be brief."},
            QUESTION,
            {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "notes.txt"},
        ],
        "tools": [tool],
    }


def messages_body() -> dict[str, Any]:
    call = {"type": "tool_use", "id": "c1", "name": "ls", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "notes.txt"}
    return {
        "max_tokens": 8,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            QUESTION,
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
            {"role": "user", "content": [result]},
        ],
        "tools": [{"name": "ls", "input_schema": SCHEMA}],
    }


def responses_body() -> dict[str, Any]:
    return {
        "instructions": "Be brief.",
        "input": [
            {"type": "message", **QUESTION},
            {"type": "message", "role": "assistant", "content": "I look."},
            {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "+"},
            {"type": "function_call_output", "call_id": "c1", "output": "notes.txt"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        ],
        "tools": [
            {"type": "function", "name": "ls", "parameters": SCHEMA},
            {"type": "custom", "name": "patch"},
        ],
    }


@pytest.mark.parametrize(
    ("protocol", "body"),
    [(chat, chat_body()), (messages, messages_body()), (responses, responses_body())],
    ids=["chat", "messages", "responses"],
)
def test_a_repeated_request_has_the_same_turns_and_tools(protocol: Any, body: dict[str, Any]) -> None:
    first, again = decoded(body, protocol), decoded(body, protocol)
    assert first == again
    assert len(first.conversation.turns) == 4
    pairs = zip(first.conversation.turns, again.conversation.turns, strict=True)
    assert all(one is other for one, other in pairs)
    assert first.conversation.tools is again.conversation.tools


def test_a_call_has_the_name_that_its_own_request_gives_the_tool() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"}
    function = {"type": "function", "name": "ls", "parameters": SCHEMA}
    space = {"type": "namespace", "name": "files", "description": "Files.", "tools": [function]}
    names = [
        decoded({"input": [QUESTION, call], "tools": tools}, responses)
        .conversation.turns[1]
        .tool_calls[0]
        .name
        for tools in ([], [space], [function], [space], [])
    ]
    assert names == ["ls", "files__ls", "ls", "files__ls", "ls"]


def test_tools_that_a_request_adds_are_not_those_of_the_next() -> None:
    body = responses_body()
    more = {"type": "additional_tools", "tools": [{"type": "function", "name": "rm"}]}
    added = decoded({**body, "input": [*body["input"], more]}, responses)
    assert [tool.name for tool in added.conversation.tools] == ["ls", "patch", "rm"]
    assert [tool.name for tool in decoded(body, responses).conversation.tools] == ["ls", "patch"]


def test_warnings_and_notes_of_known_fields_come_with_each_request() -> None:
    hosted = {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    warnings = [decoded({**messages_body(), **hosted}, messages).warnings for _ in range(2)]
    assert warnings[0] == warnings[1] != ()
    warnings = [decoded({**chat_body(), "tools": [{"type": "x"}]}, chat).warnings for _ in range(2)]
    assert warnings[0] == warnings[1] != ()
    searched = {**responses_body(), "tools": [{"type": "web_search"}]}
    warnings = [decoded(searched, responses).warnings for _ in range(2)]
    assert warnings[0] == warnings[1] != ()


@pytest.mark.parametrize(
    ("protocol", "body", "param"),
    [
        (messages, {**messages_body(), "tools": [{"name": 1}]}, "tools.0.name"),
        (messages, {**messages_body(), "tools": "ls"}, "tools"),
        (messages, {**messages_body(), "system": [{"type": "text", "text": 1}]}, "system.0.text"),
        (messages, {**messages_body(), "system": 1}, "system"),
        (
            chat,
            {**chat_body(), "tools": [{"type": "function", "function": {"name": 1}}]},
            "tools.0.function.name",
        ),
        (chat, {**chat_body(), "functions": [{}]}, "functions.0.name"),
        (responses, {**responses_body(), "tools": ["ls"]}, "tools.0"),
        (responses, {**responses_body(), "instructions": ["Be brief."]}, "instructions"),
    ],
)
def test_a_refusal_names_the_field(protocol: Any, body: dict[str, Any], param: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refused:
            decoded(body, protocol)
        assert refused.value.param == param


@pytest.mark.parametrize("sent", [{}, {"tools": None, "system": None}, {"tools": [], "system": []}])
def test_a_field_without_content_is_none(sent: dict[str, Any]) -> None:
    conversation = decoded({"max_tokens": 8, "messages": [QUESTION], **sent}, messages).conversation
    assert conversation.tools == ()
    assert [turn.role for turn in conversation.turns] == ["user"]


def test_an_item_is_stored_under_an_id_of_its_own_each_time() -> None:
    item = {"role": "user", "content": 'An "id":"msg_1" of 20 £.'}
    ids = iter(("msg_1", "msg_2"))
    for id in ("msg_1", "msg_2"):
        known, encoded = item_form(item).encode(lambda prefix: next(ids))
        part = {"type": "input_text", "text": item["content"]}
        assert known == id
        whole = {"role": "user", "content": [part], "type": "message", "id": id, "status": "completed"}
        assert json.loads(encoded) == whole
    named = {"type": "function_call_output", "id": "fco_\u00e9", "call_id": "c", "output": ""}
    known, encoded = item_form(named).encode(lambda prefix: pytest.fail("it has an id"))
    assert (known, json.loads(encoded)) == (named["id"], {**named, "status": "completed"})


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: LruCache[Any, Any] = LruCache(100_000)
    monkeypatch.setattr(wire, "_KNOWN", kept)
    for number in range(40):
        call = {
            "type": "function_call",
            "call_id": f"c{number}",
            "name": "ls",
            "arguments": "{}" + " " * 2000,
        }
        decoded(
            {**responses_body(), "input": [QUESTION, call], "instructions": "x" * number * 100}, responses
        )
        assert kept.bytes <= 100_000
    large = {**messages_body(), "system": "x" * 100_000}
    assert decoded(large, messages).conversation.turns[0].text == large["system"]
    assert kept.bytes <= 100_000


def test_a_turn_counts_with_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: LruCache[Any, Any] = LruCache(10**9)
    monkeypatch.setattr(wire, "_KNOWN", kept)
    junk = "x" * 50_000
    call = {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}", "unknown": junk}
    decoded({"input": [QUESTION, call]}, responses)
    assert kept.bytes > 2 * 3 * len(junk), "the item, and the turn that keeps it in memory"


def test_values_are_equal_whoever_sends_them() -> None:
    """A value is found by its bytes, so that one client's cannot come back to another who sent something else."""
    one = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "a" * 200}]})
    other = one.replace(b"a" * 100, b"a" * 99 + b"b", 1)
    texts = [chat.decode(each).conversation.turns[0].text for each in (one, other, one, other)]
    assert texts == ["a" * 200, "a" * 99 + "b" + "a" * 100] * 2


def history(random: Random, kind: str) -> dict[str, Any]:
    """One element of a conversation; of Messages, some bring a warning, and a few are refused."""
    text = random.choice(["a", "b", "x" * 200 + random.choice("yz") + "x" * 200])
    if kind == "input":
        return {"type": "message", "role": random.choice(["user", "assistant"]), "content": text}
    message: dict[str, Any] = {"role": random.choice(["user", "assistant"]), "content": text}
    chance = random.random()
    if kind == "messages" and chance < 0.3:
        message["role"] = "assistant"
        block = "redacted_thinking" if chance > 0.01 else "unheard_of"
        message["content"] = [{"type": "text", "text": text}, {"type": block, "data": "another server's"}]
    return message


@pytest.mark.parametrize(("protocol", "kind"), [(chat, "chat"), (messages, "messages"), (responses, "input")])
@pytest.mark.parametrize("limit", [3000, 20_000, 10**9])
def test_any_course_of_conversations_decodes_as_if_nothing_was_known(
    protocol: Any, kind: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_LONG", 1)
    random, kept = Random(limit), LruCache[Any, Any](limit)
    reported: list[list[dict[str, Any]]] = [[]]
    field, warned = "input" if kind == "input" else "messages", 0
    for _ in range(150):
        elements = random.choice(reported)[: random.choice([None, None, None, -1, 1])]
        elements = [*elements, *(history(random, kind) for _ in range(random.randrange(3)))] or [QUESTION]
        reported.append(elements)
        body = {field: elements, **({"max_tokens": 8} if kind == "messages" else {})}
        found: list[object] = []
        for known in (kept, LruCache[Any, Any](0)):
            monkeypatch.setattr(wire, "_KNOWN", known)
            try:
                request = decoded(body, protocol)
                found.append((request.conversation, request.warnings))
            except InvalidRequest as error:
                found.append(f"{error} {error.param}")
        assert found[0] == found[1]
        warned += bool(isinstance(found[0], tuple) and found[0][1])
        assert kept.bytes <= limit
        for _, prefix in kept.items():
            if isinstance(prefix, wire._Prefix):
                assert all(kept.peek(key) is not None for key in prefix.keys), "its memory is counted there"
    assert (warned > 20) is (kind == "messages")


@pytest.mark.parametrize(("protocol", "kind"), [(chat, "chat"), (messages, "messages")])
def test_the_beginning_of_a_conversation_is_not_looked_up_again(
    protocol: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, looked_up = LruCache[Any, Any](10**9), []

    class Counting(LruCache[Any, Any]):
        def get(self, key: Any) -> Any:
            looked_up.append(key)
            return kept.get(key)

        put, pop, touch, peek = kept.put, kept.pop, kept.touch, kept.peek

    monkeypatch.setattr(wire, "_KNOWN", Counting())
    elements = [{"role": ("user", "assistant")[at % 2], "content": f"{at} {'x' * 100}"} for at in range(100)]
    more = {"max_tokens": 8} if kind == "messages" else {}
    first = decoded({"messages": elements, **more}, protocol).conversation.turns
    for grown in (elements, [*elements, QUESTION]):
        looked_up.clear()
        turns = decoded({"messages": grown, **more}, protocol).conversation.turns
        assert all(map(operator.is_, first, turns))
        assert len(looked_up) < 10
