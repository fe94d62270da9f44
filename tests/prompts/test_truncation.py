"""Where a history may be cut: whole pieces of its middle, at places that stay when it grows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from singletree.conversation import Conversation, Reasoning, Text, ToolCall, ToolResult, Turn
from singletree.prompts.history.context_editing import Cut, first_fitting, possible_cuts

HEAD = (Turn("system", (Text("Be brief."),)), Turn("user", (Text("The task."),)))


def loop(count: int, size: int = 10) -> list[Turn]:
    """A tool loop of ``count`` calls, each with its thought and its result."""
    turns = []
    for n in range(count):
        thought, call = Reasoning("r" * size), ToolCall("f", "{}", f"c{n}")
        turns += [
            Turn("assistant", (thought, call)),
            Turn("tool", (ToolResult(f"c{n}", (Text("o" * size),)),)),
        ]
    return turns


def test_the_instructions_the_task_and_the_end_stay() -> None:
    found = possible_cuts([*HEAD, *loop(5)], step=1)
    assert found == [Cut(2, 4), Cut(2, 6), Cut(2, 8), Cut(2, 10)]
    assert found[-1].of(Conversation((*HEAD, *loop(5)))).turns == (*HEAD, *loop(5)[-2:])


def test_one_cut_is_a_step_larger_than_the_one_before() -> None:
    assert [cut.end for cut in possible_cuts([*HEAD, *loop(9)], step=60)] == [8, 14, 18]


def test_where_there_is_one_answer_or_none_nothing_can_be_left_out() -> None:
    assert possible_cuts(HEAD, step=1) == []
    assert possible_cuts([*HEAD, *loop(1)], step=1) == []


def test_of_questions_alone_the_first_and_the_last_stay() -> None:
    turns = [*HEAD, *(Turn("user", (Text(f"{n}"),)) for n in range(3))]
    assert possible_cuts(turns, step=1) == [Cut(2, 3), Cut(2, 4)]


def test_a_result_that_comes_late_keeps_its_call() -> None:
    call, result = loop(1)
    aside = Turn("user", (Text("By the way."),))
    turns = [*HEAD, call, aside, result, *loop(1)]
    assert possible_cuts(turns, step=1) == [Cut(2, 5)]


ROLES = st.sampled_from(["user", "system", "call", "result", "answer"])


@st.composite
def histories(draw: st.DrawFn) -> list[Turn]:
    turns: list[Turn] = []
    for kind in draw(st.lists(ROLES, max_size=14)):
        id = f"c{draw(st.integers(0, 4))}"
        turns.append(
            {
                "call": Turn("assistant", (ToolCall("f", "{}", id),)),
                "result": Turn("tool", (ToolResult(id, (Text("out"),)),)),
                "answer": Turn("assistant", (Text("well"),)),
            }.get(kind)
            or Turn("user" if kind == "user" else "system", (Text("said"),))
        )
    return turns


@given(histories(), st.integers(1, 20))
def test_calls_and_their_results_are_never_parted(turns: list[Turn], step: int) -> None:
    for cut in possible_cuts(turns, step):
        gone = range(cut.start, cut.end)
        assert cut.start < cut.end < len(turns)
        assert turns[cut.end].role != "tool"
        for i in gone:
            for call in turns[i].tool_calls:
                assert answer_to(call, turns, i) < cut.end


def answer_to(call: ToolCall, turns: list[Turn], at: int) -> int:
    """The turn with the next result of its id, ``at`` where there is none."""
    results = [(i, part) for i, turn in enumerate(turns[at:], at) for part in turn.parts]
    return next((i for i, p in results if isinstance(p, ToolResult) and p.call_id == call.id), at)


@given(histories(), histories(), st.integers(1, 20))
def test_a_history_that_grows_can_be_cut_where_it_could_before(
    turns: list[Turn], more: list[Turn], step: int
) -> None:
    """But for the last resort, and where something new answers a call from before."""
    new = [turn for turn in more if turn.role != "tool"]
    known = possible_cuts(turns, step)
    if any(turn.role == "assistant" for turn in turns):
        assert set(known[:-1]) <= set(possible_cuts([*turns, *new], step))


@given(st.lists(st.booleans(), min_size=1, max_size=40).map(sorted))
def test_the_first_that_fits_is_found_with_few_questions(fitting: list[bool]) -> None:
    all_cuts = [Cut(0, n) for n in range(len(fitting))]
    asked: list[Cut] = []

    def fits(cut: Cut) -> bool:
        asked.append(cut)
        return fitting[cut.end]

    found = first_fitting(all_cuts, fits)
    assert found == all_cuts[fitting.index(True) if True in fitting else -1]
    assert len(asked) <= 6
    assert first_fitting([], lambda cut: True) is None
