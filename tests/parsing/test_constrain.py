"""Grammars take what is drawn and nothing else. The oracle is LLGuidance, the engine's own matcher."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from parsing.asking import (
    BAD_PATCH,
    BREAKING,
    GOOD_PATCH,
    NOON,
    PARIS,
    PATCH,
    TIME,
    WEATHER,
    WITH_CALLS,
    a_call,
)
from singletree import families
from singletree.constraints.constrain import (
    allow_calls,
    grammar_is_enforceable,
    marks_calls,
    require_call,
    require_format,
)
from singletree.constraints.expression import Expression, lark
from singletree.conversation import Part, Reasoning, ResponseFormat, Text, Tool
from singletree.errors import InvalidRequest
from singletree.parsing.family import Family
from singletree.parsing.render_turn import render_turn

BYTES = LLTokenizer("byte")
MARKED = [f for f in WITH_CALLS if marks_calls(f)]
each_family = pytest.mark.parametrize("family", WITH_CALLS, ids=lambda f: f.name)
each_marked = pytest.mark.parametrize("family", MARKED, ids=lambda f: f.name)


@cache
def matcher_of(grammar: str) -> LLMatcher:
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def takes(expression: Expression | None, text: str) -> bool:
    assert expression is not None
    matcher = matcher_of(lark(expression)).deep_copy()
    return bool(matcher.consume_tokens(BYTES.tokenize_bytes(text.encode()))) and matcher.is_accepting()


def forced(family: Family, *tools: Tool, parallel: bool = True, thinking: Any = "over") -> Expression:
    return require_call(family, tools, thinking=thinking, parallel=parallel)


def free(family: Family, *tools: Tool, parallel: bool = True, thinking: Any = "over") -> Expression | None:
    return allow_calls(family, tools, thinking=thinking, parallel=parallel)


@each_family
def test_takes_what_is_rendered(family: Family) -> None:  # C42
    wanted = forced(family, WEATHER, TIME)
    assert takes(wanted, render_turn(family, [PARIS]))
    assert takes(wanted, render_turn(family, [PARIS, NOON]))
    assert not takes(wanted, "I would rather talk.")
    assert not takes(wanted, render_turn(family, [a_call(family, "{}", "rm")]))


@each_family
def test_takes_random_turns(family: Family) -> None:  # C42
    chance = random.Random(family.name)
    wanted = forced(family, WEATHER, TIME)
    for _ in range(2):
        arguments: dict[str, Any] = {
            "city": "".join(chance.choices("Köln, x<y>&|{}[]'\\=:", k=9)).strip() or "x"
        }
        if chance.random() < 0.5:
            arguments["days"] = chance.randrange(-99, 99)
        if chance.random() < 0.5:
            arguments["unit"] = chance.choice("cf")
        many = [a_call(family, json.dumps(arguments, ensure_ascii=False)), NOON][: chance.randrange(1, 3)]
        rendered = render_turn(family, many)
        assert takes(wanted, rendered), rendered


@each_family
def test_refuses_what_the_schema_refuses(family: Family) -> None:  # C42
    for arguments in BREAKING:
        rendered = render_turn(family, [a_call(family, arguments)])
        assert not takes(forced(family, WEATHER), rendered), arguments


@each_family
def test_one_tool_and_one_call_only(family: Family) -> None:  # C38
    wanted = forced(family, WEATHER, parallel=False)
    assert takes(wanted, render_turn(family, [PARIS]))
    assert not takes(wanted, render_turn(family, [PARIS, PARIS]))
    assert not takes(wanted, render_turn(family, [NOON]))


@pytest.mark.parametrize("family", [f for f in WITH_CALLS if f.reasoning], ids=lambda f: f.name)
def test_reasoning_goes_on_or_begins_before_the_call(family: Family) -> None:  # C38
    rendered: list[Part] = [Reasoning("I need < the weather."), PARIS]
    assert family.reasoning is not None
    thought = render_turn(family, rendered)
    assert takes(forced(family, WEATHER, thinking="open"), thought.removeprefix(family.reasoning[0]))
    assert takes(forced(family, WEATHER, thinking="possible"), thought)
    assert takes(forced(family, WEATHER, thinking="possible"), render_turn(family, [PARIS]))
    assert not takes(forced(family, WEATHER, thinking="over"), thought)


# tool_choice auto


@each_marked
def test_a_free_turn_may_talk_and_call(family: Family) -> None:  # C42
    wanted = free(family, WEATHER, TIME)
    written: list[Part] = [Text("Let me look.")]
    for parts in (
        [],
        written,
        [PARIS],
        [*written, PARIS],
        [PARIS, NOON],
        [*written, PARIS, Text("And so on.")],
    ):
        assert takes(wanted, render_turn(family, parts)), parts


@each_marked
def test_a_call_once_begun_is_right(family: Family) -> None:  # C42
    for arguments in BREAKING:
        rendered = render_turn(family, [Text("So."), a_call(family, arguments)])
        assert not takes(free(family, WEATHER, TIME), rendered), arguments


@each_marked
def test_a_call_once_begun_names_an_allowed_tool(family: Family) -> None:  # C38
    assert takes(free(family, TIME), render_turn(family, [NOON]))
    assert not takes(free(family, TIME), render_turn(family, [PARIS]))
    assert takes(free(family), render_turn(family, [Text("No tool for me.")]))
    assert not takes(free(family), render_turn(family, [NOON]))


@each_marked
def test_a_free_turn_may_be_held_to_one_call(family: Family) -> None:  # C38
    wanted = free(family, WEATHER, parallel=False)
    assert takes(wanted, render_turn(family, [Text("So."), PARIS]))
    assert not takes(wanted, render_turn(family, [PARIS, PARIS]))


@each_marked
def test_a_tool_that_is_not_strict_takes_what_it_is_given(family: Family) -> None:
    lax = Tool("get_weather", parameters=WEATHER.parameters)
    assert takes(
        free(family, lax, TIME), render_turn(family, [a_call(family, '{"unit": "c", "city": "x"}')])
    ) or (family.forms[0].literals)


@pytest.mark.parametrize("family", [f for f in MARKED if f.reasoning], ids=lambda f: f.name)
def test_calls_are_free_inside_a_thought(family: Family) -> None:  # C18
    assert family.reasoning is not None
    opener, _ = family.reasoning
    quoted = (family.forms[0].opener or family.message_header).strip()
    parts: list[Part] = [Reasoning(f"I might write {quoted} or so."), Text("Done.")]
    thought = render_turn(family, parts)
    assert takes(free(family, WEATHER, thinking="possible"), thought)
    assert takes(free(family, WEATHER, thinking="open"), thought.removeprefix(opener))
    generated = render_turn(family, [Text(f"I might write {quoted} or so.")])
    assert takes(free(family, WEATHER, thinking="over"), generated) is bool(family.message_header)


@pytest.mark.parametrize("family", [f for f in MARKED if f.forms[0].optional], ids=lambda f: f.name)
def test_no_way_around_the_marker(family: Family) -> None:  # C42
    """A call that begins without what stands around it would be read, too."""
    form = family.forms[0]
    bare = render_turn(family, [a_call(family, '{"days": 3}')]).removeprefix(form.calls[0].rstrip("\n"))
    assert not takes(free(family, WEATHER), f"So: {bare}")


def test_families_without_a_marker_are_known() -> None:
    """Their free turns are not constrained, and the server says so in a header."""
    assert {f.name for f in WITH_CALLS} - {f.name for f in MARKED} == UNMARKED


UNMARKED = {"cohere_command3", "cohere_command4", "kimi_k3", "llama3_json", "pythonic", "xlam"}


# Response formats, and what cannot be held to

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_response_format_is_held_to() -> None:
    qwen3, plain = families.get("qwen3"), families.get("plain")
    wanted = require_format(qwen3, ResponseFormat(SCHEMA), thinking="over", parallel=True)
    assert takes(wanted, '{"a": 1}')
    assert not takes(wanted, '{"a": "x"}')
    assert takes(require_format(plain, ResponseFormat(), thinking="over", parallel=True), '{"any": [1]}')
    thinks = require_format(qwen3, ResponseFormat(), thinking="open", parallel=True)
    assert takes(thinks, 'so...\n</think>\n\n{"any": [1]}')


def test_response_format_leaves_room_for_a_call() -> None:
    qwen3 = families.get("qwen3")
    wanted = require_format(qwen3, ResponseFormat(SCHEMA), [WEATHER], thinking="over", parallel=True)
    assert takes(wanted, '{"a": 1}')
    assert takes(wanted, render_turn(qwen3, [PARIS]))
    assert not takes(wanted, "neither")


ODD: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"not": {"type": "string"}}}}, "properties.a.not"),
    ({"properties": {"a": {"$ref": "https://example.com/a.json"}}}, "properties.a.$ref"),
    ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "properties.a.$ref"),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "properties.a.uniqueItems"),
    ({"properties": {"a": {"anyOf": [{}, {"format": "iri"}]}}}, "properties.a.anyOf.1.format"),
    ({"properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}, "properties.a.pattern"),
    ({"properties": {"a": {"type": "objekt"}}}, "properties.a.type"),
    ({"properties": ["a"]}, "properties"),
]


@pytest.mark.parametrize(("parameters", "path"), ODD)
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_what_a_strict_tool_cannot_be_held_to_is_refused_with_its_path(
    name: str, parameters: dict[str, Any], path: str
) -> None:  # C42
    tool = Tool("f", parameters=parameters, strict=True, schema_at="tools.0.input_schema")
    for ask in (forced, free):
        with pytest.raises(InvalidRequest) as refused:
            ask(families.get(name), tool)
        assert refused.value.param == f"tools.0.input_schema.{path}"
        assert f"tools.0.input_schema.{path}" in refused.value.message


@pytest.mark.parametrize(("parameters", "path"), ODD)
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_tool_that_is_not_strict_may_have_any_schema(
    name: str, parameters: dict[str, Any], path: str
) -> None:
    """The native APIs take it; what cannot be enforced is left to the model."""
    family = families.get(name)
    assert takes(
        forced(family, Tool("f", parameters=parameters)), render_turn(family, [a_call(family, "{}", "f")])
    )


def test_a_property_may_be_called_as_a_keyword_is() -> None:
    tool = Tool(
        "f", parameters={"properties": {"not": {"type": "string"}, "format": {"enum": ["x"]}}}, strict=True
    )
    family = families.get("hermes")
    assert takes(
        forced(family, tool), render_turn(family, [a_call(family, '{"not": "y", "format": "x"}', "f")])
    )


def test_a_call_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no known tool-call format"):
        forced(families.get("plain"), TIME)


# Strings that stand without quotes, and grammars of custom tools

UNQUOTED = ["qwen3_coder", "glm47", "minimax_m2", "deepseek_v3_2", "gemma4"]
QUOTED = ["hermes", "kimi_k2", "mistral", "pythonic"]


@pytest.mark.parametrize("name", UNQUOTED + QUOTED)
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": "^[a-z]+/[0-9]{2}$"}, "ab/12", ["ab", "1ab/12", "ab/123"]),
        ({"pattern": "b/1"}, "ab/12", ["ab"]),
        ({"pattern": "^(a|b)$"}, "a", ["c", "ab"]),
        ({"minLength": 2, "maxLength": 4}, "abc", ["a", "abcde"]),
        ({"enum": ["on", "off"]}, "off", ["of"]),
    ],
)
def test_strings_are_held_to_their_schema_in_every_dress(
    name: str, schema: dict[str, Any], good: str, bad: list[str]
) -> None:  # C42
    family = families.get(name)
    parameters = {"type": "object", "properties": {"s": {"type": "string", **schema}}, "required": ["s"]}
    wanted = forced(family, Tool("f", parameters=parameters, strict=True))
    assert takes(wanted, render_turn(family, [a_call(family, json.dumps({"s": good}), "f")]))
    for text in bad:
        assert not takes(wanted, render_turn(family, [a_call(family, json.dumps({"s": text}), "f")])), text


@pytest.mark.parametrize("pattern", ["^a|b$", "a^", "(^a)"])
def test_a_pattern_that_an_unquoted_string_cannot_be_held_to_is_refused(pattern: str) -> None:  # C42
    parameters = {"properties": {"s": {"type": "string", "pattern": pattern}}}
    tool = Tool("f", parameters=parameters, strict=True, schema_at="tools.1.parameters")
    with pytest.raises(InvalidRequest) as refused:
        forced(families.get("qwen3_coder"), tool)
    assert refused.value.param == "tools.1.parameters.properties.s.pattern"
    forced(families.get("hermes"), tool)  # a JSON string can be held to it


INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def custom(syntax: str, definition: str) -> Tool:
    return Tool("patch", parameters=INPUT, kind="custom", grammar=(syntax, definition))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m2", "deepseek_v3_2"])
@pytest.mark.parametrize("ask", [forced, free])
def test_a_grammar_of_the_clients_holds_where_text_stands_unquoted(name: str, ask: Any) -> None:
    family, tool = families.get(name), custom("lark", PATCH)
    assert grammar_is_enforceable(family, tool)
    for text, right in ((GOOD_PATCH, True), (GOOD_PATCH + "\n", True), (BAD_PATCH, False)):
        rendered = render_turn(family, [a_call(family, json.dumps({"input": text}), "patch")])
        assert takes(ask(family, tool), rendered) is right


@pytest.mark.parametrize("name", QUOTED + UNQUOTED)
def test_a_regular_expression_of_the_clients_holds_everywhere(name: str) -> None:
    family, tool = families.get(name), custom("regex", r"[a-z]+\n/[0-9]|x")
    assert grammar_is_enforceable(family, tool)
    for text, right in (("ab\n/1", True), ("x", True), ("ab", False), ("xx", False)):
        rendered = render_turn(family, [a_call(family, json.dumps({"input": text}), "patch")])
        assert takes(forced(family, tool), rendered) is right, text


@pytest.mark.parametrize("tool", [custom("lark", PATCH), custom("regex", "(?=a)b")])
def test_grammars_that_cannot_be_held_to_are_known(tool: Tool) -> None:
    """Lark inside a JSON string is not the same language once it is escaped."""
    assert not grammar_is_enforceable(families.get("hermes"), tool)


@pytest.mark.parametrize(
    ("name", "stop"), [("gpt_oss", "<|call|>"), ("solar_open", "<|calls|>"), ("inkling", "<|end_message|>")]
)
def test_a_closer_that_ends_the_turn_may_be_the_stop_token_itself(name: str, stop: str) -> None:
    """Engines keep stop tokens out of what a grammar can spell, and a turn must be able to end."""
    family = families.get(name)
    rendered = render_turn(family, [PARIS])
    assert rendered.endswith(stop)
    for wanted in (forced(family, WEATHER), free(family, WEATHER)):
        assert takes(wanted, rendered)
        assert takes(wanted, rendered.removesuffix(stop))
