"""When things leave, and which marker counts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from parsing.reading import read, turn
from singletree import families
from singletree.conversation import Reasoning, Text, Tool, ToolCall
from singletree.errors import BadFamily
from singletree.events import (
    ArgumentsDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
)
from singletree.parsing.compiled import compile_family
from singletree.parsing.emitter import opens_in_reasoning
from singletree.parsing.family import Family, Form
from singletree.parsing.parser import Parser
from singletree.parsing.render_turn import render_turn

WITH_CALLS = [f for f in families.table() if f.forms]


@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda f: f.name)
def test_the_call_ends_with_the_last_character_of_its_arguments(family: Family) -> None:
    call = render_turn(family, [ToolCall("f", '{"s": "x"}', "abcdefghi")])
    parser = Parser(family, [Tool("f")])
    ended = None
    for i, character in enumerate(call):
        if any(isinstance(e, ToolCallEnd) for e in parser.feed(character)):
            assert ended is None
            ended = i
    assert ended is not None
    if "{args}" in family.forms[0].call:
        assert call[: ended + 1].endswith('{"s": "x"}')
    elif "{literals}" in family.forms[0].call:
        assert call[: ended + 1].endswith(family.forms[0].call.partition("{literals}")[2][0])
    else:  # a tag family's arguments are complete with the call's closing tag (H5)
        assert call[: ended + 1].endswith(">")
        assert not call[: ended + 1].rstrip(">").endswith(('"s"', "x"))


@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda f: f.name)
def test_arguments_leave_as_they_are_decoded(family: Family) -> None:  # C10
    content = "def f(x):\n    return x < 3  # “quoted”\n" * 20
    call = render_turn(
        family, [ToolCall("write", json.dumps({"content": content}, ensure_ascii=False), "abcdefghi")]
    )
    begins, ends = call.index("def f"), call.rindex("”")
    parser, reported, silent, longest = Parser(family, [Tool("write")]), "", 0, 0
    for i in range(0, len(call), 4):
        new = "".join(e.json for e in parser.feed(call[i : i + 4]) if isinstance(e, ArgumentsDelta))
        reported += new
        silent = 0 if new or not begins < i < ends else silent + 1
        longest = max(longest, silent)
    assert json.loads(reported) == {"content": content}
    assert longest <= 3


@pytest.mark.parametrize("family", [f for f in families.table() if f.reasoning], ids=lambda f: f.name)
def test_prose_is_held_back_only_for_a_marker(family: Family) -> None:
    parser = Parser(family, prompt_tail=" ")
    assert [e.raw for e in parser.feed("a word")] == ["a word"]
    assert [e.raw for e in parser.feed(" and x > y")] == [" and x > y"]


def test_a_special_token_matches_only_as_that_token() -> None:
    family = families.get("kimi_k2")
    special = {
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "<|im_end|>",
    }
    call = [
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "functions.f:0",
        "<|tool_call_argument_begin|>",
        '{"s": "<|tool_call_end|>"}',
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ]
    parser = Parser(family, special_tokens=special)
    prose = "".join(call)
    events = parser.feed(prose)
    assert [type(e) for e in events] == [TextDelta]
    assert events[0].raw == prose
    for piece in call:
        events += parser.feed(piece, piece in special)
    events += parser.close()
    assert "".join(e.raw for e in events) == prose * 2
    assert [e.name for e in events if isinstance(e, ToolCallStart)] == ["f"]
    assert "".join(e.json for e in events if isinstance(e, ArgumentsDelta)) == '{"s": "<|tool_call_end|>"}'


def test_an_ordinary_added_token_matches_however_it_is_spelled() -> None:
    family = families.get("qwen3")
    parser = Parser(family, special_tokens={"<|im_start|>", "<|im_end|>"})
    events = [e for p in ("<th", "ink>", "plan", "</think>", "Hi") for e in parser.feed(p)] + parser.close()
    assert [e.text for e in events if isinstance(e, ReasoningDelta)] == ["plan"]
    assert [e.text for e in events if isinstance(e, TextDelta)] == ["Hi"]


def test_ids_are_minted_where_the_format_has_none() -> None:
    parser = Parser(families.get("hermes"), mint_id=lambda index, name: f"{name}#{index}")
    events = parser.feed('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>' * 2)
    assert [e.id for e in events if isinstance(e, ToolCallStart)] == ["f#0", "f#1"]  # C13


def test_what_breaks_after_its_start_is_given_back_whole() -> None:
    text = 'Hi\n<tool_call>\n{"name": "f", "arguments": {"a": oops}}\n</tool_call> bye'
    events = read(families.get("hermes"), list(text))
    assert sum(isinstance(e, ToolCallBroken) for e in events) == 1
    assert not any(isinstance(e, ToolCallEnd) for e in events)
    assert turn(families.get("hermes"), list(text)).parts == (Text(text),)


def test_pairs_are_read_in_one_pass() -> None:
    family = families.pair(reasoning="nemotron_deci", tools="qwen3_coder")
    text = "<think>\nplan\n</think>\n\n<tool_call>\n<function=f>\n"
    text += "<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    parts = turn(family, list(text)).parts
    assert parts == (Reasoning("plan"), ToolCall("f", '{"a": "x"}', "call_0"))
    assert family.kind == "both"


def test_a_request_without_tools_makes_no_calls() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert turn(families.get("hermes").without_calls(), [text]).parts == (Text(text),)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("", False),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("talk of <think> here<|im_end|>\n<|im_start|>assistant\n", False),
        ("</think> done<|im_end|>\n<|im_start|>assistant\n<think>\nso far", True),
    ],
)
def test_the_prompt_says_where_the_turn_begins(tail: str, expected: bool) -> None:  # C21
    special = {"<|im_start|>", "<|im_end|>"}
    assert opens_in_reasoning(families.get("qwen3"), tail, special) is expected


@pytest.mark.parametrize(
    "length", [*range(60), 90, 105, 110, 118, 119, 120, 127, 128, 129, 900, 1016, 1024, 9000, 40_000]
)
def test_the_last_boundary_counts_however_far_it_is(length: int) -> None:
    special, filler = {"<|im_start|>", "<|im_end|>", "<|a_long_special_token|>"}, "x" * length
    for boundary in ("<|im_start|>", "<|a_long_special_token|>"):
        before = f"<think>{boundary}{filler}"
        assert not opens_in_reasoning(families.get("qwen3"), before, special)
        assert opens_in_reasoning(families.get("qwen3"), f"{before}<think>", special)
        assert opens_in_reasoning(families.get("qwen3"), f"{boundary}<think>{filler}", special)


@pytest.mark.parametrize("length", [0, 10, 30, 100, 1000])
def test_a_boundary_with_another_in_it_ends_with_its_own_end(length: int) -> None:
    special = {"<|end|>", "<|long<|end|><think>|>"}
    tail = f"{'x' * length}<|long<|end|><think>|>"
    assert not opens_in_reasoning(families.get("qwen3"), tail, special)
    assert opens_in_reasoning(families.get("qwen3"), f"{tail}<think>", special)


@pytest.mark.parametrize("family", families.table(), ids=lambda f: f.name)
def test_equal_families_share_their_tables(family: Family) -> None:
    special = frozenset({"<|end|>"})
    assert compile_family(replace(family), special) is compile_family(family, special)
    if family.forms:
        assert compile_family(family.without_calls(), special) is not compile_family(family, special)


def test_thinking_switched_off_makes_nothing_reasoning() -> None:  # C20
    tail = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert turn(families.get("qwen3"), ["Well. Yes."], tail=tail).parts == (Text("Well. Yes."),)


@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda f: f.name)
def test_long_arguments_hold_nothing_back(family: Family) -> None:  # C41
    """What is held is bounded by the longest marker, so the cost of a piece does not grow with what came before."""
    call = render_turn(family, [ToolCall("f", json.dumps({"s": "x<" * 20_000}), "abcdefghi")])
    parser = Parser(family)
    held = 0
    for i in range(0, len(call), 7):
        parser.feed(call[i : i + 7])
        held = max(held, len(parser._held))
    assert held < 256


@pytest.mark.parametrize(
    "form",
    [
        {"call": "<c>{name}</c>"},
        {"call": "<c>{name}{args}{params}</c>"},
        {"call": "<c>{args}</c>"},
        {"call": "{name}{args}"},
        {"call": "<c>{name}{params}</c>"},
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(form: dict[str, Any]) -> None:
    with pytest.raises(BadFamily):
        Family("x", forms=(Form(**form),))


def test_half_a_reasoning_pair_is_refused() -> None:
    with pytest.raises(BadFamily, match="opener and a closer"):
        Family("x", reasoning=("<think>", ""))
    with pytest.raises(BadFamily, match="also_ends_reasoning"):
        Family("x", also_ends_reasoning=("<a>",))
