"""What an earlier request had is not read again, and the result is the same as without it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from singletree.errors import InvalidRequest
from singletree.lru import LruCache
from singletree.protocols import responses, wire
from singletree.protocols.responses import input as responses_input
from singletree.protocols.responses import state
from singletree.protocols.responses.state import InputForms, input_forms, item_form, joined_forms
from singletree.protocols.responses.tools import declared_tools, joined_name
from singletree.protocols.wire import KnownPrefix, KnownPrefixes
from singletree.request_options import StoredItems

LS = {"type": "function", "name": "ls", "parameters": {"type": "object"}}
NAMESPACE = {"type": "namespace", "name": "disk", "tools": [LS]}
ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "List."},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "I look."}]},
    {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"},
    {"type": "function_call", "call_id": "c2", "name": "ls", "arguments": '{"all": true}'},
    {"type": "function_call_output", "call_id": "c1", "output": "a"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "b"}]},
    {"role": "assistant", "content": "Two."},
    {"type": "local_shell_call", "id": "sh", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "id": "c3", "output": "c"},
    {"role": "user", "content": [{"type": "input_text", "text": "More."}, {"type": "odd"}]},
    {"type": "additional_tools", "tools": [{"type": "function", "name": "rm"}]},
    {"type": "function_call", "call_id": "c4", "name": "rm", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c4", "output": "d"},
    {"role": "user", "content": "Thanks."},
]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_KNOWN", LruCache(2**20))
    monkeypatch.setattr(responses_input, "_PROGRESS", KnownPrefixes(2**20))
    monkeypatch.setattr(state, "_FORMS", KnownPrefixes(2**20))


def decoded(items: list[dict[str, Any]], *, tools: Any = (LS,), history: int = 0) -> Any:
    body = json.dumps({"model": "m", "tools": list(tools), "input": items[history:]}).encode()
    known = StoredItems([json.dumps(item).encode() for item in items[:history]]) if history else None
    request = responses.decode(body, known=known)
    return request.conversation, request.warnings, request.options.stored_state.input_items


@pytest.mark.parametrize("ends", [(a, b) for a in range(1, 16) for b in range(1, 16)])
def test_a_conversation_is_read_like_a_new_one(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for history in (0, 1, ends[1] // 2):
        for tools in ((LS,), (), (NAMESPACE,), (LS, NAMESPACE)):
            forget(monkeypatch)
            expected = decoded(ITEMS[: ends[1]], tools=tools, history=history)
            forget(monkeypatch)
            decoded(ITEMS[: ends[0]])
            assert decoded(ITEMS[: ends[1]], tools=tools, history=history) == expected


def test_a_change_in_the_middle_is_read() -> None:
    decoded(ITEMS)
    for number in range(len(ITEMS)):
        items = [*ITEMS[:number], {"role": "user", "content": f"Changed {number}."}, *ITEMS[number + 1 :]]
        conversation, _, _ = decoded(items)
        assert f"Changed {number}." in [turn.text for turn in conversation.turns]


def test_the_turns_before_are_the_same_objects() -> None:
    before, _, _ = decoded(ITEMS[:8])
    after, _, _ = decoded([*ITEMS[:8], {"role": "user", "content": "Go on."}])
    assert all(one is other for one, other in zip(before.turns, after.turns, strict=False))
    assert len(after.turns) == len(before.turns) + 1


def test_a_known_name_of_a_tool_counts_only_with_the_same_tools() -> None:
    plain, _, _ = decoded(ITEMS[:7])
    in_namespace, _, _ = decoded(ITEMS[:7], tools=[NAMESPACE])
    assert [call.name for call in plain.turns[2].tool_calls] == ["ls", "ls"]
    assert [call.name for call in in_namespace.turns[2].tool_calls] == ["disk__ls", "disk__ls"]


@pytest.mark.parametrize(
    ("tools", "plain"),
    [
        ([], True),
        ([LS], True),
        ([{"type": "local_shell"}, {"type": "function", "name": "local_shell"}], None),
        ([NAMESPACE], False),
        ([LS, NAMESPACE], False),
        ([{"type": "namespace", "name": "", "tools": [LS]}], None),
    ],
)
def test_plain_names_are_those_without_a_toolbox(tools: list[dict[str, Any]], plain: bool | None) -> None:
    try:
        toolbox = declared_tools(msgspec.Raw(json.dumps(tools).encode())).toolbox.copy()
    except InvalidRequest:
        return
    if plain is not None:
        assert toolbox.has_plain_names is plain
    names = [("ls", ""), ("ls", "disk"), ("rm", ""), ("rm", "disk"), ("local_shell", ""), ("shell", "")]
    if toolbox.has_plain_names:
        assert all(toolbox.name(*called) == joined_name(*called) for called in names)


def test_forms_of_an_input_are_those_of_its_items() -> None:
    items = [dict(item) for item in ITEMS]
    whole = joined_forms(InputForms(), [item_form(item) for item in items])
    for length in (3, 8, 8, 15, 5, 0, 15):
        found = input_forms(items[:length])
        assert all(one is other for one, other in zip(found.forms, whole.forms, strict=False))
        assert list(found.digests) == list(whole.digests[:length])
    assert len(set(whole.digests)) == len(items)
    swapped = input_forms([items[1], items[0], *items[2:]])
    assert not set(swapped.digests) & set(whole.digests)


def test_the_longest_prefix_is_found_and_gives_way_to_its_continuation() -> None:
    known: KnownPrefixes[str] = KnownPrefixes(10_000)
    a, b, c, _ = items = [object() for _ in range(4)]
    known.keep(KnownPrefix([], "nothing", 0))
    assert known.longest([]) is None
    known.keep(KnownPrefix([a], "a", 0))
    known.keep(KnownPrefix([a, b, c], "abc", 0))
    found = known.longest(items)
    assert found is not None
    assert found.made == "abc"
    assert known.longest([b, a, c]) is None
    assert known.longest([a, c]) == KnownPrefix([a], "a", 0)
    known.keep(KnownPrefix(items, "abcd", 0), found)
    assert known.longest([a, b, c]) == KnownPrefix([a], "a", 0)
    assert known.longest([*items, a]) == KnownPrefix(items, "abcd", 0)


def test_prefixes_are_bounded() -> None:
    known: KnownPrefixes[int] = KnownPrefixes(10_000)
    first = [object()]
    known.keep(KnownPrefix(first, 0, 4000))
    others = [object() for _ in range(100)]
    for number in range(100):
        known.keep(KnownPrefix([others[number]], number, 1000))
    assert known.longest(first) is None
    assert known.longest([others[99]]) is not None
    assert known.longest([others[0]]) is None
