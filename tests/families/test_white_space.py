"""White space beside a name, an id, a key or a marker: models sometimes write it, and it has no meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from parsing.reading import cuts, turn
from singletree import families
from singletree.conversation import Tool, ToolCall
from singletree.events import fold
from singletree.parsing.family import Family, markers
from singletree.parsing.parser import Parser
from singletree.parsing.render_turn import render_turn

TOOLS = (Tool("f", parameters={"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}),)
CALL = ToolCall("f", '{"s": "x", "n": 7}', "abcdefghi")
VALUE_OPENERS = ("value>", "value:opensource>", "<|sep|>", '<|"|>', "<escape>")
"""After these, white space belongs to the value."""
SPACES = (" ", "\n", "\r\n  ", "\t")


def forms() -> list[object]:
    return list(each_form())


def each_form() -> Iterator[object]:
    for family in families.table():
        for i, form in enumerate(family.forms):
            yield pytest.param(replace(family, forms=(form,)), id=f"{family.name}-{i}")


def spaced(family: Family, blank: str) -> Family:
    """Return the family with white space beside every slot that is between markers."""
    form = family.forms[0]
    if form.is_json:
        return family
    call, parameter = form.call, form.parameter
    for slot in ("{name}", "{id}"):
        # Without an opener of its own a call starts at its name.
        first = "" if form.call.startswith(slot) and not form.calls[0] else blank
        call = call.replace(slot, f"{first}{slot}{blank}")
    parameter = parameter.replace("{key}", f"{blank}{{key}}{blank}") if not form.nested else parameter
    return replace(family, forms=(replace(form, call=call, parameter=parameter),))


def named(family: Family) -> ToolCall:
    """Return the call, with the name in its id if the format requires it."""
    return replace(CALL, id="functions.f:0") if family.forms[0].id else CALL


def shown(family: Family, text: str) -> list[object]:
    parts = turn(family, [text], TOOLS, family.message_header or " ").parts
    return [(p.name, json.loads(p.arguments), p.complete) if isinstance(p, ToolCall) else p for p in parts]


@pytest.mark.parametrize("family", forms())
def test_beside_names_ids_and_keys(family: Family) -> None:
    family = replace(family, reasoning=None, also_reasoning=(), also_ends_reasoning=())
    for blank in SPACES:
        text = render_turn(spaced(family, blank), [named(family)])
        assert shown(family, text) == [("f", {"s": "x", "n": 7}, True)], text


@pytest.mark.parametrize("blank", SPACES, ids=repr)
def test_kimi_everywhere_and_its_id_stays(blank: str) -> None:
    family = families.get("kimi_k2")
    pieces = (
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>",
        '{"s": "x"}', "<|tool_call_end|>", "<|tool_calls_section_end|>",
    )  # fmt: skip
    call = ToolCall("f", '{"s": "x"}', "functions.f:0")
    for cut in cuts(blank.join(pieces)):
        assert turn(family, cut, TOOLS, " ").parts == (call,)
    for special in ((), pieces[:2], (pieces[1], pieces[3])):
        parser = Parser(family, TOOLS, " ", special_tokens=set(special))
        events = [e for p in pieces for e in (*parser.feed(p, p in special), *parser.feed(blank))]
        assert fold([*events, *parser.close()]).tool_calls == (call,)


@pytest.mark.parametrize("family", forms())
def test_between_markers_that_are_special_tokens(family: Family) -> None:
    """White space may also be between two special tokens, although they are not text."""
    tokens = sorted(
        {m for m in markers(family) if m.startswith("<") and m.endswith(">") and m.count("<") == 1}
    )
    text = render_turn(family, [named(family)])
    parser, at, events = Parser(family, TOOLS, family.message_header or " ", special_tokens=tokens), 0, []
    while at < len(text):
        token = next((t for t in tokens if text.startswith(t, at)), "")
        after = text[at + len(token) :]
        events += parser.feed(token or text[at], bool(token))
        beside = any(after.startswith(t) for t in tokens) or after[:1].isalnum()
        if token and beside and not family.message_header and not token.endswith(VALUE_OPENERS):
            events += parser.feed("\n")
        at += len(token) or 1
    assert [
        (c.name, json.loads(c.arguments), c.complete) for c in fold([*events, *parser.close()]).tool_calls
    ] == [("f", {"s": "x", "n": 7}, True)]


def test_a_name_holds_no_white_space() -> None:
    text = "<|tool_call_begin|>functions.f now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert not turn(families.get("kimi_k2"), [text], TOOLS, " ").tool_calls
