"""Which turns are an ordered part of another one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompts.conversations import turn
from singletree.conversation import Part, Reasoning, Text, ToolCall, Turn
from singletree.prompts.replay.partial_turns import ProseSpan, consists_of, without_echoes
from singletree.prompts.replay.turn_comparison import is_part_of

WORDS = st.text("ab \n<", min_size=1, max_size=6).filter(str.strip)


@st.composite
def said_turns(draw: st.DrawFn) -> Turn:
    """Turns of some prose and at least one call."""
    prose: st.SearchStrategy[Part] = WORDS.flatmap(
        lambda text: st.sampled_from([Text(text), Reasoning(text)])
    )
    parts = draw(st.lists(prose, max_size=6))
    for number in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(parts)))
        parts.insert(at, ToolCall("f", f'{{"n": {number}}}', f"call_{number}"))
    return Turn("assistant", tuple(parts))


@settings(max_examples=300, deadline=None)
@given(said_turns(), st.data())
def test_any_ordered_part_with_a_call_is_one(said: Turn, data: st.DataObject) -> None:
    kept = [part for part in said.parts if data.draw(st.booleans())]
    said_as_words = data.draw(st.booleans())
    parts = [
        Text(f"<think>\n{p.text} \n</think>") if isinstance(p, Reasoning) and said_as_words else p
        for p in kept
    ]
    returned = Turn("assistant", tuple(parts))
    assert is_part_of(returned, said) is bool(returned.tool_calls)


@settings(max_examples=200, deadline=None)
@given(said_turns(), WORDS, st.data())
def test_words_that_were_not_said_are_none(said: Turn, word: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(said.parts)))
    for added in (Text(f"c{word}"), Reasoning(f"{word}c"), ToolCall("f", "{}", "call_9")):
        parts = (*said.parts[:at], added, *said.parts[at:])
        assert not is_part_of(Turn("assistant", parts), said)


THOUGHT, LATER = Reasoning("Why. "), Reasoning("And so.")
CALL, OTHER = ToolCall("f", "{}", "a"), ToolCall("g", "{}", "b")
SAID = turn("assistant", THOUGHT, "One.", CALL, LATER, "Two.", OTHER)


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
        ((replace(CALL, id="c"),), True, False),
        ((replace(CALL, id="c"), replace(OTHER, id="d")), True, True),
        ((replace(CALL, id="c"), OTHER), True, False),
        ((CALL, replace(CALL, id="a")), True, False),
        ((replace(CALL, name="g"),), True, False),
    ],
)
def test_what_is_part_of_a_turn(parts: tuple[Part, ...], thoughts: bool, same: bool) -> None:
    assert is_part_of(Turn("assistant", parts), SAID, allow_missing_reasoning=thoughts) is same


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
    said = turn("assistant", THOUGHT, "One.", "Two.")
    assert is_part_of(turn("assistant", *parts), said, tags=("[T]", "[/T]")) is same


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
