"""Markers that are single special tokens match as those tokens only; the same characters as text are data (H4)."""

from __future__ import annotations

import re

import pytest

from singletree import families
from singletree.conversation import Part, Reasoning, Text, Tool, ToolCall
from singletree.events import Event, fold
from singletree.parsing.family import Family, markers
from singletree.parsing.parser import Parser
from singletree.parsing.render_turn import render_turn

TOKEN = re.compile(r"<\|[^<>|]+\|>|<｜[^<>｜]+｜>|\[[A-Z_/]+\]|<\|[a-z\"_]+>|<[a-z_]+\|>|</?think>")
TOOLS = (Tool("f", parameters={"properties": {"s": {"type": "string"}}}), Tool("g"))


def tokens(family: Family) -> frozenset[str]:
    return frozenset(t for m in markers(family) for t in TOKEN.findall(m))


WITH_TOKENS = [f for f in families.table() if tokens(f)]


def read_tokens(family: Family, pieces: list[tuple[str, bool]]) -> list[Event]:
    parser = Parser(family, TOOLS, family.message_header or " ", special_tokens=tokens(family))
    events = [e for text, special in pieces for e in parser.feed(text, special)] + parser.close()
    assert "".join(e.raw for e in events) == "".join(text for text, _ in pieces)
    return events


def split(family: Family, text: str) -> list[tuple[str, bool]]:
    cut = re.split("(" + "|".join(map(re.escape, sorted(tokens(family), key=len, reverse=True))) + ")", text)
    return [(piece, bool(i % 2)) for i, piece in enumerate(cut) if piece]


@pytest.mark.parametrize("family", WITH_TOKENS, ids=lambda f: f.name)
def test_a_turn_of_tokens_is_read_as_the_same_turn_of_text(family: Family) -> None:
    parts: list[Part] = [Reasoning("plan")] if family.reasoning else []
    parts.append(Text("Let me look."))
    if family.forms:
        parts += [ToolCall("f", '{"s": "x < y"}', "abcdefghi"), ToolCall("g", "{}", "abcdefgh2")]
    turn = fold(read_tokens(family, split(family, render_turn(family, parts))))
    assert [p.name if isinstance(p, ToolCall) else p for p in turn.parts] == [
        p.name if isinstance(p, ToolCall) else p for p in parts
    ]
    assert [(c.arguments, c.complete) for c in turn.tool_calls] == [
        (p.arguments, True) for p in parts if isinstance(p, ToolCall)
    ]


@pytest.mark.parametrize("family", WITH_TOKENS, ids=lambda f: f.name)
def test_the_text_of_a_special_token_is_prose(family: Family) -> None:  # C18
    prose = "Say " + " and ".join(sorted(tokens(family))) + " as you like."
    around = family.text or ("", "")
    pieces = [*split(family, around[0]), (prose, False), *split(family, around[1])]
    turn = fold(read_tokens(family, pieces))
    assert turn.parts == (Text(prose),)


@pytest.mark.parametrize("family", [f for f in WITH_TOKENS if f.forms], ids=lambda f: f.name)
def test_the_text_of_a_special_token_in_an_argument_is_data(family: Family) -> None:  # C18
    rendered = render_turn(family, [ToolCall("f", '{"s": "A B"}', "abcdefghi")])
    before, _, after = rendered.partition("A B")
    prose = " ".join(t for t in sorted(tokens(family)) if '"' not in t)
    turn = fold(read_tokens(family, [*split(family, before), (prose, False), *split(family, after)]))
    assert [c.arguments for c in turn.tool_calls] == ['{"s": "' + prose + '"}']


@pytest.mark.parametrize("family", [f for f in WITH_TOKENS if f.forms], ids=lambda f: f.name)
def test_no_name_has_a_special_token_in_it(family: Family) -> None:
    rendered = render_turn(family, [ToolCall("f_g", '{"s": "A"}', "abcdefghi")])
    for token in sorted(tokens(family)):
        pieces = [*split(family, rendered.replace("f_g", f"f{token}g"))]
        for call in fold(read_tokens(family, pieces)).tool_calls:
            call.name.encode()
            assert call.name != f"f{token}g"
