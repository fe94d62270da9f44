"""Work is linear in the length, counted and not timed; and arguments leave as they are decoded."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from parsing.reading import TOKEN
from singletree import families
from singletree.conversation import Reasoning, Text, Tool, ToolCall
from singletree.events import ArgumentsDelta, Event, ToolCallStart
from singletree.parsing.family import Family
from singletree.parsing.parser import Parser
from singletree.parsing.render_turn import render_turn

CALL = [f for f in families.table() if f.forms]
TAGS = [f for f in CALL if f.forms[0].parameter]
DECLARED = {"s": {"type": "string"}, "o": {"type": "object"}, "a": {"type": "array"}, "n": {"type": "number"}}
TOOL = Tool("f", parameters={"properties": DECLARED})
LINE = "def f(x):\n    return {\"a\": [x < 3, 'é']}  # “q” <b> </b>\n"
# One family for each way of writing arguments.
KINDS = ("hermes", "kimi_k2", "qwen3_coder", "glm47", "deepseek_v4", "minimax_m3", "pythonic", "gemma4")


class Work:
    """What a stream cost: function calls (C functions too), characters looked at, and the most that was held."""

    def __init__(self) -> None:
        self.length = self.calls = self.characters = self.held = 0


@contextmanager
def counted(work: Work) -> Iterator[None]:
    def count(frame: FrameType, event: str, argument: Any) -> None:
        work.calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


def spend(family: Family, text: str, *, profile: bool = True) -> Work:
    """What reading ``text`` in pieces of four characters costs."""
    work = Work()
    work.length = len(text)
    parser = Parser(family, [TOOL], family.message_header or " ")
    cut = [text[at : at + 4] for at in range(0, len(text), 4)]

    def feed() -> None:
        for piece in cut:
            work.characters += len(parser._held) + len(piece)
            parser.feed(piece)
            work.held = max(work.held, len(parser._held))
        parser.close()

    if profile:
        with counted(work):
            feed()
    else:
        feed()
    return work


def long_call(family: Family, arguments: dict[str, Any]) -> str:
    return render_turn(family, [ToolCall("f", json.dumps(arguments, ensure_ascii=False), "abcdefghi")])


def is_linear(few: Work, many: Work) -> bool:
    times = many.length / few.length * 1.05
    return (
        many.calls <= times * few.calls
        and many.characters <= times * few.characters
        and many.held <= few.held + 8
    )


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_four_times_the_arguments_cost_four_times_the_work(family: Family) -> None:  # C41
    few, many = (spend(family, long_call(family, {"s": LINE * n})) for n in (10, 40))
    assert is_linear(few, many)


@pytest.mark.parametrize("family", families.table(), ids=lambda f: f.name)
def test_four_times_the_prose_costs_four_times_the_work(family: Family) -> None:
    output: list[Callable[[str], Text | Reasoning]] = [Text, *([Reasoning] if family.reasoning else [])]
    for part in output:
        few, many = (
            spend(family, render_turn(family, [part("a < b `x` [y] {z}\n\n" * n)])) for n in (10, 40)
        )
        assert is_linear(few, many)


VALUES: dict[str, Callable[[int], dict[str, Any]]] = {
    "object": lambda n: {"o": {f"k{i}": LINE for i in range(100, 100 + n)}},
    "array": lambda n: {"a": [[100 + i % 800] for i in range(n * 8)]},
    "many parameters": lambda n: {f"p{i}": "x" for i in range(1000, 1000 + n * 4)},
    "a number": lambda n: {"n": 10 ** (n * 8)},
}


LITERALS = {f.name for f in CALL if f.forms[0].literals}


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n in KINDS for v in VALUES if v != "a number" or n not in LITERALS]
)
def test_values_of_any_type_cost_what_they_are_long(name: str, value: str) -> None:  # C41
    family = families.get(name)
    few, many = (spend(family, long_call(family, VALUES[value](n))) for n in (10, 40))
    assert is_linear(few, many)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4"])
def test_a_megabyte_costs_four_times_what_256_kilobytes_cost(name: str) -> None:  # C41
    family = families.get(name)
    quarter = LINE * (256 * 1024 // len(LINE))
    few, many = (spend(family, long_call(family, {"s": quarter * n}), profile=False) for n in (1, 4))
    assert is_linear(few, many)


def arguments_in(events: list[Event]) -> str:
    return "".join(e.json for e in events if isinstance(e, ArgumentsDelta))


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_arguments_leave_within_three_tokens(family: Family) -> None:  # C10
    """From the name on, no more than three tokens pass without a delta until the last of the string."""
    text = long_call(family, {"s": LINE * 20})
    parser = Parser(family, [TOOL], family.message_header or " ")
    begun, silent, longest, ends = False, 0, 0, text.rindex(LINE.strip()[-5:])
    at = 0
    for token in TOKEN.findall(text):
        events = parser.feed(token)
        silent = 0 if not begun or arguments_in(events) else silent + 1
        begun = begun or any(isinstance(e, ToolCallStart) for e in events)
        at += len(token)
        if at < ends:
            longest = max(longest, silent)
    assert begun
    assert longest <= allowance(family)


def allowance(family: Family) -> int:
    """Three tokens, and for tag families those of the tag between the name and the first value."""
    head = family.forms[0].parameter.partition("{value}")[0].replace("{key}", "s")
    return 3 + len(TOKEN.findall(head))


@pytest.mark.parametrize("family", TAGS, ids=lambda f: f.name)
def test_strings_of_tag_families_leave_character_by_character(family: Family) -> None:  # C10
    words = "abcdefghij klmnop"
    text = long_call(family, {"s": words})
    begins = text.index(words)
    parser = Parser(family, [TOOL], family.message_header or " ")
    pieces = arguments_in(parser.feed(text[:begins]))
    for i, character in enumerate(words):
        pieces += arguments_in(parser.feed(character))
        assert pieces == '{"s": "' + words[: i + 1]


@pytest.mark.parametrize("family", TAGS, ids=lambda f: f.name)
def test_other_types_of_tag_families_leave_with_their_parameter(family: Family) -> None:
    if family.forms[0].nested:
        arguments, value = '{"n": 12.50, "s": "x"}', "12.50"
    else:
        arguments, value = '{"o": {"k": [1.0, 2]}, "s": "x"}', '{"k": [1.0, 2]}'
    text = render_turn(family, [ToolCall("f", arguments, "abcdefghi")])
    ends = text.index(value) + len(value)
    parser = Parser(family, [TOOL], family.message_header or " ")
    before = arguments_in([e for c in text[:ends] for e in parser.feed(c)])
    assert value not in before
    after = family.forms[0].parameter.partition("{value}")[2]
    closer = text[ends : text.index(after.strip()[:3], ends) + len(after) + 8]
    assert value in before + arguments_in([e for c in closer for e in parser.feed(c)])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic"])
def test_a_parser_that_was_closed_is_freed_without_the_garbage_collector(name: str) -> None:
    family = families.get(name)
    call = render_turn(family, [ToolCall("f", '{"s": "x"}')])
    gc.collect()
    gc.disable()
    try:
        for text in ("Text.", call, f"{call} and text"):
            parser = Parser(family, [TOOL])
            parser.feed(text)
            parser.close()
            left = weakref.ref(parser)
            del parser
            assert left() is None
    finally:
        gc.enable()
