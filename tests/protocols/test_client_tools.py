"""Anthropic's tools that the client runs: the model is given their schemas, and calls them like any other."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic.types.beta as types
import pytest

from singletree.conversation import Tool, ToolChoice
from singletree.protocols.client_tools import ANTHROPIC, anthropic_tool

from .test_messages_decode import decode

SCREEN = {"display_width_px": 1024, "display_height_px": 768}
NAMES = {
    "bash_20241022": "bash",
    "bash_20250124": "bash",
    "text_editor_20241022": "str_replace_editor",
    "text_editor_20250124": "str_replace_editor",
    "text_editor_20250429": "str_replace_based_edit_tool",
    "text_editor_20250728": "str_replace_based_edit_tool",
    "memory_20250818": "memory",
    "computer_20241022": "computer",
    "computer_20250124": "computer",
    "computer_20251124": "computer",
}


def declared(kind: str, **fields: Any) -> Tool:
    screen = SCREEN if kind.startswith("computer") else {}
    request = decode(tools=[{"type": kind, "name": NAMES.get(kind, "x"), **screen, **fields}])
    assert request.warnings == ()
    [tool] = request.conversation.tools
    return tool


def sdk_tools() -> dict[str, str]:
    """The type and the name of each tool of the SDK that has a fixed name and no schema."""
    found = {}
    for param in vars(types).values():
        hints = getattr(param, "__annotations__", {})
        if getattr(param, "__name__", "").endswith("Param") and {"type", "name"} <= hints.keys():
            values = [
                re.fullmatch(r"Required\[Literal\[['\"](\w+)['\"]\]\]", _named(hints[field]))
                for field in hints
            ]
            kind, name = (dict(zip(hints, values, strict=True))[field] for field in ("type", "name"))
            if kind and name:
                found[kind[1]] = name[1]
    return found


def _named(hint: Any) -> str:
    return str(getattr(hint, "__forward_arg__", hint))


def test_every_one_that_the_sdk_has_is_known_under_its_name() -> None:
    ours = {kind: name for kind, name in sdk_tools().items() if anthropic_tool(kind)}
    assert ours == NAMES
    server_side = {"web_search", "web_fetch", "code_execution", "tool_search_tool", "advisor"}
    assert {kind.rsplit("_", 1)[0] for kind in sdk_tools().keys() - ours} <= {
        *server_side,
        "tool_search_tool_regex",
        "tool_search_tool_bm25",
    }


@pytest.mark.parametrize("kind", ANTHROPIC)
def test_the_model_is_given_its_schema(kind: str) -> None:
    tool = declared(kind, cache_control={"type": "ephemeral"})
    assert tool.name == NAMES[kind]
    assert tool.description
    assert tool.parameters is not None
    assert tool.parameters["type"] == "object"
    assert set(tool.parameters["required"]) <= tool.parameters["properties"].keys()
    assert tool.extra == {"cache_control": {"type": "ephemeral"}}


COMMANDS: list[tuple[str, dict[str, Any]]] = [
    ("bash", {"command": "ls"}),
    ("bash", {"restart": True}),
    ("text_editor", {"command": "view", "path": "/a", "view_range": [1, -1]}),
    ("text_editor", {"command": "create", "path": "/a", "file_text": "x"}),
    ("text_editor", {"command": "str_replace", "path": "/a", "old_str": "x", "new_str": "y"}),
    ("memory", {"command": "view", "path": "/memories"}),
    ("memory", {"command": "create", "path": "/memories/a", "file_text": "x"}),
    ("memory", {"command": "str_replace", "path": "/memories/a", "old_str": "x", "new_str": "y"}),
    ("memory", {"command": "insert", "path": "/memories/a", "insert_line": 0, "insert_text": "y"}),
    ("memory", {"command": "delete", "path": "/memories/a"}),
    ("memory", {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"}),
    ("computer", {"action": "screenshot"}),
    ("computer", {"action": "left_click", "coordinate": [1, 2]}),
    ("computer", {"action": "type", "text": "x"}),
]


@pytest.mark.parametrize(("name", "arguments"), COMMANDS)
def test_what_clients_run_is_what_the_schemas_have(name: str, arguments: dict[str, Any]) -> None:
    for kind in ANTHROPIC:
        if kind.startswith(f"{name}_"):
            schema = declared(kind).parameters
            assert schema is not None
            assert set(schema["required"]) <= arguments.keys() <= schema["properties"].keys()
            assert all(
                value in schema["properties"][field].get("enum", (value,))
                for field, value in arguments.items()
            )


@pytest.mark.parametrize("command", ["view", "create", "str_replace", "insert", "delete", "rename"])
def test_the_memory_of_the_sdk_has_no_other_fields(command: str) -> None:
    stem = "".join(word.title() for word in command.split("_"))
    fields = getattr(types, f"BetaMemoryTool20250818{stem}Command").model_fields
    tool = declared("memory_20250818")
    assert tool.parameters is not None
    assert fields.keys() <= tool.parameters["properties"].keys()


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("text_editor_20241022", "new_str"),
        ("text_editor_20250124", "new_str"),
        ("text_editor_20250429", "insert_text"),
        ("text_editor_20250728", "insert_text"),
    ],
)
def test_the_field_that_insert_reads(kind: str, field: str) -> None:
    properties = declared(kind).parameters["properties"]  # type: ignore[index]
    assert ("insert_text" in properties) == (field == "insert_text")
    assert ("undo_edit" in properties["command"]["enum"]) == (field == "new_str")


@pytest.mark.parametrize(
    ("kind", "like"),
    [
        ("bash_20991231", "bash_20250124"),
        ("text_editor_20250501", "text_editor_20250429"),
        ("text_editor_20200101", "text_editor_20241022"),
        ("memory_20260101", "memory_20250818"),
        ("computer_20260801", "computer_20251124"),
    ],
)
def test_a_version_that_is_not_listed_is_like_the_one_before(kind: str, like: str) -> None:
    assert anthropic_tool(kind) is ANTHROPIC[like]
    assert declared(kind, name=NAMES[like]).name == NAMES[like]


@pytest.mark.parametrize(
    "kind",
    [
        "web_search_20250305",
        "bash",
        "bash_1",
        "Bash_20250124",
        "shell_20250124",
        "computer_toolset_20260801",
        "",
    ],
)
def test_others_are_not(kind: str) -> None:
    assert anthropic_tool(kind) is None


def test_the_clients_screen_and_limits_are_reported() -> None:
    zooming, plain = declared("computer_20251124", enable_zoom=True), declared("computer_20251124")
    assert "1024 x 768" in (plain.description or "")
    for tool, zooms in ((zooming, True), (plain, False)):
        properties = tool.parameters["properties"]  # type: ignore[index]
        assert ("zoom" in properties["action"]["enum"], "region" in properties) == (zooms, zooms)
    assert "at most 500 characters" in (
        declared("text_editor_20250728", max_characters=500).description or ""
    )


def test_it_can_be_chosen_and_stands_in_its_place() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    request = decode(
        tools=[search, {"type": "bash_20250124", "name": "bash"}, {"name": "own"}],
        tool_choice={"type": "tool", "name": "bash"},
    )
    assert [tool.name for tool in request.conversation.tools] == ["bash", "own"]
    assert request.tool_choice == ToolChoice("required", "bash")
    assert [w.split(" are ")[0] for w in request.warnings] == ["tools of type 'web_search_20250305'"]


def test_the_schema_that_a_client_sends_wins() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    tool = declared("bash_20250124", input_schema=schema, description="Only on Sundays.")
    assert tool.parameters == schema
    assert (tool.description or "").endswith("\n\nOnly on Sundays.")


def test_the_table_is_not_changed_by_what_clients_declare() -> None:
    before = json.dumps(ANTHROPIC["computer_20251124"].parameters)
    declared("computer_20251124")
    assert json.dumps(ANTHROPIC["computer_20251124"].parameters) == before
