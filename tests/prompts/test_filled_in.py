"""A harness fills in the defaults of a tool's schema, as Claude Code does: the call is still the one that was made."""

from __future__ import annotations

import json
from typing import Any

import pytest

from singletree.conversation import Tool, ToolCall, Turn
from singletree.prompts.replay.turn_comparison import is_equivalent_turn

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "replace_all": {"type": "boolean", "default": False},
        "limit": {"type": "integer", "default": 3},
        "edits": {"type": "array", "items": {"properties": {"exact": {"default": True}}}},
    },
}
TOOLS = (Tool("other"), Tool("edit", parameters=SCHEMA))


def comes_back(written: Any, returned: Any, tools: tuple[Tool, ...] = TOOLS) -> bool:
    spelled = (value if isinstance(value, str) else json.dumps(value) for value in (returned, written))
    came, was = (Turn("assistant", (ToolCall("edit", arguments, "call_1"),)) for arguments in spelled)
    return is_equivalent_turn(came, was, tools)


@pytest.mark.parametrize(
    ("written", "returned"),
    [
        ({"path": "a"}, {"replace_all": False, "path": "a"}),
        ({"path": "a"}, {"path": "a", "limit": 3, "replace_all": False}),
        ({"path": "a"}, {"path": "a", "limit": 3.0}),
        ({"path": "a", "limit": 5}, {"path": "a", "limit": 5, "replace_all": False}),
        ({"edits": [{"at": 1}, {"exact": False}]}, {"edits": [{"exact": True, "at": 1}, {"exact": False}]}),
        ("", {"limit": 3}),
    ],
)
def test_defaults_that_were_filled_in_do_not_count(written: Any, returned: Any) -> None:  # C3
    assert comes_back(written, returned)
    assert not comes_back(written, returned, ())


@pytest.mark.parametrize(
    ("written", "returned"),
    [
        ({"path": "a"}, {"path": "a", "replace_all": True}),
        ({"path": "a"}, {"path": "a", "replace_all": 0}),
        ({"path": "a"}, {"path": "b", "replace_all": False}),
        ({"path": "a"}, {"path": "a", "unknown": False}),
        ({"path": "a", "replace_all": False}, {"path": "a"}),
        ({"path": "a", "limit": 5}, {"path": "a", "limit": 3}),
        ({"edits": [{}]}, {"edits": [{}, {"exact": True}]}),
        ({"path": "a"}, "not JSON"),
        ("not JSON", {"replace_all": False}),
        ("[1]", {"replace_all": False}),
    ],
)
def test_anything_else_is_an_edit(written: Any, returned: Any) -> None:
    assert not comes_back(written, returned)


@pytest.mark.parametrize("schema", [{"properties": [1]}, {"properties": {"limit": 3}}, {"items": 1}, {}])
def test_a_schema_may_be_anything(schema: dict[str, Any]) -> None:
    assert not comes_back({"path": "a"}, {"path": "a", "limit": 3}, (Tool("edit", parameters=schema),))
