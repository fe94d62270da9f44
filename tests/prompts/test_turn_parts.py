"""Which turns are an ordered part of another one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompts.conversations import turn
from singletree.conversation import Part, Reasoning, Text, ToolCall, Turn
from singletree.prompts.replay.turn_comparison import (
    ProseSpan,
    consists_of,
    is_part_of,
    pair_calls,
    without_echoes,
)

WORDS = st.text("ab \n<", min_size=1, max_size=6).filter(str.strip)


@st.composite
def generated_turns(draw: st.DrawFn) -> Turn:
    """Turns of some prose and at least one call."""
    prose: st.SearchStrategy[Part] = WORDS.flatmap(
        lambda text: st.sampled_from([Text(text), Reasoning(text)])
    )
    # The model's texts have something between them; two that have not are one that was continued.
    parts = [
        part
        for before, part in pairwise([None, *draw(st.lists(prose, max_size=6))])
        if part and not (isinstance(before, Text) and isinstance(part, Text))
    ]
    for number in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(parts)))
        parts.insert(at, ToolCall("f", f'{{"n": {number}}}', f"call_{number}"))
    return Turn("assistant", tuple(parts))


@settings(max_examples=300, deadline=None)
@given(generated_turns(), st.data())
def test_any_ordered_part_with_a_call_is_one(generated: Turn, data: st.DataObject) -> None:
    kept = [part for part in generated.parts if data.draw(st.booleans())]
    as_words = data.draw(st.booleans())
    parts = [
        Text(f"<think>\n{p.text} \n</think>") if isinstance(p, Reasoning) and as_words else p for p in kept
    ]
    returned = Turn("assistant", tuple(parts))
    assert is_part_of(returned, generated) is bool(returned.tool_calls)


@settings(max_examples=200, deadline=None)
@given(generated_turns(), WORDS, st.data())
def test_words_that_were_not_written_are_none(generated: Turn, word: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(generated.parts)))
    for added in (Text(f"c{word}"), Reasoning(f"{word}c"), ToolCall("f", "{}", "call_9")):
        parts = (*generated.parts[:at], added, *generated.parts[at:])
        assert not is_part_of(Turn("assistant", parts), generated)


THOUGHT, LATER = Reasoning("Why. "), Reasoning("And so.")
CALL, OTHER = ToolCall("f", "{}", "a"), ToolCall("g", "{}", "b")
MODEL_OUTPUT = turn("assistant", THOUGHT, "One.", CALL, LATER, "Two.", OTHER)


@pytest.mark.parametrize(
    ("parts", "thoughts", "same"),
    [
        ((CALL,), True, True),
        ((CALL,), False, True),
        ((THOUGHT, CALL), True, True),
        ((THOUGHT, CALL), False, False),
        ((THOUGHT, LATER, OTHER), False, True),
        ((Text("Why.One."), OTHER), True, True),
        ((Text("Why.One."), OTHER), False, False),
        ((Text("Why.\nAnd so.\nOne.\nTwo."), OTHER), True, True),
        ((Text("Two. One."), CALL), True, False),
        ((LATER, THOUGHT, CALL), True, False),
        ((Text("One. Two."),), True, False),
        ((), True, False),
        ((replace(CALL, id="c"),), True, True),
        ((replace(OTHER, id="c"),), True, True),
        ((replace(CALL, id="c", arguments='{"n": 1}'),), True, False),
        ((replace(CALL, id="c"), replace(OTHER, id="d")), True, True),
        ((replace(CALL, id="c"), OTHER), True, False),
        ((CALL, replace(CALL, id="a")), True, False),
        ((replace(CALL, name="g"),), True, False),
    ],
)
def test_what_is_part_of_a_turn(parts: tuple[Part, ...], thoughts: bool, same: bool) -> None:
    assert is_part_of(Turn("assistant", parts), MODEL_OUTPUT, allow_missing_reasoning=thoughts) is same


@pytest.mark.parametrize(
    ("calls", "places"),
    [
        ((CALL, OTHER), [0, 1]),
        ((OTHER, CALL), [1, 2]),
        ((OTHER,), [1]),
        ((), []),
        ((CALL,), None),
        ((CALL, CALL), [0, 2]),
        ((OTHER, OTHER), None),
        ((CALL, CALL, CALL), [0, 1, 2]),
    ],
)
def test_calls_with_other_ids_are_paired_where_there_is_one_way(
    calls: tuple[ToolCall, ...], places: list[int] | None
) -> None:
    """Calls with the same content are told apart by their order; as many as were generated are paired by position."""
    ours = [replace(call, id=f"mine{number}") for number, call in enumerate((CALL, OTHER, CALL))]
    theirs = [replace(call, id=f"{number}") for number, call in enumerate(calls)]
    pairs = pair_calls(Turn("assistant", tuple(theirs)), Turn("assistant", tuple(ours)), in_part=True)
    expected = None if places is None else [(ours[at], call) for at, call in zip(places, theirs, strict=True)]
    assert pairs == expected


@pytest.mark.parametrize(
    ("parts", "same"),
    [
        (("One. Two.",), True),
        (("Why. One. Two.",), True),
        (("<think>Why.</think>\n\nOne. Two.",), True),
        (("[T]Why.[/T] One. Two.",), True),
        ((THOUGHT, "One.\nTwo."), True),
        (("One.",), False),
        (("Why.",), False),
        ((THOUGHT,), False),
        ((), False),
    ],
)
def test_an_answer_without_calls_brings_all_its_words(parts: tuple[Part | str, ...], same: bool) -> None:
    generated = turn("assistant", THOUGHT, "One.", "Two.")
    assert is_part_of(turn("assistant", *parts), generated, tags=("[T]", "[/T]")) is same


def test_a_text_is_read_in_every_way() -> None:
    spans = [ProseSpan("a", True), ProseSpan("ab", True), ProseSpan("abc", False), ProseSpan("b", True)]
    assert consists_of("a abc", spans)
    assert consists_of("ababcb", spans)
    assert consists_of("abc", spans)
    assert not consists_of("ab", spans)
    assert not consists_of("abcc", spans)
    many = [ProseSpan("a", True)] * 2000
    assert consists_of("a" * 1000, many)
    assert not consists_of("a" * 1000 + "b", many)


def test_tags_of_the_text_itself_are_words() -> None:
    assert consists_of("Write <think> here", [ProseSpan("Write <think> here", False)])
    assert consists_of(
        "<think>Why</think>Write <think> here",
        [ProseSpan("Why", True), ProseSpan("Write <think> here", False)],
    )


@pytest.mark.parametrize(
    ("parts", "left"),
    [
        ((THOUGHT, Text("\nWhy."), CALL), (THOUGHT, CALL)),
        ((THOUGHT, Text("Why."), Text("One.")), (THOUGHT, Text("One."))),
        ((THOUGHT, Text("Why."), LATER, Text("And so."), CALL), (THOUGHT, LATER, CALL)),
        ((THOUGHT, Text("Why.")), None),
        ((THOUGHT, Text("Why. So."), CALL), None),
        ((Text("Why."), THOUGHT, CALL), None),
        ((THOUGHT, CALL, Text("Why.")), None),
        ((Reasoning(""), Text(""), CALL), None),
    ],
)
def test_echoes_of_thoughts(parts: tuple[Part, ...], left: tuple[Part, ...] | None) -> None:
    given = Turn("assistant", parts)
    assert without_echoes(given).parts == (parts if left is None else left)
