"""The house rules on how a turn is parsed, each over every family to which it applies (docs/house-rules.md)."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from family_cases import broken_behind
from parsing.reading import cuts, read, turn
from singletree import families
from singletree.conversation import Part, Reasoning, Text, Tool, ToolCall
from singletree.events import ToolCallEnd, fold
from singletree.parsing.emitter import opens_in_reasoning
from singletree.parsing.family import SLOT, Family, markers
from singletree.parsing.render_turn import render_turn

THINK = [f for f in families.table() if f.reasoning]
CALL = [f for f in families.table() if f.forms]
BOTH = [f for f in CALL if f.reasoning]
MARKED = [f for f in BOTH if not f.forms[0].unmarked]
TOOLS = (Tool("f", parameters={"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}), Tool("g"))
TAG = re.compile(r"<[^<>\n]*>|\[/?[A-Z_]+\]")
F = ToolCall("f", '{"s": "x"}', "abcdefghi")
G = ToolCall("g", "{}", "123456789")


def shown(parts: tuple[Part, ...]) -> list[object]:
    return [(p.name, p.arguments, p.complete) if isinstance(p, ToolCall) else p for p in parts]


def closed(family: Family) -> str:
    return family.message_header or " "


def opener(family: Family) -> str:
    assert family.reasoning
    return family.reasoning[0]


@pytest.mark.parametrize("family", THINK, ids=lambda f: f.name)
def test_h1_the_prompts_tail_says_how_a_turn_begins(family: Family) -> None:  # C21
    assert family.reasoning
    begun, ended = family.reasoning
    boundary = "<some_turn_boundary>"
    assert turn(family, ["plan"], (), boundary + family.message_header + begun).parts == (Reasoning("plan"),)
    done = boundary + family.message_header + begun + "plan" + ended
    assert turn(family, ["Hi"], (), done).parts == (Text("Hi"),)


@pytest.mark.parametrize("family", THINK, ids=lambda f: f.name)
def test_h1_only_the_turn_itself_counts(family: Family) -> None:  # C21
    assert family.reasoning
    begun, ended = family.reasoning
    boundary = "<|boundary|>"
    assert not opens_in_reasoning(
        family, begun + "in an example" + boundary + family.message_header, {boundary}
    )
    assert opens_in_reasoning(
        family, "so" + ended + "it was" + boundary + family.message_header + begun, {boundary}
    )
    assert opens_in_reasoning(family, "") is family.starts_open


@pytest.mark.parametrize("family", BOTH, ids=lambda f: f.name)
def test_h2_one_ordered_pass(family: Family) -> None:  # C14 C20
    parts: list[Part] = [Reasoning("one"), F, Reasoning("two"), Text("Hm"), G]
    back = turn(family, [render_turn(family, parts)], TOOLS, closed(family)).parts
    assert shown(back) == shown(tuple(parts))


@pytest.mark.parametrize("family", THINK, ids=lambda f: f.name)
def test_h2_a_fence_in_reasoning_or_around_a_call_quotes_nothing_behind_it(family: Family) -> None:
    # Where text has a closer, it is quoted, too, unless it is a token.
    fenced: list[Part] = [Text("```"), F, Text("```")] if family in MARKED and not family.text else []
    parts = [
        Reasoning("I need ``` here."),
        Text("So."),
        Reasoning("two"),
        *fenced,
        Reasoning("three"),
        Text("Hm"),
    ]
    text = render_turn(family, parts)
    for pieces in ([text], list(text)):
        back = [
            replace(p, text=p.text.strip()) if isinstance(p, Text) else p
            for p in turn(family, pieces, TOOLS, closed(family)).parts
        ]
        assert shown(tuple(back)) == shown(tuple(parts))


@pytest.mark.parametrize("family", MARKED, ids=lambda f: f.name)
def test_h3_a_call_breaks_out_of_open_reasoning(family: Family) -> None:  # C20
    text = (
        opener(family)
        + "plan"
        + family.message_header
        + render_turn(family, [F, Text("Well."), Reasoning("more"), G])
    )
    back = turn(family, [text], TOOLS, closed(family)).parts
    expected = [
        Reasoning("plan"),
        ("f", '{"s": "x"}', True),
        Text("Well."),
        Reasoning("more"),
        ("g", "{}", True),
    ]
    assert shown(back) == expected


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_h4_a_marker_inside_a_value_is_data(family: Family) -> None:  # C18
    prose = " and ".join(["<think> </think>", *(m for m in markers(family) if not ends_a_value(family, m))])
    call = ToolCall("f", json.dumps({"s": prose}, ensure_ascii=False), "abcdefghi")
    found = turn(family, list(render_turn(family, [call])), TOOLS, closed(family)).tool_calls
    assert [json.loads(c.arguments) for c in found] == [{"s": prose}]


def ends_a_value(family: Family, marker: str) -> bool:
    """Return whether a marker contains what ends a string in this family; JSON and Python escape theirs."""
    form = family.forms[0]
    patterns = [p for p in (form.parameter, *form.also_parameter) if p]
    ends = [SLOT.split(p.partition("{value}")[2])[0].strip() for p in patterns]
    ends += [form.literals.quote] if form.literals and form.literals.verbatim else []
    return any(end in marker for end in ends)


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_h5_a_call_is_complete_when_its_arguments_are(family: Family) -> None:
    rendered = render_turn(family, [F])
    for end in range(len(rendered), 0, -1):
        events = read(family, [rendered[:end]], TOOLS, closed(family))
        calls = fold(events).tool_calls
        if not any(isinstance(e, ToolCallEnd) for e in events):
            assert not any(c.complete for c in calls)
            break
        assert [(c.name, c.arguments) for c in calls] == [("f", '{"s": "x"}')]
    broken = (
        render_turn(family, [F])
        + (family.message_header or "\n")
        + render_turn(family, [F])[: -len(render_turn(family, [F])) // 2]
    )
    first = turn(family, [broken], TOOLS, closed(family)).tool_calls[0]
    assert (first.name, first.arguments, first.complete) == ("f", '{"s": "x"}', True)


@pytest.mark.parametrize(
    "name",
    ["deepseek_v3", "deepseek_v3_1", "functionary_v3_1", "gpt_oss", "kimi_k2", "plamo3", "solar_open"],
)
def test_h5_a_call_may_have_nothing_between_the_markers_of_its_arguments(name: str) -> None:
    family = families.get(name)
    text = render_turn(family, [G, F]).replace("{}", "", 1)
    for pieces in cuts(text):
        assert shown(turn(family, pieces, TOOLS, closed(family)).parts) == shown((G, F))
    for end in range(len(render_turn(family, [G]).partition("{}")[0])):
        assert not any(call.complete for call in turn(family, [text[:end]], TOOLS, closed(family)).tool_calls)


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_h5_complete_calls_before_a_broken_one_are_kept(family: Family) -> None:  # C17
    parts = turn(family, [broken_behind(family, F)], TOOLS, closed(family)).parts
    assert shown(parts[:1]) == [("f", '{"s": "x"}', True)]
    assert all(isinstance(p, Text) for p in parts[1:])
    assert "oops" in "".join(p.text for p in parts if isinstance(p, Text))


# The pair of a call of beam is that of every message, and the tags of minicpm5 are those of any XML.
PARAMETERS = [f for f in CALL if f.forms[0].parameter and f.name not in ("beam", "minicpm5")]


OSLO = ToolCall("f", '{"s": "Oslo"}', "abcdefghi")


def without_first_closer(family: Family, *calls: ToolCall) -> str:
    """Return the turn of ``calls`` as a model writes it that forgets the closing tag of the first value."""
    closer = SLOT.sub("s", family.forms[0].parameter.partition("{value}")[2]).strip()
    before, behind = render_turn(family, calls).split(closer, 1)
    return before + (behind.removeprefix("\n") if before.endswith("\n") else behind)


@pytest.mark.parametrize("family", PARAMETERS, ids=lambda f: f.name)
def test_h6_a_value_without_its_closing_tag_hides_no_other_call(family: Family) -> None:  # C18
    text = without_first_closer(family, OSLO, OSLO, G)
    for pieces in cuts(text):
        assert shown(turn(family, pieces, TOOLS, closed(family)).parts) == shown((OSLO, OSLO, G))
    for end in range(text.index("Oslo") + 4, len(text)):
        calls = turn(family, [text[:end]], TOOLS, closed(family)).tool_calls
        assert calls[0].arguments.startswith('{"s": "Oslo')
        assert all(call.arguments in ('{"s": "Oslo"}', "{}") for call in calls if call.complete)


@pytest.mark.parametrize("family", [f for f in PARAMETERS if f.forms[0].next_closes], ids=lambda f: f.name)
def test_h6_a_value_without_its_closing_tag_ends_at_the_next_parameter(family: Family) -> None:
    call = ToolCall("f", '{"s": "Oslo", "n": 3}', "abcdefghi")
    text = without_first_closer(family, call, G).replace("Oslo", "Oslo\n").replace("Oslo\n\n", "Oslo\n")
    for pieces in cuts(text):
        assert shown(turn(family, pieces, TOOLS, closed(family)).parts) == shown((call, G))


def test_h6_an_element_inside_a_value_without_its_closing_tag_ends() -> None:
    tag = "]<]minimax[>["
    text = f'{tag}<tool_call>\n{tag}<invoke name="h">{tag}<a>{tag}<a>1{tag}</invoke>\n{tag}</tool_call>Hi'
    tools = (Tool("h", parameters={"properties": {"a": {"type": "object"}}}),)
    for pieces in cuts(text):
        (call, text_behind) = turn(families.get("minimax_m3"), pieces, tools).parts
        assert shown((call,)) == [("h", json.dumps({"a": f"{tag}<a>1"}), True)]
        assert text_behind == Text("Hi")


@pytest.mark.parametrize("family", families.table(), ids=lambda f: f.name)
def test_h6_what_opens_nothing_sensible_hides_nothing(family: Family) -> None:  # C17
    for marker in markers(family):
        parts = turn(family, ["Say " + marker + " and go on {", "]", "}"], TOOLS, closed(family)).parts
        prose = "".join(p.text for p in parts if isinstance(p, Text | Reasoning))
        assert prose.startswith("Say ")
        assert "and go on {]}" in prose


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_h7_a_cut_call_never_ends(family: Family) -> None:  # C15
    rendered = render_turn(family, [ToolCall("f", '{"s": "some words"}', "abcdefghi")])
    cut = rendered[: rendered.index("words") + 2]
    events = read(family, [cut], TOOLS, closed(family))
    (call,) = fold(events).tool_calls
    assert not call.complete
    assert call.arguments.endswith("some wo")
    assert not any(isinstance(e, ToolCallEnd) for e in events)


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_h8_unknown_names_are_forwarded_where_a_marker_says_that_it_is_a_call(family: Family) -> None:
    rendered = render_turn(family, [F])
    found = turn(family, [rendered], (Tool("other"),), closed(family))
    assert bool(found.tool_calls) is not family.forms[0].unmarked
    if family.forms[0].unmarked:
        assert found.parts == (Text(rendered),)


@pytest.mark.parametrize("family", [f for f in THINK if not opener(f)[:1].isalnum()], ids=lambda f: f.name)
def test_h9_stray_markers_are_swallowed(family: Family) -> None:
    assert family.reasoning
    begun, ended = family.reasoning
    tail = closed(family)
    assert (
        "".join(p.text for p in turn(family, ["Hi" + ended.strip()], (), tail).parts if isinstance(p, Text))
        == "Hi"
    )
    twice = turn(family, [begun + "plan" + family.message_header + begun, "more" + ended], (), tail).parts
    assert "".join(p.text for p in twice if isinstance(p, Reasoning)).replace("\n", "") in (
        "planmore",
        "plan",
    )


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_h9_stray_closers_of_calls_are_swallowed(family: Family) -> None:
    for closer in (*(f.calls[1] for f in family.forms), *family.dropped_markers):
        if TAG.search(closer):
            (part,) = turn(family, ["Hi" + closer], TOOLS, closed(family)).parts
            assert isinstance(part, Text)
            assert part.text.rstrip("\n ]") == "Hi"  # a bracket alone is no marker


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_h10_a_string_keeps_its_white_space(family: Family) -> None:
    for text in ("\n  a\r\n\n", " ", "\n", "\t", " a ", "a\n"):
        call = ToolCall("f", json.dumps({"s": text}), "abcdefghi")
        (found,) = turn(family, [render_turn(family, [call])], TOOLS, closed(family)).tool_calls
        assert json.loads(found.arguments) == {"s": text}


@pytest.mark.parametrize("family", THINK, ids=lambda f: f.name)
def test_h10_oneone_line_break_around_reasoning_is_the_formats(family: Family) -> None:
    parts: list[Part] = [Reasoning("  plan\n\n more "), Text("Hi")]
    assert turn(family, [render_turn(family, parts)], (), closed(family)).parts == tuple(parts)
    assert turn(family, [" \n"], (), closed(family)).parts in ((), (Text(" \n"),))


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_h11_a_declared_string_is_never_decoded(family: Family) -> None:  # C22
    for text in ("42", "null", "true", '{"a": 1}', "[1]", ""):
        call = ToolCall("f", json.dumps({"s": text, "n": 3}), "abcdefghi")
        (found,) = turn(family, [render_turn(family, [call])], TOOLS, closed(family)).tool_calls
        assert json.loads(found.arguments) == {"s": text, "n": 3}


@pytest.mark.parametrize("family", CALL, ids=lambda f: f.name)
def test_h11_an_undeclared_parameter_is_a_string(family: Family) -> None:  # C22
    call = ToolCall("f", '{"unheard": "42"}', "abcdefghi")
    (found,) = turn(family, [render_turn(family, [call])], TOOLS, closed(family)).tool_calls
    assert found.arguments == '{"unheard": "42"}'


@pytest.mark.parametrize("family", [f for f in CALL if "{args}" in f.forms[0].call], ids=lambda f: f.name)
def test_h11_json_arguments_keep_the_models_own_bytes(family: Family) -> None:  # C3
    written = '{ "b":1,"a" : 2.50,\n"c":[ 9007199254740993,1.0 ], "d": "\\u00e9\\/é", "b": null }'
    (found,) = turn(
        family, list(render_turn(family, [ToolCall("f", written, "abcdefghi")])), TOOLS, closed(family)
    ).tool_calls
    assert found.arguments == written


@pytest.mark.parametrize("family", [f for f in CALL if f.forms[0].is_json], ids=lambda f: f.name)
def test_h11_a_name_in_json_is_the_string_that_is_written(family: Family) -> None:
    written = render_turn(family, [F, G])
    for pieces in cuts(written.replace('"f"', r'"\u0066"')):
        assert shown(turn(family, pieces, TOOLS, closed(family)).parts) == shown((F, G))
    for no_name in (r"\x66", r"\u006"):
        text = written.replace('"f"', f'"{no_name}"')
        for pieces in ([text], list(text)):
            found = turn(family, pieces, TOOLS, closed(family))
            assert [call.name for call in found.tool_calls] in ([], ["g"])
            assert no_name in "".join(part.text for part in found.parts if isinstance(part, Text))


def test_h12_what_others_leave_in_the_text_is_reasoning_here() -> None:
    found = turn(families.pair(reasoning="minimax-append-think"), ["plan</think>Hi"]).parts
    assert found == (Reasoning("plan"), Text("Hi"))
