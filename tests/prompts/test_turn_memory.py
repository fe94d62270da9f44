"""Which turns a full memory lets go of."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from singletree.conversation import Text, ToolCall, Turn
from singletree.prompts.replay.turn_memory import CAPSULE_KEY, GeneratedTurn, GenerationPrompt, TurnMemory

TOKENS = 500


def generated_turn(conversation: str, number: int, tokens: int = TOKENS) -> GeneratedTurn:
    call = ToolCall("f", "{}", f"call_{conversation}{number:02}")
    return GeneratedTurn(Turn("assistant", (call,)), GenerationPrompt(), array("I", range(tokens)))


def size_of(turn: GeneratedTurn) -> int:
    memory = TurnMemory(2**20)
    memory.remember(turn)
    return memory.bytes


SIZE = size_of(generated_turn("a", 0))


def held(memory: TurnMemory, turns: Sequence[GeneratedTurn]) -> list[bool]:
    return [memory.find(turn.turn) is turn for turn in turns]


def go_on(memory: TurnMemory, turns: list[GeneratedTurn], name: str) -> None:
    """One request of a conversation: its remembered turns are used, and one more is generated."""
    behind = [turn for turn in turns if memory.find(turn.turn) is turn]
    memory.mark_used(behind)
    turns.append(generated_turn(name, len(turns)))
    memory.remember(turns[-1], behind=behind)


@pytest.mark.parametrize("room", [1, 10, 30, 100])
def test_a_conversation_that_is_longer_than_the_memory_keeps_its_head(room: int) -> None:
    """How much of it is kept follows the size of the memory; nothing of it is kept behind a gap."""
    memory, turns = TurnMemory(room * SIZE), list[GeneratedTurn]()
    for _ in range(60):
        go_on(memory, turns, "a")
        assert memory.bytes <= room * SIZE
    kept = min(room, 60)
    assert held(memory, turns) == [True] * kept + [False] * (60 - kept)
    assert memory.bytes == kept * SIZE


def test_the_conversation_used_least_recently_goes_whole_first() -> None:
    memory = TurnMemory(10 * SIZE)
    turns: dict[str, list[GeneratedTurn]] = {name: [] for name in "abc"}
    for name in "abc" * 3:
        go_on(memory, turns[name], name)
    memory.mark_used(turns["a"])  # somebody looks at a again: b is the oldest now
    for kept_of_b in (2, 1, 0):
        go_on(memory, turns["c"], "c")
        go_on(memory, turns["c"], "c") if kept_of_b == 2 else None
        assert held(memory, turns["b"]) == [True] * kept_of_b + [False] * (3 - kept_of_b)
        assert all(held(memory, turns["a"]) + held(memory, turns["c"]))


def test_a_fork_that_was_left_goes_before_what_it_has_in_common() -> None:
    memory = TurnMemory(7 * SIZE)
    trunk: list[GeneratedTurn] = []
    for _ in range(3):
        go_on(memory, trunk, "t")
    left, taken = [*trunk], [*trunk]
    for _ in range(3):
        go_on(memory, left, "l")
    for _ in range(4):
        go_on(memory, taken, "n")
    assert held(memory, taken) == [True] * 7
    assert held(memory, left[3:]) == [False] * 3


def test_a_turn_without_room_costs_no_other() -> None:
    memory = TurnMemory(2 * SIZE)
    small, large = generated_turn("a", 0), generated_turn("b", 0, 10 * TOKENS)
    memory.remember(small)
    memory.remember(large)
    assert held(memory, [small, large]) == [True, False]


def test_a_later_turn_takes_the_place_of_one_with_its_key() -> None:
    memory = TurnMemory(2**20)
    both = Turn("assistant", (ToolCall("f", "{}", "call_1"), ToolCall("f", "{}", "call_2")))
    first = GeneratedTurn(both, GenerationPrompt(), array("I", [1]))
    memory.remember(first)
    second = GeneratedTurn(
        Turn("assistant", (ToolCall("f", "{}", "call_1"),)), GenerationPrompt(), array("I", [2])
    )
    memory.remember(second)
    assert memory.still_remembered({0: first, 1: second}, [first.turn, second.turn]) == {1: second}
    third = GeneratedTurn(
        Turn("assistant", (ToolCall("f", "{}", "call_2"),)), GenerationPrompt(), array("I", [3])
    )
    memory.remember(third)
    assert memory.bytes == sum(size_of(each) for each in (second, third))


def test_opened_turns_are_kept_as_a_conversation() -> None:
    """What clients bring along is found in the order of the prompt; its head stays all the same."""
    memory = TurnMemory(4 * SIZE)
    turns = [generated_turn("a", number) for number in range(8)]
    for number, turn in enumerate(turns):
        turn.keys[:] = [f"{CAPSULE_KEY}{number}"]
    for _ in range(2):
        memory.mark_used(turns)
        known = [memory.get(f"{CAPSULE_KEY}{number}") for number in range(8)]
        assert known[:3] == turns[:3]
        assert known[5:] == [None] * 3
        assert memory.bytes <= 4 * SIZE


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 900)), max_size=40),
    room=st.integers(0, 20_000),
)
def test_the_memory_is_bounded_and_counts_exactly(steps: list[tuple[str, int]], room: int) -> None:
    memory = TurnMemory(room)
    turns: dict[str, list[GeneratedTurn]] = {name: [] for name in "abc"}
    for name, tokens in steps:
        behind = [turn for turn in turns[name] if memory.find(turn.turn) is turn]
        memory.mark_used(behind)
        turns[name].append(generated_turn(name, len(turns[name]), tokens))
        memory.remember(turns[name][-1], behind=behind)
        assert memory.bytes <= room
        kept = [turn for each in turns.values() for turn in each if memory.find(turn.turn) is turn]
        assert memory.bytes == sum(map(size_of, kept))


def test_text_turns_are_counted_too() -> None:
    memory = TurnMemory(2**20)
    memory.remember(
        GeneratedTurn(
            Turn("assistant", (Text("word " * 100),)), GenerationPrompt(), array("I", range(100)), "place"
        )
    )
    assert memory.bytes > 2400
