"""The grammar takes what is drawn and nothing else. The oracle is LLGuidance, the engine's own matcher."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from singletree import families
from singletree.conversation import Part, Reasoning, Tool, ToolCall, ToolChoice
from singletree.errors import InvalidRequest
from singletree.parsing.constrain import calls_grammar, json_grammar
from singletree.parsing.draw import draw
from singletree.parsing.family import Family

BYTES = LLTokenizer("byte")
WITH_CALLS = [f for f in families.table() if f.forms]
WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
TIME = Tool("get_time")
PARIS = ToolCall("get_weather", '{"city": "Paris", "days": 3}', "abcdefghi")
REQUIRED = ToolChoice("required")


def takes(grammar: str, text: str) -> bool:
    assert not LLMatcher.validate_grammar(grammar, BYTES)
    matcher = LLMatcher(BYTES, grammar)
    return bool(matcher.consume_tokens(BYTES.tokenize_bytes(text.encode()))) and matcher.is_accepting()


@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda f: f.name)
def test_takes_what_is_drawn(family: Family) -> None:  # C42
    grammar = calls_grammar(family, [WEATHER, TIME], REQUIRED)
    assert takes(grammar, draw(family, [PARIS]))
    assert takes(grammar, draw(family, [PARIS, ToolCall("get_time", "{}", "123456789")]))
    assert not takes(grammar, "I would rather talk.")
    assert not takes(grammar, draw(family, [ToolCall("rm", "{}", "abcdefghi")]))


@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda f: f.name)
@pytest.mark.parametrize(
    "arguments", ['{"days": 3}', '{"city": "x", "days": "soon"}', '{"city": "x", "unit": "k"}']
)
def test_refuses_what_the_schema_refuses(family: Family, arguments: str) -> None:  # C42
    grammar = calls_grammar(family, [WEATHER], REQUIRED)
    assert not takes(grammar, draw(family, [ToolCall("get_weather", arguments, "abcdefghi")]))


@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda f: f.name)
def test_one_named_tool_and_one_call_only(family: Family) -> None:  # C38
    grammar = calls_grammar(family, [WEATHER, TIME], ToolChoice("required", "get_weather"), parallel=False)
    assert takes(grammar, draw(family, [PARIS]))
    assert not takes(grammar, draw(family, [PARIS, PARIS]))
    assert not takes(grammar, draw(family, [ToolCall("get_time", "{}", "abcdefghi")]))


@pytest.mark.parametrize("family", [f for f in WITH_CALLS if f.reasoning], ids=lambda f: f.name)
def test_open_reasoning_goes_on_before_the_call(family: Family) -> None:  # C38
    grammar = calls_grammar(family, [WEATHER], REQUIRED, in_reasoning=True)
    drawn: list[Part] = [Reasoning("I need < the weather."), PARIS]
    assert family.reasoning is not None
    assert takes(grammar, draw(family, drawn).removeprefix(family.reasoning[0]))


def test_response_format_is_held_to() -> None:
    grammar = json_grammar(
        families.get("qwen3"), {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    )
    assert takes(grammar, '{"a": 1}')
    assert not takes(grammar, '{"a": "x"}')
    assert takes(json_grammar(families.get("plain"), None), '{"any": [1]}')
    assert takes(
        json_grammar(families.get("qwen3"), None, in_reasoning=True), 'so...\n</think>\n\n{"any": [1]}'
    )


@pytest.mark.parametrize(
    ("parameters", "path"),
    [
        ({"properties": {"a": {"not": {"type": "string"}}}}, "tools.0.parameters.properties.a.not"),
        (
            {"properties": {"a": {"$ref": "https://example.com/a.json"}}},
            "tools.0.parameters.properties.a.$ref",
        ),
        (
            {"properties": {"a": {"type": "array", "uniqueItems": True}}},
            "tools.0.parameters.properties.a.uniqueItems",
        ),
    ],
)
def test_what_cannot_be_held_to_is_refused_with_its_path(
    parameters: dict[str, Any], path: str
) -> None:  # C42
    with pytest.raises(InvalidRequest) as refused:
        calls_grammar(families.get("hermes"), [Tool("f", parameters=parameters)], REQUIRED)
    assert refused.value.param == path


def test_a_call_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no known tool-call format"):
        calls_grammar(families.get("plain"), [TIME], REQUIRED)
    with pytest.raises(InvalidRequest, match="'nowhere'"):
        calls_grammar(families.get("hermes"), [TIME], ToolChoice("required", "nowhere"))
