"""Calls of native tools with any arguments: an item of the tool's own type only where every client can read it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import shapes
from protocols.grammar_responses import Grammar
from protocols.judge_responses import wrong_stored
from protocols.test_responses_encode import Json, encoded, request, stream
from singletree.protocols.responses.native_tools import NATIVE

TOOLS: list[Json] = [
    {"type": "tool_search", "execution": "client"} if kind == "tool_search" else {"type": kind}
    for kind in NATIVE
]
FITTING: list[tuple[str, Json]] = [
    ("local_shell", {"command": ["ls", "-l"], "working_directory": "/", "timeout_ms": 5, "env": {"A": "b"}}),
    ("shell", {"commands": ["ls"], "timeout_ms": 5, "max_output_length": 9}),
    ("apply_patch", {"type": "create_file", "path": "a", "diff": "+b"}),
    ("apply_patch", {"type": "update_file", "path": "a", "diff": "@@\n-a\n+b"}),
    ("apply_patch", {"type": "delete_file", "path": "a"}),
    ("tool_search", {"query": "x", "limit": 3}),
]
DAMAGES: list[Any] = [
    None,
    "",
    "x",
    0,
    -1,
    1.5,
    2**64,
    True,
    [],
    {},
    [None],
    [1],
    ["x"],
    {"a": None},
    {"type": "x"},
]


REQUEST = request(tools=TOOLS)


def called(kind: str, arguments: str) -> Json:
    """The item of a call, which streams as it stands in the body."""
    shape = shapes.Shape("", shapes.call(0, kind, arguments), shapes.finished())
    # What the model adds of its own is in the item, and no part of the schema.
    [item] = Grammar(stream(shape.events, of=REQUEST), judged=False).items
    [whole] = json.loads(encoded(shape, REQUEST))["output"]
    assert item == whole
    return dict(item)


def deepest(value: Any) -> int:
    if isinstance(value, dict | list):
        return 1 + max(map(deepest, value.values() if isinstance(value, dict) else value), default=0)
    return 0


def check(kind: str, arguments: str) -> None:
    """A native item is one that the SDK's types take and Codex can read, or it is a function call, byte for byte."""
    item = called(kind, arguments)
    if item["type"] == "function_call":
        assert (item["name"], item["arguments"]) == (kind, arguments or "{}")
        return
    assert item["type"] == NATIVE[kind].item
    # Clients skip fields that they do not know.
    assert [reported for reported in wrong_stored(item) if "has no such field" not in reported] == []
    assert deepest(item) < 100, "Codex reads nothing deeper than 128"
    again = request(input=[item], tools=TOOLS).conversation.turns[0].tool_calls
    assert json.loads(again[0].arguments).items() <= json.loads(arguments).items()


@pytest.mark.parametrize(("kind", "arguments"), FITTING)
def test_arguments_that_fit_make_an_item_of_its_own(kind: str, arguments: Json) -> None:
    assert called(kind, json.dumps(arguments))["type"] == NATIVE[kind].item
    check(kind, json.dumps(arguments))


@pytest.mark.parametrize(("kind", "arguments"), FITTING)
def test_arguments_with_one_damage(kind: str, arguments: Json) -> None:
    for field in [*arguments, "type", "env", "operation", "action"]:
        check(kind, json.dumps({name: value for name, value in arguments.items() if name != field}))
        for damage in DAMAGES:
            check(kind, json.dumps({**copy.deepcopy(arguments), field: damage}))


@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "null",
        "[]",
        '"x"',
        "1",
        "{}",
        '{"operation": null}',
        '{"operation": {"type": "delete_file", "path": "a"}}',
        '{"type": "update_file", "path": "a"}',
        '{"type": "create_file", "path": "a", "diff": null}',
        '{"type": "delete_file", "path": "a", "type": "update_file"}',
        '{"command": ["ls"], "type": "other"}',
        '{"command": ["ls"], "env": null}',
        '{"command": ["ls"], "timeout_ms": 18446744073709551616}',
        '{"commands": ["ls"], "timeout_ms": 1e400}',
        '{"commands": ["ls"], "why": 1e400}',
        '{"query": "\\ud83d"}',
        '{"query": ' + '{"a":' * 200 + "1" + "}" * 200 + "}",
        '{"query": ' + "[" * 5000 + "]" * 5000 + "}",
    ],
)
def test_arguments_that_do_not_fit(kind: str, arguments: str) -> None:
    check(kind, arguments)


def test_what_must_not_be_in_the_arguments_makes_a_function_call() -> None:
    assert called("local_shell", '{"command": ["ls"], "type": "other"}')["type"] == "function_call"
    assert called("apply_patch", '{"operation": null}')["type"] == "function_call"
    assert called("apply_patch", '{"type": "update_file", "path": "a"}')["type"] == "function_call"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({field for _, arguments in FITTING for field in arguments} | {"operation", "action"})


@given(st.sampled_from(sorted(NATIVE)), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_arguments(kind: str, arguments: Json) -> None:
    check(kind, json.dumps(arguments))
