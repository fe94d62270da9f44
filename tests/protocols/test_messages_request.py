"""Requests as harnesses send them: tools, thinking, sampling, session, and what is ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from singletree.conversation import ResponseFormat, Thinking, Tool, ToolChoice
from singletree.errors import InvalidRequest
from singletree.protocols import messages

from .test_messages_decode import BASH, CLAUDE_CODE, decode, text, turns, user


def test_count_needs_no_max_tokens_and_says_the_same_prompt() -> None:  # C27
    body = {k: v for k, v in CLAUDE_CODE.items() if k != "max_tokens"}
    counted = messages.decode_count(json.dumps(body).encode())
    assert counted.conversation == messages.decode(json.dumps(CLAUDE_CODE).encode()).conversation
    with pytest.raises(InvalidRequest, match=r"^max_tokens: Field required$"):
        messages.decode(json.dumps(body).encode())
    assert (
        messages.decode_count(b'{"model":"m","messages":[{"role":"user","content":"a"}],"tools":[]}').model
        == "m"
    )


def test_tools() -> None:
    examples = [{"command": "ls"}]
    extra = {"input_examples": examples, "eager_input_streaming": True}
    request = decode(
        tools=[BASH | {"type": "custom", "strict": True} | extra, {"name": "bare"}], tool_choice=None
    )
    described = 'run\n\nExamples of the input:\n{"command":"ls"}'
    assert request.conversation.tools == (
        Tool("Bash", described, BASH["input_schema"], strict=True),  # type: ignore[arg-type]
        Tool("bare"),
    )
    assert request.conversation.tools[0].extra == extra


def test_tools_built_into_the_api_are_ignored_with_a_warning() -> None:  # C26
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    request = decode(
        tools=[search, BASH, {"type": "mcp_toolset", "mcp_server_name": "s"}], mcp_servers=[{"url": "u"}]
    )
    assert [t.name for t in request.conversation.tools] == ["Bash"]
    assert [w.split(" are ")[0] for w in request.warnings] == [
        "tools of type 'web_search_20250305'",
        "tools of type 'mcp_toolset'",
        "mcp_servers is ignored: it has no meaning on this server",
    ]
    assert decode(tools=[search], tool_choice={"type": "auto"}).conversation.tools == ()


@pytest.mark.parametrize(
    ("given", "choice", "parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), False),
        ({"type": "any"}, ToolChoice("required"), True),
        (
            {"type": "tool", "name": "Bash", "disable_parallel_tool_use": False},
            ToolChoice("required", "Bash"),
            True,
        ),
        (
            {"type": "tool", "name": "Bash", "disable_parallel_tool_use": True},
            ToolChoice("required", "Bash"),
            False,
        ),
        ({"type": "none"}, ToolChoice("none"), True),
    ],
)
def test_tool_choice(given: Any, choice: ToolChoice, parallel: bool) -> None:  # C38
    request = decode(tools=[BASH], tool_choice=given)
    assert (request.tool_choice, request.parallel_tool_calls) == (choice, parallel)
    assert request.conversation == decode(tools=[BASH]).conversation  # C6


def test_a_choice_of_an_ignored_tool_is_ignored() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    for choice in ({"type": "tool", "name": "web_search"}, {"type": "any"}):
        request = decode(tools=[search], tool_choice=choice)
        assert request.tool_choice == ToolChoice()
        assert request.warnings[-1] == "tool_choice is ignored: the tool that it names is ignored"


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, Thinking()),
        ({"thinking": None}, Thinking()),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 31999, "display": "updates"}},
            Thinking(True, None, 31999),
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 10**9}}, Thinking(True, None, 10**9)),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, Thinking(True, None, 0)),
        ({"thinking": {"type": "enabled"}}, Thinking(True)),
        ({"thinking": {"type": "adaptive"}}, Thinking(True)),
        ({"thinking": {"type": "between_tools"}}, Thinking(True)),
        ({"thinking": {"type": "disabled"}}, Thinking(False)),
        ({"output_config": {"effort": "max"}}, Thinking(None, "max")),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, Thinking(False, "low")),
    ],
)
def test_thinking(fields: dict[str, Any], thinking: Thinking) -> None:
    assert decode(**fields).thinking == thinking


def test_effort_can_change_in_the_middle() -> None:
    changed = {"role": "system", "output_config": {"effort": "low"}}
    request = decode(messages=[user(text("x")), changed], output_config={"effort": "high"})
    assert request.thinking.effort == "low"
    assert len(request.conversation.turns) == 1


def test_response_format() -> None:
    asked = {"type": "json_schema", "schema": {"type": "object"}}
    assert decode(output_config={"format": asked}).response_format == ResponseFormat(
        {"type": "object"}, strict=True
    )
    assert decode(output_format=asked).response_format == ResponseFormat({"type": "object"}, strict=True)
    assert decode(output_config={"effort": "low"}).response_format is None
    formats = (
        decode(output_config={"format": asked}).response_format,
        decode(output_format=asked).response_format,
    )
    assert [f and f.schema_at for f in formats] == ["output_config.format.schema", "output_format.schema"]


def test_sampling() -> None:
    request = decode(temperature=1, top_p=0.9, top_k=40, stop_sequences=["\n\nHuman:", ""], max_tokens=10**9)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.9, 40)
    assert (sampling.stop, sampling.max_tokens) == (("\n\nHuman:",), 10**9)
    assert [decode(top_k=k).sampling.top_k for k in (0, -1, None, 1)] == [None, None, None, 1]
    assert decode(stop_sequences=None).sampling.stop == ()


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ('{"device_id":"d","session_id":"s"}', "s"),
        (
            "user_0a_account__session_2ec3a2f1-6f3f-4d0e-9d1c-0c0c0c0c0c0c",
            "2ec3a2f1-6f3f-4d0e-9d1c-0c0c0c0c0c0c",
        ),
        ("13803d75-b4b5-4c3e-b2a2-6f21399b021b", "13803d75-b4b5-4c3e-b2a2-6f21399b021b"),
        ('{"other": 1}', '{"other": 1}'),
        ('{"session_id": 7}', '{"session_id": 7}'),
        ("", None),
        (None, None),
    ],
)
def test_session(user_id: str | None, session: str | None) -> None:
    assert decode(metadata={"user_id": user_id}).session == session


def test_fields_that_nobody_knows_are_accepted() -> None:
    known = decode()
    assert decode(speed="fast", service_tier="auto", betas=["x"], zzz={"a": [1]}, inference_geo=None) == known
    assert turns(user(text("x", citations=None, zzz=1)) | {"id": "m", "zzz": {}}) == known.conversation.turns
