"""Chat Completions in: the fields of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocols.chat_bodies import LIST, PATCH, READ, SCHEMA, USER, assistant, decode
from singletree.conversation import (
    ResponseFormat,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolChoice,
    ToolReference,
    Turn,
)
from singletree.errors import InvalidRequest
from singletree.protocols.chat import request as chat
from singletree.request_options import RequestOptions


def test_the_least_that_a_request_can_be() -> None:
    request = decode()
    assert request.model == "m"
    assert request.conversation.turns == (Turn("user", (Text("hi"),)),)
    assert request.sampling == Sampling()
    assert not request.stream
    assert request.parallel_tool_calls
    assert request.thinking == Thinking()
    assert request.options == RequestOptions()


def test_unknown_fields_and_nulls_are_accepted() -> None:
    fields = [
        *chat.ChatBody.__struct_fields__,
        "store",
        "metadata",
        "user",
        "nvext",
        "verbosity",
        "service_tier",
    ]
    nulls = dict.fromkeys((f for f in fields if f not in ("model", "messages")), None)
    assert decode(**nulls) == decode()
    assert (
        decode(user="u", metadata={"a": "b"}, store=False, cache_control={"x": [1]}, safety_identifier="s")
        == decode()
    )


def test_that_a_completion_is_not_stored_is_reported() -> None:
    [warning] = decode(store=True).warnings
    assert "store is ignored" in warning
    assert "/v1/responses" in warning


class TestTools:
    def test_functions(self) -> None:
        strict = {
            "type": "function",
            "function": {"name": "s", "description": "", "parameters": {}, "strict": True},
        }
        assert decode(tools=[READ, LIST, strict]).conversation.tools == (
            Tool("read", "Reads.", SCHEMA),
            Tool("list"),
            Tool("s", "", {}, strict=True),
        )

    def test_the_schema_keeps_the_order_of_its_keys(self) -> None:  # C6
        parameters = decode(tools=[READ]).conversation.tools[0].parameters
        assert json.dumps(parameters) == json.dumps(SCHEMA)

    def test_a_system_message_adds_tools_where_it_stands(self) -> None:
        """The form of Kimi K3, in which pi 1.6 sends the tools that a search has found."""
        found = {"role": "system", "tools": [LIST], "content": "Found."}
        choice = {"type": "function", "function": {"name": "list"}}
        decoded = decode(tools=[READ], messages=[USER, found, USER], tool_choice=choice)
        assert [(t.name, t.deferred) for t in decoded.conversation.tools] == [("read", False), ("list", True)]
        assert decoded.conversation.turns[1] == Turn("system", (Text("Found."), ToolReference("list")))
        assert decoded.tool_choice == ToolChoice("required", "list")
        first = decode(messages=[found, USER]).conversation.tools
        assert first == (Tool("list"),), "nothing else would say how to call it"
        nameless = {"role": "system", "tools": [{"type": "function"}]}
        with pytest.raises(InvalidRequest) as refused:
            decode(tools=[READ], messages=[USER, nameless])
        assert refused.value.param == "messages.1.tools.0.function"

    def test_custom(self) -> None:  # C25
        grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}}
        [free, bound] = decode(
            tools=[PATCH, {"type": "custom", "custom": {"name": "g", "format": grammar}}]
        ).conversation.tools
        assert (free.kind, bound.kind) == ("custom", "custom")
        assert free.parameters is not None
        assert list(free.parameters["properties"]) == ["input"]
        assert str(free.description).startswith("Edits.")
        assert 'start: "x"' in str(bound.description)
        assert bound.extra == {"grammar": {"syntax": "lark", "definition": 'start: "x"'}}

    def test_unknown_types_are_ignored_with_a_warning(self) -> None:  # C26
        request = decode(tools=[{"type": "web_search", "max_uses": 3}, READ])
        assert [t.name for t in request.conversation.tools] == ["read"]
        assert request.warnings == ("tools.0 is ignored: unknown type 'web_search'",)

    @pytest.mark.parametrize(
        ("choice", "expected"),
        [
            ("auto", ToolChoice()),
            ("none", ToolChoice("none")),
            ("required", ToolChoice("required")),
            ("any", ToolChoice("required")),
            ({"type": "auto"}, ToolChoice()),
            ({"type": "any"}, ToolChoice("required")),
            ({"type": "function", "function": {"name": "list"}}, ToolChoice("required", "list")),
            ({"type": "function", "name": "list"}, ToolChoice("required", "list")),
            ({"type": "tool", "name": "list"}, ToolChoice("required", "list")),
            ({"type": "custom", "custom": {"name": "apply_patch"}}, ToolChoice("required", "apply_patch")),
            (
                {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [LIST]}},
                ToolChoice("required", "list"),
            ),
        ],
    )
    def test_tool_choice(self, choice: Any, expected: ToolChoice) -> None:  # C38
        request = decode(tools=[READ, LIST, PATCH], tool_choice=choice)
        assert request.tool_choice == expected
        assert request.warnings == ()
        assert request.conversation == decode(tools=[READ, LIST, PATCH]).conversation, (
            "the prompt may not change"
        )

    @pytest.mark.parametrize("mode", ["auto", "required"])
    def test_several_allowed_tools_do_not_change_the_tools(self, mode: Any) -> None:  # C6 C38
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [READ, LIST]}}
        request = decode(tools=[READ, LIST, PATCH], tool_choice=choice)
        assert request.tool_choice == ToolChoice(mode, allowed=("read", "list"))
        assert request.conversation == decode(tools=[READ, LIST, PATCH]).conversation

    @pytest.mark.parametrize(
        ("mode", "tools"), [("required", []), ("auto", [{"type": "function", "name": "no"}])]
    )
    def test_what_cannot_be_allowed_is_refused(self, mode: str, tools: list[Any]) -> None:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        with pytest.raises(InvalidRequest) as refused:
            decode(tools=[READ, LIST, PATCH], tool_choice=choice)
        assert refused.value.param == "tool_choice"

    def test_parallel_tool_calls(self) -> None:
        assert not decode(parallel_tool_calls=False).parallel_tool_calls
        assert decode(parallel_tool_calls=True).parallel_tool_calls


class TestSampling:
    def test_every_field(self) -> None:
        plain: dict[str, Any] = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.05,
            "presence_penalty": 0.1,
            "frequency_penalty": -0.1,
            "repetition_penalty": 1.1,
            "seed": 7,
            "ignore_eos": True,
        }
        sampling = decode(**plain, logit_bias={"50": -100, "7": 1.5}, stop=["a", "b"], max_tokens=9).sampling
        assert sampling == Sampling(**plain, logit_bias={50: -100, 7: 1.5}, stop=("a", "b"), max_tokens=9)

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"max_tokens": 5}, 5),
            ({"max_completion_tokens": 6}, 6),
            ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
            ({"max_tokens": 10**12}, 10**12),
            ({"max_tokens": 0}, 1),
            ({"max_tokens": -1}, None),
        ],
    )
    def test_max_tokens_is_never_refused(self, fields: dict[str, int], expected: int | None) -> None:
        assert decode(**fields).sampling.max_tokens == expected

    @pytest.mark.parametrize(("stop", "expected"), [("x", ("x",)), ([], ()), ("", ()), (["", "y"], ("y",))])
    def test_stop(self, stop: Any, expected: tuple[str, ...]) -> None:
        assert decode(stop=stop).sampling.stop == expected

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"logprobs": True}, 0),
            ({"logprobs": True, "top_logprobs": 5}, 5),
            ({"logprobs": False}, None),
            ({"logprobs": False, "top_logprobs": 0}, None),
        ],
    )
    def test_logprobs(self, fields: dict[str, Any], expected: int | None) -> None:
        assert decode(**fields).sampling.logprobs == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_effort": "high"}, Thinking(effort="high")),
        ({"reasoning_effort": "none"}, Thinking(enabled=False, effort="none")),
        ({"enable_thinking": False}, Thinking(enabled=False)),
        ({"thinking": True}, Thinking(enabled=True)),
        ({"thinking": {"type": "disabled"}}, Thinking(enabled=False)),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 32000}, "max_tokens": 32000},
            Thinking(enabled=True, budget_tokens=32000),
        ),
        ({"thinking_budget": 100}, Thinking(budget_tokens=100)),
        (
            {"reasoning": {"effort": "low", "max_tokens": 9, "enabled": True}},
            Thinking(enabled=True, effort="low", budget_tokens=9),
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "x": 1}},
            Thinking(enabled=False, template_arguments={"enable_thinking": False, "x": 1}),
        ),
        ({"chat_template_kwargs": {"thinking": 1}}, Thinking(template_arguments={"thinking": 1})),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            Thinking(enabled=True, template_arguments={"enable_thinking": False}),
        ),
    ],
)
def test_thinking(fields: dict[str, Any], expected: Thinking) -> None:
    assert decode(**fields).thinking == expected


@pytest.mark.parametrize(
    ("given_format", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, ResponseFormat()),
        ({"type": "json_object", "schema": SCHEMA}, ResponseFormat(SCHEMA)),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            ResponseFormat(SCHEMA, "n", True),
        ),
    ],
)
def test_response_format(given_format: Any, expected: ResponseFormat | None) -> None:
    assert decode(response_format=given_format).response_format == expected


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([], None),
        ([assistant(content="x")], None),
        ([assistant(reasoning="a")], ("reasoning",)),
        ([assistant(reasoning_content="a", reasoning="a")], ("reasoning_content", "reasoning")),
        ([assistant(reasoning_details=[{"text": "a"}])], ("reasoning",)),
        (
            [assistant(reasoning_content="a"), assistant(reasoning="a"), assistant(content="x")],
            ("reasoning",),
        ),
    ],
)
def test_reasoning_goes_out_as_it_comes_in(messages: list[Any], fields: tuple[str, ...] | None) -> None:
    assert decode(messages=[*messages, USER]).options.reasoning_fields == fields


def test_reasoning_can_be_left_out() -> None:
    assert decode(include_reasoning=False).options.reasoning_fields == ()
    assert decode(reasoning={"exclude": True}).options.reasoning_fields == ()


OPENED, LEFT_OPEN, WHOLE, BARE = (True, True), (True, True), (True, False), (False, True)


@pytest.mark.parametrize(
    ("last", "fields", "opening"),
    [
        (USER, {}, OPENED),
        (USER, {"continue_final_message": False, "add_generation_prompt": True}, WHOLE),
        (USER, {"add_generation_prompt": False}, BARE),
        (assistant(content="So"), {}, LEFT_OPEN),
        (assistant(content="So"), {"continue_final_message": True}, LEFT_OPEN),
        (
            assistant(content="So"),
            {"continue_final_message": True, "add_generation_prompt": False},
            LEFT_OPEN,
        ),
        (assistant(content="So", prefix=True), {"add_generation_prompt": False}, LEFT_OPEN),
        (assistant(content="So", partial=True), {}, LEFT_OPEN),
        (assistant(content="So"), {"continue_final_message": False}, WHOLE),
        (assistant(content="So"), {"add_generation_prompt": True}, WHOLE),
        (assistant(content="So"), {"add_generation_prompt": False}, BARE),
    ],
)
def test_how_the_answer_is_opened(last: Any, fields: dict[str, Any], opening: tuple[bool, bool]) -> None:
    request = decode(messages=[USER, last], **fields)
    assert (request.opens_turn, request.continues) == opening


def test_stream_and_session() -> None:
    request = decode(
        stream=True, stream_options={"include_usage": True}, prompt_cache_key="k", session_id="s"
    )
    assert (request.stream, request.options.include_usage, request.session) == (True, True, "k")
    assert decode(session_id="s").session == "s"
