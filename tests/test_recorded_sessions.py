"""Recorded sessions: they are counted, explained and shown as they were."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from benchmarks.compare import leave_out
from benchmarks.session_report import (
    Cause,
    Session,
    Turn,
    conversation,
    follow,
    percent,
    report,
    share,
    share_but_edits,
    spans,
)

from clients import session_script
from clients.session_script import EDITS, MODULES, TURNS_OF_A_MODULE, edited_line, turns
from singletree.conversation import Reasoning, Text, ToolCall


class Play(NamedTuple):
    script: str
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]


class Hands(NamedTuple):
    name: str

    def shell(self, command: str) -> tuple[str, Mapping[str, Any]]:
        return "bash", {"command": command}

    def read(self, path: Path) -> tuple[str, Mapping[str, Any]]:
        return "read", {"path": str(path)}


ONE = Play("a", [1, 2, 3], [4, 5])
TITLE = Play("a", [9, 9, 9, 9], [4, 5])
TWO = Play("b", [1, 2, 3, 4, 5, 6], [7])
BROKEN = Play("b", [1, 2, 3, 4, 6, 6], [7])


def test_a_side_request_is_not_the_conversation() -> None:
    assert conversation([TITLE, ONE, TWO], ["a", "b"]) == [ONE, TWO]
    assert conversation([ONE, TITLE, TWO], ["a", "b"]) == [ONE, TWO]


def test_a_turn_that_was_asked_for_again_stands_beside_the_conversation() -> None:
    retried = Play("b", [1, 2, 3, 4, 5, 6, 8], [7])
    last = Play("c", [*retried.prompt_token_ids, 7, 1], [2])
    assert conversation([ONE, TWO, retried, last], ["a", "b", "c"]) == [ONE, retried, last]


def test_a_session_that_stopped_early_is_reported() -> None:
    with pytest.raises(ValueError, match="never came to c"):
        conversation([ONE, TWO], ["a", "b", "c"])


def test_what_is_there_is_counted() -> None:
    (turn,) = follow([ONE, TWO], [])
    assert turn == Turn(2, prompt=6, expected=5, matched=5, generated=2, in_place=2)
    assert share([turn]) == share_but_edits([turn]) == 1
    assert share([]) == 1


def step(cause: str) -> dict[str, Any]:
    broken = {"cause": cause, "place": "message 3 (assistant)", "was": "x|\ny", "now": "`z`"}
    return {"prompt_tokens": 6, "break": broken, "lost_tokens": 1}


def test_a_loss_is_what_the_server_says_it_is() -> None:
    (turn,) = follow([ONE, BROKEN], [step("message_changed")])
    assert (turn.matched, turn.lost, turn.in_place) == (4, 1, 1)
    assert turn.cause == Cause("message_changed", "message 3 (assistant)", "x|\ny", "`z`")
    assert share([turn]) == 0.8
    assert share_but_edits([turn]) == 1, "an edit of the harness"


@pytest.mark.parametrize("steps", [[], [{"prompt_tokens": 6, "break": None}], [step("answer_respelled")]])
def test_a_loss_that_no_edit_explains_is_ours(steps: list[dict[str, Any]]) -> None:
    (turn,) = follow([ONE, BROKEN], steps)
    assert turn.cause is not None
    assert not turn.is_edited
    assert share_but_edits([turn]) == 0.8


def test_the_report_lists_every_loss_and_every_doubt() -> None:
    turns = tuple(follow([ONE, BROKEN], [step("answer_respelled")]))
    good = Session("good", "m", tuple(follow([ONE, TWO], [])), side=(10, 20))
    bad = Session("bad", "m", turns, (), ("settings in head, 7 tokens",), 90, ("it said no",))
    text = report([good, bad])
    assert "10 tokens that should stand at their beginnings 9 do (90.00 %" in text
    assert "| good | m | 2 | 6 | 2 of 2 | 100 % | 100 % | 100 % | 2 of 30 tokens |" in text
    assert "answer_respelled (ours) in turns 2, 1 tokens. First in message 3" in text
    assert "`x¦ y`" in text
    assert "the server counts 90 tokens lost, the engine's log says 1" in text
    assert "took a side request for a break: settings" in text
    assert "the harness complained: `it said no`" in text
    assert "No prompt lost a token" in report([good])


def test_figures_are_not_rounded_up() -> None:
    assert [percent(part) for part in (1, 0.999999, 0.5)] == ["100 %", "99.99 %", "50.00 %"]
    assert spans([2, 3, 4, 7]) == "2–4, 7"


def test_each_workspace_has_the_same_commit(tmp_path: Path) -> None:
    for name in ("one", "two"):
        session_script.make_workspace(tmp_path / name)
    one, two = ((tmp_path / name / ".git/refs/heads/main").read_text() for name in ("one", "two"))
    assert one == two


def test_what_a_server_refuses_is_left_out_of_recorded_requests() -> None:
    thinking, text = {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "redacted_thinking"}
    turns = [{"content": "q"}, {"content": [thinking, text]}]
    body = {"thinking": {"type": "adaptive", "display": "updates"}, "messages": turns, "input": [{"a": 1}]}
    body["input"].append({"encrypted_content": "x"})  # type: ignore[attr-defined]
    fields = ("thinking.display", "messages.content.redacted_thinking", "input.encrypted_content", "a.b")
    assert [leave_out(body, field.split(".")) for field in fields] == [True, True, True, False]
    turns = [{"content": "q"}, {"content": [text]}]
    assert body == {"thinking": {"type": "adaptive"}, "messages": turns, "input": [{"a": 1}, {}]}


@pytest.mark.parametrize("harness", EDITS)
def test_the_script_is_a_session_of_tool_calls(harness: str, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    session_script.make_workspace(workspace)
    script = turns(Hands(harness), workspace, 40)
    assert len(script) == 41
    assert all(isinstance(parts[0], Reasoning) for parts in script)
    assert isinstance(script[-1][-1], Text)
    calls = [[part for part in parts if isinstance(part, ToolCall)] for parts in script]
    assert [len(made) for made in calls] == [1, 1, 1, 1, 2] * len(MODULES) + [0]
    assert len(MODULES) * TURNS_OF_A_MODULE == 40
    ids = [call.id.rpartition(":")[2] for made in calls for call in made]
    assert ids == [str(number) for number in range(48)]
    edit = calls[2][0]
    assert edit.name == EDITS[harness][0]
    assert edited_line(workspace / f"{MODULES[0]}.py") in str(json.loads(edit.arguments))
