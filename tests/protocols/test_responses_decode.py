"""Responses in: what a request says, and that nothing of it is lost."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from singletree.conversation import (
    Reasoning,
    Request,
    ResponseFormat,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
)
from singletree.errors import InvalidRequest
from singletree.protocols import responses

Json = dict[str, Any]


def request(**fields: Any) -> Request:
    return responses.decode(json.dumps({"model": "m", "input": "Hello", **fields}).encode())


def turns(*items: Json, **fields: Any) -> tuple[Turn, ...]:
    return request(input=list(items), **fields).conversation.turns


def tools(*declared: Json, **fields: Any) -> tuple[Tool, ...]:
    return request(tools=list(declared), **fields).conversation.tools


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        request(**fields)
    return caught.value


def function(name: str, **more: Any) -> Json:
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, **more}


USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1.0}'}
OUTPUT = {"type": "function_call_output", "id": "fco_1", "call_id": "c1", "output": "done"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [{"type": "summary_text", "text": "short"}],
    "content": [{"type": "reasoning_text", "text": "long"}],
    "encrypted_content": "sealed",
}
MODEL_OUTPUT = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
}


def test_a_string_is_one_user_message() -> None:
    decoded = request()
    assert decoded.conversation.turns == (Turn("user", (Text("Hello"),)),)
    assert decoded.options.stored_state.input_items == [
        {"type": "message", "role": "user", "content": "Hello"}
    ]


def test_instructions_come_first() -> None:
    assert request(instructions="Be brief.").conversation.turns == (
        Turn("system", (Text("Be brief."),)),
        Turn("user", (Text("Hello"),)),
    )


@pytest.mark.parametrize("role", ["system", "developer", "user"])
@pytest.mark.parametrize(
    "content", ["a", [{"type": "input_text", "text": "a"}], [{"type": "text", "text": "a"}]]
)
def test_messages_stand_where_they_stood(role: str, content: Any) -> None:  # C1 C36
    messages = turns(USER, CALL, OUTPUT, {"role": role, "content": content}, USER)
    assert [t.role for t in messages] == ["user", "assistant", "tool", role, "user"]
    assert messages[3].parts == (Text("a"),)


def test_consecutive_messages_stay_apart() -> None:  # C36
    assert turns(USER, USER) == (Turn("user", (Text("Hello"),)),) * 2


def test_what_the_model_wrote_in_one_go_is_one_turn() -> None:  # C5
    decoded = turns(
        USER, THOUGHT, MODEL_OUTPUT, CALL, THOUGHT, {**CALL, "call_id": "c2"}, OUTPUT, OUTPUT, MODEL_OUTPUT
    )
    call = ToolCall("f", '{"a": 1.0}', "c1")
    assert decoded[1:] == (
        Turn(
            "assistant",
            (Reasoning("long"), Text("I look."), call, Reasoning("long"), ToolCall("f", '{"a": 1.0}', "c2")),
        ),
        Turn("tool", (ToolResult("c1", (Text("done"),)),) * 2),
        Turn("assistant", (Text("I look."),)),
    )


def test_empty_items_do_not_part_a_turn() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    decoded = request(input=[USER, THOUGHT, search, search, CALL])
    assert [len(t.parts) for t in decoded.conversation.turns] == [1, 2]
    assert decoded.warnings == ("input.2: type 'web_search_call' is kept but not shown to the model",)


def codex(*items: Json) -> Request:
    """What Codex 0.169 sends with a catalog that gives it ``apply_patch``."""
    spawn = function("spawn_agent", description="Starts an agent.", strict=False)
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch hunk+ end_patch"}
    developer = [{"type": "input_text", "text": "Skills."}, {"type": "input_text", "text": "Permissions."}]
    return request(
        stream=True,
        store=False,
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="0199-session",
        client_metadata={"x": "y"},
        text={"verbosity": "low"},
        tools=[
            function("exec_command", strict=False),
            {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": grammar},
            {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [spawn]},
            {"type": "web_search", "external_web_access": True},
        ],
        input=[
            {"type": "message", "id": "msg_0", "role": "developer", "content": [developer[0]]},
            {"type": "message", "id": "msg_1", "role": "developer", "content": developer},
            USER,
            *items,
        ],
    )


class TestCodex:
    def test_the_first_request(self) -> None:  # C25 C26
        decoded = codex()
        assert [t.name for t in decoded.conversation.tools] == [
            "exec_command",
            "apply_patch",
            "multi_agent_v1__spawn_agent",
        ]
        assert [t.role for t in decoded.conversation.turns] == ["developer", "developer", "user"]
        assert decoded.conversation.turns[1].parts == (Text("Skills."), Text("Permissions."))
        assert (decoded.session, decoded.stream, decoded.thinking.effort) == ("0199-session", True, "medium")
        assert decoded.warnings == ("tools.3: type 'web_search' does not run here; ignored",)

    def test_the_turn_comes_back_and_only_appends(self) -> None:  # C5 C6
        first, patch = codex(), "*** Begin Patch\n*** End Patch"
        custom = {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c2", "name": "apply_patch"}
        agent = {**CALL, "name": "spawn_agent", "namespace": "multi_agent_v1", "call_id": "c3"}
        done = {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done!"}
        second = codex(THOUGHT, MODEL_OUTPUT, CALL, {**custom, "input": patch}, agent, OUTPUT, done)
        assert second.conversation.tools == first.conversation.tools
        assert second.conversation.turns[:3] == first.conversation.turns
        assert second.conversation.turns[3].parts == (
            Reasoning("long"),
            Text("I look."),
            ToolCall("f", '{"a": 1.0}', "c1"),
            ToolCall("apply_patch", json.dumps({"input": patch}), "c2"),
            ToolCall("multi_agent_v1__spawn_agent", '{"a": 1.0}', "c3"),
        )
        assert [r.call_id for r in second.conversation.turns[4].parts if isinstance(r, ToolResult)] == [
            "c1",
            "c2",
        ]

    def test_a_compaction_without_tools_names_its_calls_as_before(self) -> None:  # C26
        agent = {**CALL, "name": "spawn_agent", "namespace": "multi_agent_v1"}
        [turn] = turns(agent, tools=[], parallel_tool_calls=False)
        assert turn == codex(agent).conversation.turns[3]


class TestFields:
    def test_sampling(self) -> None:
        decoded = request(
            max_output_tokens=5,
            temperature=0.5,
            top_p=0.25,
            top_k=40,
            min_p=0.1,
            presence_penalty=1,
            frequency_penalty=0.5,
            repetition_penalty=1.1,
            seed=7,
            stop=["a", ""],
        )
        assert decoded.sampling == Sampling(5, 0.5, 0.25, 40, 0.1, 1, 0.5, 1.1, 7, ("a",))

    @pytest.mark.parametrize(
        ("reasoning", "read"),
        [
            (None, Thinking()),
            ({"summary": "auto"}, Thinking()),
            ({"effort": "high", "context": "all_turns"}, Thinking(effort="high")),
            ({"effort": "none"}, Thinking(enabled=False, effort="none")),
        ],
    )
    def test_reasoning(self, reasoning: Json | None, read: Thinking) -> None:
        assert request(reasoning=reasoning).thinking == read

    def test_an_update_of_the_configuration_holds_until_the_next(self) -> None:
        """An item instead of a changed field, so that the beginning of the request stays as it was."""
        schema = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
        high, low = ({"type": "configuration_update", "reasoning": {"effort": e}} for e in ("high", "low"))
        fields: Json = {
            "input": [USER, high, USER, {**low, "text": schema}],
            "reasoning": {"effort": "medium"},
        }
        decoded = request(**fields)
        assert (decoded.thinking.effort, decoded.warnings) == ("low", ())
        assert decoded.response_format == ResponseFormat({"type": "object"}, "n")
        assert decoded.conversation.turns == turns(USER, USER)
        assert decoded.options.stored_state.input_items == fields["input"]
        more = {**low, "reasoning": {"summary": "auto"}, "text": {"verbosity": "low"}}
        decoded = request(**{**fields, "input": [*fields["input"], more]})
        assert decoded.thinking.effort == "low"
        assert decoded.response_format == ResponseFormat({"type": "object"}, "n")
        default = request(**{**fields, "input": [*fields["input"], {**low, "reasoning": {"effort": None}}]})
        assert default.thinking == Thinking()
        assert refused(input=[USER, {**low, "reasoning": {"effort": 1}}]).param == "reasoning.effort"

    def test_template_arguments(self) -> None:
        decoded = request(chat_template_kwargs={"enable_thinking": False, "x": 1})
        assert decoded.thinking == Thinking(
            enabled=False, template_arguments={"enable_thinking": False, "x": 1}
        )

    @pytest.mark.parametrize(
        ("form", "read"),
        [
            ({"type": "text"}, None),
            ({"type": "json_object"}, ResponseFormat()),
            (
                {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
                ResponseFormat({"type": "object"}, "n", True),
            ),
        ],
    )
    def test_text_format(self, form: Json, read: ResponseFormat | None) -> None:
        assert request(text={"format": form, "verbosity": "low"}).response_format == read

    def test_the_prompt_cache_key_is_the_session(self) -> None:
        assert request(prompt_cache_key="s").session == "s"
        assert request().session is None

    def test_parallel_tool_calls(self) -> None:
        assert request().parallel_tool_calls
        assert not request(parallel_tool_calls=False).parallel_tool_calls

    def test_unknown_fields_are_accepted(self) -> None:
        decoded = request(client_metadata={"a": "b"}, stream_options={"include_obfuscation": False}, new=[1])
        assert decoded.warnings == ()

    def test_limits_that_the_server_holds(self) -> None:
        decoded = request(max_tool_calls=2, truncation="auto")
        assert (decoded.max_tool_calls, decoded.truncate) == (2, True)
        assert (request().max_tool_calls, request(truncation="disabled").truncate) == (None, False)

    @pytest.mark.parametrize(
        ("asked", "read"),
        [
            ({}, None),
            ({"top_logprobs": 0}, None),
            ({"top_logprobs": 3}, 3),
            ({"include": ["message.output_text.logprobs"]}, 0),
            ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
        ],
    )
    def test_logprobs(self, asked: Json, read: int | None) -> None:
        assert request(**asked).sampling.logprobs == read

    def test_verbosity_goes_to_templates_that_read_it(self) -> None:
        decoded = request(text={"verbosity": "low"}, chat_template_kwargs={"x": 1})
        assert decoded.thinking.template_arguments == {"verbosity": "low", "x": 1}
        assert request().thinking.template_arguments is None

    def test_a_request_for_a_store_reaches_the_server(self) -> None:
        decoded = request(
            previous_response_id="resp_1",
            conversation="conv_1",
            background=True,
            input=[{"id": "msg_1"}, {"type": "item_reference", "id": "msg_2"}],
        )
        assert decoded.options.stored_state.unresolved == (
            "previous_response_id",
            "conversation",
            "background",
            "input.0",
            "input.1",
        )
        assert decoded.options.stored_state.previous_response_id == "resp_1"
        assert request(store=True).options.stored_state.unresolved == ()


BAD: list[tuple[Json, str | None]] = [
    ({"model": 1}, "model"),
    ({"input": 1}, "input"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": ["a"]}, "input.0"),
    ({"input": [{}]}, "input.0.type"),
    ({"input": [{"type": 1}]}, "input.0.type"),
    ({"input": [USER, {"role": "critic", "content": "a"}]}, "input.1.role"),
    ({"input": [{"role": "user", "content": [1]}]}, "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]}, "input.0.content.0.text"),
    ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input.0.name"),
    ({"input": [{"type": "function_call", "name": "f", "call_id": 1}]}, "input.0.call_id"),
    ({"input": [{"type": "reasoning", "content": "a"}]}, "input.0.content"),
    ({"input": [{"type": "additional_tools", "tools": [{"type": "function"}]}]}, "input.0.tools.0.name"),
    ({"tools": [{"type": "function"}]}, "tools.0.name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools.0.parameters"),
    ({"input": [{"type": "compaction"}]}, "input.0.encrypted_content"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools.0.tools.0.name"),
    ({"tools": [{"type": "custom", "name": "f", "format": {"syntax": "ebnf"}}]}, "tools.0.format.syntax"),
    ({"tools": {}}, "tools"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"reasoning": {"effort": 1}}, "reasoning.effort"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"truncation": "middle"}, "truncation"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"metadata": {f"k{i}": "v" for i in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: "v"}}, f"metadata.{'k' * 64}"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    ({"metadata": {"k": 1}}, "metadata.k"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda v: v if isinstance(v, str) else None)
def test_bad_requests_are_refused_by_name(fields: Json, param: str | None) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param is None or param in error.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"model": "m', b"\xff"])
def test_bad_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        responses.decode(body)


@pytest.mark.parametrize("depth", [100, 900, 930, 960, 990, 5000])
def test_deep_nesting_is_read_or_refused(depth: int) -> None:
    schema = '{"a":' * depth + "{}" + "}" * depth
    body = f'{{"model":"m","input":"a","tools":[{{"type":"function","name":"f","parameters":{schema}}}]}}'
    with contextlib.suppress(InvalidRequest) if depth > 100 else contextlib.nullcontext():
        responses.decode(body.encode())
