"""Context editing: what is cleared, that it stays cleared, and that nothing else changes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from singletree.conversation import (
    Conversation,
    Image,
    Part,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolReference,
    ToolResult,
    Turn,
)
from singletree.prompts.history.context_editing import PLACEHOLDER, apply_edits
from singletree.request_options import AppliedEdit, ClearThinking, ClearToolUses, ContextEdit

LONG = "x" * 100
FREED = len(LONG) - len(PLACEHOLDER)


def user(text: str = "go") -> Turn:
    return Turn("user", (Text(text),))


def use(
    at: int, name: str = "read", result: str = LONG, arguments: str = '{"path": "a"}'
) -> tuple[Turn, Turn]:
    """A call and its result."""
    call = ToolCall(name, arguments, f"call_{at}")
    return (
        Turn("assistant", (Reasoning(f"thought {at}"), call)),
        Turn("tool", (ToolResult(f"call_{at}", (Text(result),)),)),
    )


def uses(count: int, result: str = LONG) -> tuple[Turn, ...]:
    return (user(), *(turn for at in range(count) for turn in use(at, result=result)))


def cleared(conversation: Conversation) -> list[int]:
    """Which results hold the placeholder, by their place among all."""
    results = [p for turn in conversation.turns for p in turn.parts if isinstance(p, ToolResult)]
    return [i for i, result in enumerate(results) if result.parts == (Text(PLACEHOLDER),)]


def edited(turns: tuple[Turn, ...], *edits: ContextEdit) -> tuple[Conversation, tuple[AppliedEdit, ...]]:
    return apply_edits(Conversation(turns), edits, len)


def test_nothing_asked_for_is_nothing_changed() -> None:
    before = Conversation(uses(3))
    after, applied = apply_edits(before, (), len)
    assert (after is before, applied) == (True, ())
    after, applied = apply_edits(before, (ClearThinking(), ClearToolUses(trigger_tokens=10**6)), len)
    assert (after is before, applied) == (True, ())


def test_old_results_go_when_the_prompt_is_long() -> None:
    edit = ClearToolUses(trigger_tokens=450, keep=2)
    after, applied = edited(uses(4), edit)
    assert cleared(after) == [0, 1]
    assert applied == (AppliedEdit("tool_uses", 2, 2 * FREED),)
    assert edited(uses(3), edit)[1] == ()


def test_what_was_cleared_stays_cleared_and_more_goes_only_when_it_is_long_again() -> None:
    edit = ClearToolUses(trigger_tokens=6000, keep=1)
    steps = [cleared(edited(uses(count, "x" * 1000), edit)[0]) for count in range(1, 20)]
    for before, after in pairwise(steps):
        assert after[: len(before)] == before
    changes = sum(a != b for a, b in pairwise(steps))
    assert 3 <= changes <= 6, "not with every turn: each clearing costs the cache behind it"


@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from(["read", "edit"])), max_size=14),
    st.builds(
        ClearToolUses,
        trigger_tokens=st.none() | st.integers(0, 1500),
        trigger_uses=st.none() | st.integers(0, 6),
        keep=st.integers(0, 4),
        at_least=st.integers(0, 400),
        exclude_tools=st.sampled_from([frozenset(), frozenset(["edit"])]),
        inputs=st.booleans(),
    ),
)
def test_a_prompt_goes_on_from_the_one_before_unless_an_edit_newly_applies(
    results: list[tuple[int, str]], edit: ClearToolUses
) -> None:
    turns: tuple[Turn, ...] = (user(),)
    before, reported = edited(turns, edit)
    for at, (size, name) in enumerate(results):
        turns += use(at, name, "x" * size)
        after, now = edited(turns, edit)
        assert edited(turns, edit) == (after, now), "the same each time"
        assert set(cleared(before)) <= set(cleared(after))
        if [t.count for t in now] == [t.count for t in reported]:
            assert after.turns[: len(before.turns)] == before.turns
        last = list(range(at + 1))[-edit.keep :] if edit.keep else []
        assert not set(cleared(after)) & set(last), "the last uses stay"
        excluded = {i for i, (_, name) in enumerate(results[: at + 1]) if name in edit.exclude_tools}
        assert not set(cleared(after)) & excluded
        before, reported = after, now


def test_the_prompt_is_as_long_as_its_tools_too() -> None:
    edit = ClearToolUses(trigger_tokens=1000, keep=1)
    for deferred, expected in ((False, [0]), (True, [])):
        tool = Tool("read", "d" * 1000, {"type": "object"}, deferred=deferred)
        after, _ = apply_edits(Conversation(uses(2), (tool,)), (edit,), len)
        assert cleared(after) == expected, "a deferred tool is not in the head"


def test_by_the_number_of_uses() -> None:
    edit = ClearToolUses(trigger_uses=3, keep=1)
    assert cleared(edited(uses(3), edit)[0]) == []
    assert cleared(edited(uses(4), edit)[0]) == [0, 1, 2]
    assert cleared(edited(uses(6), edit)[0]) == [0, 1, 2]
    assert cleared(edited(uses(7), edit)[0]) == [0, 1, 2, 3, 4, 5]


def test_not_for_too_little() -> None:
    edit = ClearToolUses(trigger_tokens=0, keep=1, at_least=2 * FREED)
    assert cleared(edited(uses(2), edit)[0]) == []
    assert cleared(edited(uses(3), edit)[0]) == [0, 1]


def test_excluded_tools_stay() -> None:
    turns = (user(), *use(0, "memory"), *use(1), *use(2))
    edit = ClearToolUses(trigger_tokens=0, keep=0, exclude_tools=frozenset(["memory"]))
    assert cleared(edited(turns, edit)[0]) == [1, 2]


def test_inputs_go_when_asked_for() -> None:
    turns = (user(), *use(0, "write"), *use(1))

    def arguments(edit: ClearToolUses) -> list[str]:
        calls = (call for turn in edited(turns, edit)[0].turns for call in turn.tool_calls)
        return [call.arguments for call in calls]

    assert arguments(ClearToolUses(trigger_tokens=0, keep=0)) == ['{"path": "a"}'] * 2
    assert arguments(ClearToolUses(trigger_tokens=0, keep=0, inputs=True)) == ["{}"] * 2
    some = ClearToolUses(trigger_tokens=0, keep=0, inputs=frozenset(["write"]))
    assert arguments(some) == ["{}", '{"path": "a"}']


def test_a_call_that_has_no_answer_yet_stays() -> None:
    turns = (*uses(2), use(2)[0])
    edit = ClearToolUses(trigger_tokens=0, keep=0, inputs=True)
    after, applied = edited(turns, edit)
    assert (cleared(after), applied[0].count) == ([0, 1], 2)
    assert after.turns[-1].tool_calls[0].arguments == '{"path": "a"}'


def test_a_result_that_shows_a_tool_stays() -> None:
    found = (ToolResult("call_0", (ToolReference("WebFetch"),)),)
    turns = (user(), use(0)[0], Turn("tool", found), *use(1))
    after, _ = edited(turns, ClearToolUses(trigger_tokens=0, keep=0, inputs=True))
    assert after.turns[1:3] == turns[1:3]
    assert cleared(after) == [1]


def test_pictures_go_with_the_result() -> None:
    picture: tuple[Part, ...] = (ToolResult("call_0", (Image("image/png", "AAAA"),), is_error=True),)
    turns = (user(), use(0)[0], Turn("tool", picture), *use(1))
    after, _ = edited(turns, ClearToolUses(trigger_tokens=0, keep=1))
    assert after.turns[2].parts == (ToolResult("call_0", (Text(PLACEHOLDER),), is_error=True),)


def test_the_thinking_of_old_answers_goes_and_a_tool_loop_stays_whole() -> None:
    turns = (*uses(2), user("again"), *use(2), *use(3), user("and again"), *use(4))

    def thoughts(keep: int | None, turns: tuple[Turn, ...] = turns) -> list[str]:
        return [turn.reasoning for turn in edited(turns, ClearThinking(keep))[0].turns if turn.reasoning]

    assert thoughts(None) == [f"thought {n}" for n in range(5)]
    assert thoughts(1) == ["thought 4"]
    assert thoughts(2) == ["thought 2", "thought 3", "thought 4"]
    assert thoughts(9) == thoughts(None)
    # The next message of the user alone clears nothing: its answer has not begun to think.
    assert thoughts(1, (*turns, user("more"))) == ["thought 4"]
    _, applied = edited(turns, ClearThinking(1))
    assert applied == (AppliedEdit("thinking", 2, sum(map(len, ("thought 0",) * 4))),)


def test_an_edit_counts_what_the_one_before_it_left() -> None:
    turns = (user(), Turn("assistant", (Reasoning("y" * 1000), Text("a"))), *uses(2))
    edit = ClearToolUses(trigger_tokens=1000, keep=0)
    assert len(edited(turns, edit)[1]) == 1
    assert [e.kind for e in edited(turns, ClearThinking(1), edit)[1]] == ["thinking"]
