"""The file of a session gives back what was asked and generated, or shows that it does not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from singletree.cli.traces import count_traces, export_traces
from singletree.errors import BadConfiguration
from singletree.training.exports import FORMS, count_trained, history, reward_of
from singletree.training.graph import (
    SessionGraph,
    check_session,
    parse_session,
    read_session,
    trajectories,
)
from singletree.training.records import SCHEMA, SessionStart, encode_line
from singletree.training.session_files import SessionFile, turn_json

from .session_model import Action, RealSession, actions, play

REUSED_FOLDER = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ORDINARY: tuple[Action, ...] = ("continue", "continue", "fork", "retry", "edit", "compact", "cut", "continue")


def _agrees(graph: SessionGraph, real: RealSession) -> None:
    """All that the graph has is what was there."""
    for call in real.calls:
        if (found := graph.calls.get(call.id)) is None:
            continue
        assert found.prompt.tolist() == call.prompt
        if found.end is not None:
            assert found.completion.tolist() == call.completion
    known = {call.id: call for call in real.calls}
    trained: list[str] = []
    for each in trajectories(graph):
        tokens, mask = each.token_ids().tolist(), each.loss_mask()
        assert len(tokens) == len(mask) == len(each.logprobs())
        inside = [0] * len(mask)
        for span in each.spans:
            call = known[span.call.id]
            if span.masked:
                continue
            trained.append(call.id)
            assert call.finish == "stop"
            # The model saw exactly the tokens before, and generated exactly these.
            assert tokens[: span.end] == call.all[: span.end]
            assert span.start == len(call.prompt)
            inside[span.start : span.end] = [1] * (span.end - span.start)
            assert each.logprobs()[span.start : span.end] == [-t / 8 for t in tokens[span.start : span.end]]
        assert mask == inside
    assert len(trained) == len(set(trained)), "a completion is trained on twice"


@REUSED_FOLDER
@given(what=actions(), seed=st.integers(0, 1000), restarts=st.frozensets(st.integers(0, 11)))
def test_a_session_comes_back(
    tmp_path: Path, what: list[Action], seed: int, restarts: frozenset[int]
) -> None:
    real = play(tmp_path / "s.jsonl", what, seed, restarts)
    graph = read_session(tmp_path / "s.jsonl")
    assert check_session(graph) == []
    assert list(graph.calls) == [call.id for call in real.calls]
    _agrees(graph, real)
    crashed = any(call.finish is None for call in real.calls)
    assert graph.status == ("incomplete" if crashed else "complete")
    for form in FORMS.values():
        list(form(graph))


@REUSED_FOLDER
@given(what=actions(), seed=st.integers(0, 1000), restarts=st.frozensets(st.integers(0, 11)))
def test_the_texts_of_each_conversation_come_back(
    tmp_path: Path, what: list[Action], seed: int, restarts: frozenset[int]
) -> None:
    real = play(tmp_path / "s.jsonl", what, seed, restarts)
    graph = read_session(tmp_path / "s.jsonl")
    sent = {call.id: [turn_json(turn) for turn in call.turns] for call in real.calls}
    assert {call.id: history(call) for call in graph.calls.values()} == sent
    answers = {call.id: turn_json(call.answered[-1]) for call in real.calls}
    for document, each in zip(FORMS["atif"](graph), trajectories(graph), strict=True):
        if any(span.masked == "edited" for span in each.spans):
            continue  # A step has the turn of the model there, not what the client made of it.
        whole = sent[each.last.id] + ([answers[each.last.id]] if each.last.end is not None else [])
        steps = [step["message"] for step in document["steps"] if step["message"]]
        assert steps == [text for turn in whole if (text := turn["parts"][0]["text"])]


@REUSED_FOLDER
@given(what=actions(6), seed=st.integers(0, 1000))
def test_each_truncation_is_seen(tmp_path: Path, what: list[Action], seed: int) -> None:
    real = play(tmp_path / "s.jsonl", what, seed)
    data = (tmp_path / "s.jsonl").read_bytes()
    lines = [at for at, byte in enumerate(data) if byte == ord("\n")]
    inside = range(seed % 7, len(data), 7)  # the examples differ in their seeds
    for end in sorted({*inside, *lines, *(at + 1 for at in lines[:-1])}):
        graph = parse_session(data[:end])
        assert check_session(graph) == []
        assert graph.status != "complete"
        assert reward_of(graph) is None
        _agrees(graph, real)


@REUSED_FOLDER
@given(what=actions(6), seed=st.integers(0, 1000), data=st.data())
def test_a_truncated_file_goes_on_as_incomplete(
    tmp_path: Path, what: list[Action], seed: int, data: st.DataObject
) -> None:
    path = tmp_path / "s.jsonl"
    real = play(path, what, seed)
    content = path.read_bytes()
    end = data.draw(st.integers(1, len(content) - 1))
    path.write_bytes(content[:end])
    kept = parse_session(content[:end])
    known = [call for call in real.calls if call.id in kept.calls]
    again = RealSession(path, seed + 1, calls=list(known))
    again.act("continue")
    again.complete()
    graph = read_session(path)
    assert check_session(graph) == []
    _agrees(graph, again)
    if kept.lacks:
        assert graph.status == "incomplete"


@pytest.mark.parametrize("seed", range(8))
def test_each_changed_byte_is_seen(tmp_path: Path, seed: int) -> None:
    play(tmp_path / "s.jsonl", ORDINARY[:4], seed)
    data = (tmp_path / "s.jsonl").read_bytes()
    for at in range(seed, len(data) - 1, 8):
        changed = bytearray(data)
        changed[at] ^= 1 << (at % 7)
        graph = parse_session(bytes(changed))
        assert check_session(graph) or graph.status == "incomplete", at
        assert reward_of(graph) is None


def _lines(tmp_path: Path, what: Sequence[Action] = ORDINARY) -> list[bytes]:
    play(tmp_path / "s.jsonl", what)
    return (tmp_path / "s.jsonl").read_bytes().splitlines(keepends=True)


def test_each_missing_line_is_seen(tmp_path: Path) -> None:
    lines = _lines(tmp_path)
    for at in range(len(lines) - 1):
        assert check_session(parse_session(b"".join([*lines[:at], *lines[at + 1 :]]))), at


def test_each_doubled_line_is_seen(tmp_path: Path) -> None:
    lines = _lines(tmp_path)
    for at in range(len(lines) - 1):
        assert check_session(parse_session(b"".join([*lines[: at + 1], *lines[at:]]))), at


def test_each_swapped_pair_is_seen(tmp_path: Path) -> None:
    lines = _lines(tmp_path)
    for at in range(len(lines) - 1):
        swapped = [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]
        assert check_session(parse_session(b"".join(swapped))), at


def test_lines_of_another_session_are_seen(tmp_path: Path) -> None:
    lines = _lines(tmp_path)
    play(tmp_path / "other.jsonl", ORDINARY, 7)
    others = (tmp_path / "other.jsonl").read_bytes().splitlines(keepends=True)
    for at in range(1, len(lines)):
        assert check_session(parse_session(b"".join([*lines[:at], others[at], *lines[at + 1 :]]))), at


def _masks(tmp_path: Path, what: Sequence[Action], seed: int = 1) -> dict[str, str]:
    play(tmp_path / "s.jsonl", what, seed)
    graph = read_session(tmp_path / "s.jsonl")
    return {call.id: graph.masked(call) for call in graph.calls.values()}


def test_a_conversation_is_one_trajectory(tmp_path: Path) -> None:
    real = play(tmp_path / "s.jsonl", ["continue"] * 10)
    graph = read_session(tmp_path / "s.jsonl")
    (only,) = trajectories(graph)
    assert only.trained == sum(len(call.completion) for call in real.calls)
    assert only.token_ids().tolist() == real.calls[-1].all
    assert count_trained(graph)["share_in_one_trajectory"] == 1.0
    assert (reward_of(graph), only.is_terminal) == (1.0, True)


def test_an_edited_turn_is_masked(tmp_path: Path) -> None:
    assert _masks(tmp_path, ["continue", "edit"]) == {"c0": "edited", "c1": ""}


def test_answers_that_raced_are_masked(tmp_path: Path) -> None:
    assert _masks(tmp_path, ["continue", "retry"]) == {"c0": "ambiguous", "c1": "ambiguous"}
    graph = read_session(tmp_path / "s.jsonl")
    assert graph.terminal()[0] is None
    assert reward_of(graph) is None


def test_of_two_answers_the_one_that_goes_on_was_used(tmp_path: Path) -> None:
    assert _masks(tmp_path, ["continue", "retry", "continue"]) == {"c0": "unused", "c1": "", "c2": ""}


def test_an_answer_after_one_that_was_cut_was_used(tmp_path: Path) -> None:
    real = RealSession(tmp_path / "s.jsonl", 0)
    first = real.act("cut")
    real.calls[0] = first
    again = real.calls[0]
    real.write(type(again)("c1", list(first.prompt), [11, 2], "stop", first.turns))
    real.complete()
    graph = read_session(tmp_path / "s.jsonl")
    assert [graph.masked(call) for call in graph.calls.values()] == ["cut", ""]
    assert reward_of(graph) == 1.0


def test_another_end_token_masks_only_itself(tmp_path: Path) -> None:
    real = play(tmp_path / "s.jsonl", ["continue", "swap end"])
    graph = read_session(tmp_path / "s.jsonl")
    (only,) = trajectories(graph)
    assert only.trained == len(real.calls[0].completion) - 1 + len(real.calls[1].completion)
    assert graph.calls["c1"].continues


def test_a_prompt_is_written_once(tmp_path: Path) -> None:
    """What a turn adds to the file does not depend on the length of its prompt."""
    real = RealSession(tmp_path / "s.jsonl", 0)
    sizes = []
    for _ in range(40):
        real.act("continue")
        sizes.append((tmp_path / "s.jsonl").stat().st_size)
    added = [after - before for before, after in pairwise(sizes)]
    assert max(added[-5:]) < 1.2 * max(added[:5])


def test_a_call_after_the_end_makes_it_incomplete(tmp_path: Path) -> None:
    real = play(tmp_path / "s.jsonl", ["continue"])
    real.act("continue")
    graph = read_session(tmp_path / "s.jsonl")
    assert graph.lacks == ["1 calls came after its completion"]


def test_two_processes_write_one_file(tmp_path: Path) -> None:
    one, other = RealSession(tmp_path / "s.jsonl", 0), RealSession(tmp_path / "s.jsonl", 1)
    other.calls = one.calls
    for _ in range(4):
        one.act("continue")
        other.act("continue")
    one.complete()
    graph = read_session(tmp_path / "s.jsonl")
    assert (check_session(graph), graph.status) == ([], "complete")
    assert len(trajectories(graph)) == 1
    _agrees(graph, one)


def test_a_session_that_is_created_twice_begins_once(tmp_path: Path) -> None:
    for _ in range(2):
        SessionFile(tmp_path / "s.jsonl", "s").create({})
    assert len((tmp_path / "s.jsonl").read_bytes().splitlines()) == 1
    assert not read_session(tmp_path / "s.jsonl").lacks


def test_a_file_of_another_schema_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(encode_line(SessionStart(at=0.0, schema=SCHEMA + "9", session="s"))[0])
    written = path.read_bytes()
    file = SessionFile(path, "s")
    for _ in range(2):
        with pytest.raises(BadConfiguration):
            file.create({})
    assert path.read_bytes() == written


def test_the_commands_leave_out_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(tmp_path / "whole.jsonl", ORDINARY, 1)
    (tmp_path / "other.jsonl").write_text('{"a":\n')
    for command in (count_traces, export_traces):
        command(tmp_path / "whole.jsonl")
        whole = capsys.readouterr().out
        command(tmp_path)
        out, err = capsys.readouterr()
        assert out == whole != ""
        assert err == f"{tmp_path / 'other.jsonl'} is left out, it is damaged: line 1 is damaged\n"


def test_an_export_does_not_overwrite_what_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    play(path, ORDINARY, 1)
    before = path.read_bytes()
    for source in (path, tmp_path):
        with pytest.raises(BadConfiguration, match=r"s\.jsonl is one of the sessions; give another file"):
            export_traces(source, output=path)
    assert path.read_bytes() == before
