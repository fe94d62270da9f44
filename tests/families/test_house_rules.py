"""The house rules on how a turn is read, each over every family that it can be said of (see docs/agreement.md)."""

from __future__ import annotations

import json

import pytest

from parsing.reading import read, turn
from singletree import families
from singletree.conversation import Part, Reasoning, Text, Tool, ToolCall
from singletree.events import ToolCallEnd, fold
from singletree.parsing.draw import draw
from singletree.parsing.family import Family, markers

THINK = [f for f in families.table() if f.reasoning]
CALL = [f for f in families.table() if f.forms]
BOTH = [f for f in CALL if f.reasoning]
MARKED = [f for f in BOTH if not f.forms[0].bare]
TOOLS = (Tool("f", parameters={"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}), Tool("g"))
F = ToolCall("f", '{"s": "x"}', "abcdefghi")
G = ToolCall("g", "{}", "123456789")


def shown(parts: tuple[Part, ...]) -> list[object]:
    return [(p.name, p.arguments, p.complete) if isinstance(p, ToolCall) else p for p in parts]


def closed(family: Family) -> str:
    return family.turn or " "


def opener(family: Family) -> str:
    assert family.reasoning
    return family.reasoning[0]


@pytest.mark.parametrize("family", THINK, ids=lambda f: f.name)
def test_h1_the_prompts_tail_says_how_a_turn_begins(family: Family) -> None:  # C21
    assert family.reasoning
    begun, ended = family.reasoning
    boundary = "<some_turn_boundary>"
    assert turn(family, ["plan"], (), boundary + family.turn + begun).parts == (Reasoning("plan"),)
    done = boundary + family.turn + begun + "plan" + ended
    assert turn(family, ["Hi"], (), done).parts == (Text("Hi"),)


@pytest.mark.parametrize("family", BOTH, ids=lambda f: f.name)
def test_h2_one_ordered_pass(family: Family) -> None:  # C14 C20
    parts: list[Part] = [Reasoning("one"), F, Reasoning("two"), Text("Hm"), G]
    back = turn(family, [draw(family, parts)], TOOLS, closed(family)).parts
    assert shown(back) == shown(tuple(parts))


@pytest.mark.parametrize("family", MARKED, ids=lambda f: f.name)
def test_h3_a_call_breaks_out_of_open_reasoning(family: Family) -> None:  # C20
    text = opener(family) + "plan" + family.turn + draw(family, [F])
    back = turn(family, [text], TOOLS, closed(family)).parts
    assert shown(back) == [Reasoning("plan"), ("f", '{"s": "x"}', True)]


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_h4_a_marker_inside_a_value_is_data(family: Family) -> None:  # C18
    form = family.forms[0]
    own = f"{form.call}{form.parameter}{form.also_parameter}{form.calls}{form.literals.quote if form.literals else ''}"
    foreign = [m.strip() for m in markers(family) if m.strip() and m.strip() not in own]
    said = " ".join(["<think> </think>", *foreign])
    call = ToolCall("f", json.dumps({"s": said}, ensure_ascii=False), "abcdefghi")
    found = turn(family, list(draw(family, [call])), TOOLS, closed(family)).tool_calls
    assert [json.loads(c.arguments) for c in found] == [{"s": said}]


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_h5_a_call_is_complete_when_its_arguments_are(family: Family) -> None:
    drawn = draw(family, [F])
    for end in range(len(drawn), 0, -1):
        events = read(family, [drawn[:end]], TOOLS, closed(family))
        calls = fold(events).tool_calls
        if not any(isinstance(e, ToolCallEnd) for e in events):
            assert not any(c.complete for c in calls)
            break
        assert [(c.name, c.arguments) for c in calls] == [("f", '{"s": "x"}')]
    broken = draw(family, [F]) + (family.turn or "\n") + draw(family, [F])[: -len(draw(family, [F])) // 2]
    first = turn(family, [broken], TOOLS, closed(family)).tool_calls[0]
    assert (first.name, first.arguments, first.complete) == ("f", '{"s": "x"}', True)


@pytest.mark.parametrize("family", families.table(), ids=lambda f: f.name)
def test_h6_nothing_is_lost(family: Family) -> None:  # C17
    for marker in markers(family):
        read(family, ["Say " + marker + " and go on {", "]", "}"], TOOLS, closed(family))


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_h7_a_cut_call_never_ends(family: Family) -> None:  # C15
    drawn = draw(family, [ToolCall("f", '{"s": "some words"}', "abcdefghi")])
    cut = drawn[: drawn.index("words") + 2]
    events = read(family, [cut], TOOLS, closed(family))
    (call,) = fold(events).tool_calls
    assert not call.complete
    assert call.arguments.endswith("some wo")
    assert not any(isinstance(e, ToolCallEnd) for e in events)


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_h8_unknown_names_are_forwarded_where_a_marker_says_that_it_is_a_call(family: Family) -> None:
    drawn = draw(family, [F])
    found = turn(family, [drawn], (Tool("other"),), closed(family))
    assert bool(found.tool_calls) is not family.forms[0].bare
    if family.forms[0].bare:
        assert found.parts == (Text(drawn),)


@pytest.mark.parametrize("family", [f for f in THINK if not opener(f)[:1].isalnum()], ids=lambda f: f.name)
def test_h9_stray_markers_are_swallowed(family: Family) -> None:
    assert family.reasoning
    begun, ended = family.reasoning
    tail = closed(family)
    assert (
        "".join(p.text for p in turn(family, ["Hi" + ended.strip()], (), tail).parts if isinstance(p, Text))
        == "Hi"
    )
    twice = turn(family, [begun + "plan" + family.turn + begun, "more" + ended], (), tail).parts
    assert "".join(p.text for p in twice if isinstance(p, Reasoning)).replace("\n", "") in (
        "planmore",
        "plan",
    )


@pytest.mark.parametrize("family", THINK, ids=lambda f: f.name)
def test_h10_one_line_break_around_reasoning_is_the_formats(family: Family) -> None:
    parts: list[Part] = [Reasoning("  plan\n\n more "), Text("Hi")]
    assert turn(family, [draw(family, parts)], (), closed(family)).parts == tuple(parts)
    assert turn(family, [" \n"], (), closed(family)).parts in ((), (Text(" \n"),))


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_h11_a_declared_string_is_never_decoded(family: Family) -> None:  # C22
    for text in ("42", "null", "true", '{"a": 1}', "[1]", ""):
        call = ToolCall("f", json.dumps({"s": text, "n": 3}), "abcdefghi")
        (found,) = turn(family, [draw(family, [call])], TOOLS, closed(family)).tool_calls
        assert json.loads(found.arguments) == {"s": text, "n": 3}


def test_h12_what_others_leave_in_the_text_is_reasoning_here() -> None:
    found = turn(families.pair(reasoning="minimax-append-think"), ["plan</think>Hi"]).parts
    assert found == (Reasoning("plan"), Text("Hi"))
