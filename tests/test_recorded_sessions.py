"""Recorded sessions: which plays are their conversation, and what their model writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from benchmarks.compare_sessions import conversation, leave_out

from clients import session_script
from clients.served import Play
from clients.session_script import EDITS, MODULES, TURNS_OF_A_MODULE, edited_line, turns
from singletree.conversation import Reasoning, Text, ToolCall


class Hands(NamedTuple):
    name: str

    def shell(self, command: str) -> tuple[str, Mapping[str, Any]]:
        return "bash", {"command": command}

    def read(self, path: Path) -> tuple[str, Mapping[str, Any]]:
        return "read", {"path": str(path)}


def play(script: str, *prompt: int) -> Play:
    """Return a generation on ``prompt``."""
    return Play(script, "", list(prompt), [7], "stop")


ONE = play("a", 1, 2, 3)
TITLE = play("a", 9, 9, 9, 9)
TWO = play("b", 1, 2, 3, 7, 5, 6)


def test_a_side_request_is_not_the_conversation() -> None:
    assert conversation([TITLE, ONE, TWO], ["a", "b"]) == [ONE, TWO]
    assert conversation([ONE, TITLE, TWO], ["a", "b"]) == [ONE, TWO]


def test_a_turn_that_was_asked_for_again_stands_beside_the_conversation() -> None:
    retried = play("b", 1, 2, 3, 7, 5, 6, 8)
    last = play("c", *retried.prompt_token_ids, 7, 1)
    assert conversation([ONE, TWO, retried, last], ["a", "b", "c"]) == [ONE, retried, last]


def test_a_session_that_stopped_early_is_reported() -> None:
    with pytest.raises(ValueError, match="never came to c"):
        conversation([ONE, TWO], ["a", "b", "c"])


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
