"""Responses in: tools, their names, and the choice among them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocols.test_responses_decode import CALL, USER, Json, function, refused, request, tools
from singletree.conversation import (
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolReference,
    ToolResult,
    Turn,
)

HOSTED = [
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "file_search",
    "computer",
    "computer_use_preview",
    "code_interpreter",
    "image_generation",
    "mcp",
    "programmatic_tool_calling",
    "something_new",
]


class TestTools:
    def test_functions(self) -> None:  # C6
        parameters = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
        [tool] = tools({"type": "function", "name": "f", "parameters": parameters, "strict": True})
        assert tool == Tool("f", None, parameters, strict=True)
        assert tool.parameters is not None
        assert list(tool.parameters["properties"]) == ["z", "a"]

    def test_null_is_not_sent(self) -> None:
        declared = {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}
        assert tools(declared) == (Tool("f"),)

    @pytest.mark.parametrize("form", [None, {"type": "text"}])
    def test_custom_tools_take_one_string(self, form: Json | None) -> None:  # C25
        [tool] = tools({"type": "custom", "name": "exec", "description": "Runs it.", "format": form})
        assert tool == Tool(
            "exec",
            "Runs it.\n\nCall it with one argument, `input`: the text itself.",
            {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
            kind="custom",
        )

    @pytest.mark.parametrize(("syntax", "named"), [("lark", "Lark grammar"), ("regex", "regular expression")])
    def test_grammars_are_reported(self, syntax: str, named: str) -> None:  # C25
        form = {"type": "grammar", "syntax": syntax, "definition": "start: /x+/"}
        [tool] = tools({"type": "custom", "name": "exec", "format": form})
        assert tool.description is not None
        assert tool.description.endswith(f"It must match this {named}:\nstart: /x+/")
        assert tool.extra is not None
        assert tool.extra["grammar"] == {"syntax": syntax, "definition": "start: /x+/"}

    def test_namespaces_are_flattened(self) -> None:  # C26
        inner = [function("spawn", description="Starts one."), {"type": "custom", "name": "tell"}]
        space = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": inner}
        decoded = tools(function("f"), space, function("g"))
        assert [t.name for t in decoded] == ["f", "agents__spawn", "agents__tell", "g"]
        assert decoded[1].description == "Sub-agents.\n\nStarts one."
        assert decoded[2].kind == "custom"

    def test_a_namespace_that_ends_in_the_separator(self) -> None:
        space = {"type": "namespace", "name": "mcp__server__", "tools": [function("find")]}
        assert tools(space)[0].name == "mcp__server__find"

    def test_names_are_made_distinct(self) -> None:  # C26
        first = {"type": "namespace", "name": "a", "tools": [function("b__c")]}
        second = {"type": "namespace", "name": "a__b", "tools": [function("c")]}
        decoded = tools(first, second, function("a__b__c"))
        assert [t.name for t in decoded] == ["a__b__c_2", "a__b__c_3", "a__b__c"]
        called = {**CALL, "namespace": "a__b", "name": "c"}
        request_ = request(tools=[first, second, function("a__b__c")], input=[called])
        assert request_.conversation.turns[0].tool_calls[0].name == "a__b__c_3"

    def test_a_tool_that_is_declared_twice_counts_once(self) -> None:
        assert [t.description for t in tools(function("f", description="1"), function("f"))] == ["1"]

    def test_native_tools_become_functions(self) -> None:  # C26
        decoded = tools({"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"})
        assert [t.name for t in decoded] == ["local_shell", "shell", "apply_patch"]
        assert all(t.description and t.parameters for t in decoded)

    def test_a_clients_own_name_goes_before_a_native_one(self) -> None:
        assert [t.name for t in tools({"type": "shell"}, function("shell"))] == ["shell_2", "shell"]

    def test_a_call_that_lost_its_namespace_finds_it_again(self) -> None:  # C26
        spaces = [
            {"type": "namespace", "name": n, "tools": [function(f), function("g")]} for n, f in ("ax", "by")
        ]
        calls = [{**CALL, "name": name} for name in ("x", "g")]
        decoded = request(tools=spaces, input=calls)
        assert [call.name for call in decoded.conversation.turns[0].tool_calls] == ["a__x", "g"]

    @pytest.mark.parametrize("kind", HOSTED)
    def test_tools_that_run_elsewhere_are_reported(self, kind: str) -> None:  # C26
        decoded = request(tools=[{"type": kind, "vector_store_ids": [], "server_label": "s"}, function("f")])
        assert [t.name for t in decoded.conversation.tools] == ["f"]
        assert decoded.warnings == (f"tools.0: type '{kind}' does not run here; ignored",)

    def test_hosted_tools_are_left_out_with_a_warning(self) -> None:  # C26
        decoded = request(
            tools=[
                {"type": "web_search", "external_web_access": True},
                function("f"),
                {"type": "tool_search"},
            ]
        )
        assert [t.name for t in decoded.conversation.tools] == ["f"]
        assert decoded.warnings == (
            "tools.0: type 'web_search' does not run here; ignored",
            "tools.2: type 'tool_search' does not run here; ignored",
        )

    def test_warnings_fit_into_a_header(self) -> None:
        [warning] = request(tools=[{"type": "x\r\nSet-Cookie: é" + "y" * 500}]).warnings
        assert warning.isascii()
        assert warning.isprintable()
        assert len(warning) < 200


SEARCH: Json = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
FOUND: Json = {
    "type": "tool_search_output",
    "call_id": "c1",
    "execution": "client",
    "tools": [{"type": "namespace", "name": "agents", "tools": [function("spawn", defer_loading=True)]}],
}
ASKED: Json = {
    "type": "tool_search_call",
    "call_id": "c1",
    "execution": "client",
    "arguments": {"query": "agents", "limit": 8},
}


class TestToolSearch:
    def test_the_model_searches_with_a_function(self) -> None:  # C26
        [tool] = tools(SEARCH)
        assert (tool.name, tool.parameters) == ("tool_search", {"type": "object"})

    def test_deferred_tools_wait_for_the_search(self) -> None:
        later = function("later", defer_loading=True)
        assert [t.deferred for t in tools(SEARCH, function("now"), later)] == [False, False, True]

    def test_where_there_is_no_search_nothing_is_deferred(self) -> None:
        assert [t.deferred for t in tools(function("later", defer_loading=True))] == [False]

    def test_what_was_found_is_shown_where_it_was_found(self) -> None:  # C26
        decoded = request(tools=[SEARCH], input=[USER, ASKED, FOUND])
        assert decoded.conversation.turns[1:] == (
            Turn("assistant", (ToolCall("tool_search", '{"query": "agents", "limit": 8}', "c1"),)),
            Turn("tool", (ToolResult("c1", (ToolReference("agents__spawn"),)),)),
        )
        assert [(t.name, t.deferred) for t in decoded.conversation.tools] == [
            ("tool_search", False),
            ("agents__spawn", True),
        ]


def test_additional_tools_are_tools() -> None:  # C26
    item = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]}],
    }
    decoded = request(input=[item, USER])
    assert [t.name for t in decoded.conversation.tools] == ["functions__exec"]
    assert decoded.conversation.turns == (Turn("user", (Text("Hello"),)),)
    assert decoded.options.stored_state.input_items == [item, USER]


def test_tools_that_are_added_later_stand_where_they_came() -> None:
    """pi 1.6 declares all of its tools so, Codex and the SDKs those that come during the session."""
    first, later = ({"type": "additional_tools", "tools": [function(name)]} for name in ("f", "g"))
    decoded = request(input=[first, USER, later, first, USER])
    assert [(t.name, t.deferred) for t in decoded.conversation.tools] == [("f", False), ("g", True)]
    user = Turn("user", (Text("Hello"),))
    assert decoded.conversation.turns == (user, Turn("developer", (ToolReference("g"),)), user)
    changed = {**first, "tools": [function("f", description="Anew.")]}
    decoded = request(input=[first, USER, changed])
    assert [(t.description, t.deferred) for t in decoded.conversation.tools] == [("Anew.", False)]
    assert decoded.conversation.turns == (user,)
    only = request(input=[USER, first])
    assert [(t.name, t.deferred) for t in only.conversation.tools] == [("f", False)], (
        "nothing else says how to call"
    )


CHOICES: list[Json] = [
    function("f"),
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "ns", "tools": [function("g")]},
    {"type": "shell"},
]


class TestToolChoice:
    @pytest.mark.parametrize(
        ("choice", "read"),
        [
            (None, ToolChoice()),
            ("auto", ToolChoice()),
            ("none", ToolChoice("none")),
            ("required", ToolChoice("required")),
            ({"type": "function", "name": "f"}, ToolChoice("required", "f")),
            ({"type": "custom", "name": "patch"}, ToolChoice("required", "patch")),
            ({"type": "function", "name": "g", "namespace": "ns"}, ToolChoice("required", "ns__g")),
            ({"type": "function", "name": "ns__g"}, ToolChoice("required", "ns__g")),
            ({"type": "shell"}, ToolChoice("required", "shell")),
            ({"type": "function", "function": {"name": "f"}}, ToolChoice("required", "f")),
            ({"type": "custom", "custom": {"name": "patch"}}, ToolChoice("required", "patch")),
            (
                {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "f"}}],
                    },
                },
                ToolChoice("required", "f"),
            ),
            ({"type": "function", "name": "g"}, ToolChoice("required", "ns__g")),
            ({"type": "namespace", "name": "ns"}, ToolChoice("required", "ns__g")),
            ("any", ToolChoice("required")),
            *(({"type": kind}, ToolChoice()) for kind in HOSTED),
            ({"type": "mcp", "server_label": "s", "name": "f"}, ToolChoice()),
        ],
    )
    def test_forms(self, choice: Any, read: ToolChoice) -> None:  # C38
        decoded = request(tools=CHOICES, tool_choice=choice)
        assert decoded.tool_choice == read

    @pytest.mark.parametrize(
        ("choice", "repeated"),
        [
            (None, "auto"),
            ("any", "required"),
            ({"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}),
            ({"function": {"name": "f"}}, {"type": "function", "name": "f"}),
            ({"type": "custom", "custom": {"name": "patch"}}, {"type": "custom", "name": "patch"}),
            ({"type": "shell"}, {"type": "shell"}),
            (
                {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "auto",
                        "tools": [{"type": "function", "function": {"name": "f"}}],
                    },
                },
                {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            ),
        ],
    )
    def test_the_response_repeats_a_choice_in_the_form_of_this_api(self, choice: Any, repeated: Any) -> None:
        sent = request(tools=CHOICES, tool_choice=choice)
        assert json.loads(sent.options.echoed_fields)["tool_choice"] == repeated

    @pytest.mark.parametrize(
        ("mode", "names", "read"),
        [
            ("auto", ["f", "patch"], ToolChoice("auto", allowed=("f", "patch"))),
            ("required", ["f", "patch"], ToolChoice("required", allowed=("f", "patch"))),
            ("required", ["f"], ToolChoice("required", "f")),
        ],
    )
    def test_allowed_tools_do_not_change_the_tools(
        self, mode: str, names: list[str], read: ToolChoice
    ) -> None:  # C6 C38
        allowed = [{"type": "custom" if n == "patch" else "function", "name": n} for n in names]
        choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
        decoded = request(tools=CHOICES, tool_choice=choice)
        assert decoded.tool_choice == read
        assert decoded.conversation == request(tools=CHOICES).conversation

    @pytest.mark.parametrize("mode", ["auto", "required"])
    def test_where_only_hosted_tools_are_allowed_there_is_none_to_call(self, mode: str) -> None:  # C26 C38
        allowed = [{"type": "mcp", "server_label": "s"}, {"type": "web_search"}]
        decoded = request(
            tools=CHOICES, tool_choice={"type": "allowed_tools", "mode": mode, "tools": allowed}
        )
        assert decoded.tool_choice == ToolChoice("none")
        assert decoded.warnings == (
            "tool_choice.tools.0: type 'mcp' does not run here; ignored",
            "tool_choice.tools.1: type 'web_search' does not run here; ignored",
        )

    def test_a_name_that_stands_in_two_namespaces_means_both(self) -> None:  # C26
        spaces = [{"type": "namespace", "name": n, "tools": [function("g")]} for n in ("a", "b")]
        decoded = request(tools=spaces, tool_choice={"type": "function", "name": "g"})
        assert decoded.tool_choice == ToolChoice("required", allowed=("a__g", "b__g"))

    @pytest.mark.parametrize(
        "choice",
        [
            "sometimes",
            {"type": "namespace", "name": "no"},
            {"type": "function", "name": "no"},
            {"type": "function"},
            {"type": "function", "function": {"name": "no"}},
            {"type": "local_shell"},
            {"type": "allowed_tools", "mode": "none", "tools": []},
            {"type": "allowed_tools", "mode": "required", "tools": []},
        ],
    )
    def test_what_cannot_be_chosen_is_refused(self, choice: Any) -> None:
        error = refused(tools=CHOICES, tool_choice=choice)
        assert error.param is not None
        assert error.param.startswith("tool_choice")

    def test_a_call_cannot_be_asked_for_without_tools(self) -> None:
        assert refused(tool_choice="required").param == "tool_choice"
