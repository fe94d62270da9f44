"""A client's wishes about reasoning reach exactly the variables that the template reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from singletree.conversation import Conversation, Reasoning, Text, Thinking, Turn
from singletree.prompts.template.capabilities import (
    TemplateCapabilities,
    is_wanted,
    thinking_arguments,
    thinking_settings,
)

QUIET = Conversation((Turn("user", (Text("hi"),)),))
CARRIED = Conversation((*QUIET.turns, Turn("assistant", (Reasoning("r"), Text("t"))), *QUIET.turns))

SWITCH = TemplateCapabilities(
    switches={"enable_thinking": (True, False)},
    history_switches={"truncate_history_thinking": False},
    variables=frozenset({"enable_thinking", "truncate_history_thinking"}),
)
WORDS = TemplateCapabilities(
    efforts={"reasoning_effort": ("low", "medium", "high")}, variables=frozenset({"reasoning_effort"})
)
MODES = TemplateCapabilities(switches={"thinking_mode": ("enabled", "disabled")})
FLAGS = TemplateCapabilities(switches={"enable_thinking": (True, False)}, effort_flags={"low": "low_effort"})
OFF_WORD = TemplateCapabilities(efforts={"reasoning_effort": ("no_think", "low", "high")})
BUDGET = TemplateCapabilities(variables=frozenset({"thinking_budget"}))

KEPT = {"enable_thinking": True, "truncate_history_thinking": False}


@pytest.mark.parametrize(
    ("reads", "thinking", "expected"),
    [
        (SWITCH, Thinking(), {}),
        (SWITCH, Thinking(enabled=True), KEPT),
        (SWITCH, Thinking(budget_tokens=1000), KEPT),
        (SWITCH, Thinking(effort="high"), KEPT),
        (SWITCH, Thinking(enabled=False), {"enable_thinking": False}),
        (SWITCH, Thinking(effort="none"), {"enable_thinking": False}),
        (SWITCH, Thinking(enabled=False, effort="high"), {"enable_thinking": False}),
        (MODES, Thinking(enabled=True), {"thinking_mode": "enabled"}),
        (MODES, Thinking(enabled=False), {"thinking_mode": "disabled"}),
        (WORDS, Thinking(effort="low"), {"reasoning_effort": "low"}),
        (WORDS, Thinking(effort="MAX"), {"reasoning_effort": "high"}),
        (WORDS, Thinking(effort="minimal"), {"reasoning_effort": "low"}),
        (WORDS, Thinking(effort="xhigh"), {"reasoning_effort": "high"}),
        (WORDS, Thinking(effort="none"), {"reasoning_effort": "low"}),
        (WORDS, Thinking(enabled=False), {"reasoning_effort": "low"}),
        (WORDS, Thinking(effort="whatever"), {}),
        (WORDS, Thinking(enabled=True), {}),
        (OFF_WORD, Thinking(enabled=False), {"reasoning_effort": "no_think"}),
        (OFF_WORD, Thinking(effort="medium"), {"reasoning_effort": "low"}),
        (OFF_WORD, Thinking(enabled=True), {"reasoning_effort": "high"}),
        (OFF_WORD, Thinking(budget_tokens=500), {"reasoning_effort": "high"}),
        (OFF_WORD, Thinking(), {}),
        (FLAGS, Thinking(effort="low"), {"enable_thinking": True, "low_effort": True}),
        (FLAGS, Thinking(effort="medium"), {"enable_thinking": True}),
        (BUDGET, Thinking(enabled=True, budget_tokens=77), {"thinking_budget": 77}),
        (TemplateCapabilities(), Thinking(enabled=True, effort="high", budget_tokens=1), {}),
    ],
)
def test_wishes(reads: TemplateCapabilities, thinking: Thinking, expected: dict[str, Any]) -> None:
    assert thinking_arguments(thinking, reads, QUIET) == expected


def test_earlier_reasoning_sets_no_switch_of_a_model_that_decides_by_itself() -> None:
    adaptive = replace(MODES, adaptive=True)
    assert thinking_arguments(Thinking(), adaptive, CARRIED) == {}
    assert thinking_arguments(Thinking(), MODES, CARRIED) == {"thinking_mode": "enabled"}
    assert thinking_arguments(Thinking(enabled=True), adaptive, CARRIED) == {"thinking_mode": "enabled"}
    assert thinking_arguments(Thinking(), adaptive, CARRIED, default=Thinking(enabled=True)) == {
        "thinking_mode": "enabled"
    }


@pytest.mark.parametrize(
    "variables", [{"enable_thinking": False}, {"thinking": False}, {"thinking_mode": "disabled"}]
)
def test_reasoning_that_is_switched_off_by_name_is_not_in_play(variables: dict[str, Any]) -> None:
    thinking = Thinking(enabled=True, effort="high", template_arguments=variables)
    assert is_wanted(thinking, Thinking()) is False
    assert "truncate_history_thinking" not in thinking_arguments(thinking, SWITCH, CARRIED)


def test_the_servers_variables_are_its_wish() -> None:
    server = Thinking(template_arguments={"enable_thinking": False})
    assert is_wanted(Thinking(), server) is False
    assert is_wanted(Thinking(effort="low"), server) is True


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        (SWITCH, [{"enable_thinking": True}, {"enable_thinking": False}]),
        (WORDS, [{"reasoning_effort": word} for word in ("low", "medium", "high")]),
        (TemplateCapabilities(), []),
    ],
)
def test_the_ways_in_which_reasoning_can_be_set(
    reads: TemplateCapabilities, expected: list[dict[str, Any]]
) -> None:
    assert thinking_settings(reads) == expected


def test_carried_reasoning_keeps_itself() -> None:  # C4
    assert thinking_arguments(Thinking(), SWITCH, CARRIED) == KEPT
    assert thinking_arguments(Thinking(enabled=False), SWITCH, CARRIED) == {"enable_thinking": False}


def test_the_history_is_kept_where_reasoning_cannot_be_switched_off() -> None:
    keeps = {"preserve_thinking": True}
    reads = TemplateCapabilities(history_switches=keeps)
    assert thinking_arguments(Thinking(enabled=False), reads, CARRIED) == keeps
    words = replace(reads, efforts={"reasoning_effort": ("none", "high")})
    assert thinking_arguments(Thinking(enabled=False), words, CARRIED) == {"reasoning_effort": "none"}


def test_the_request_comes_before_the_server_and_that_before_the_template() -> None:
    off, on = Thinking(enabled=False), Thinking(enabled=True)
    assert thinking_arguments(Thinking(), SWITCH, QUIET, default=off) == {"enable_thinking": False}
    assert thinking_arguments(on, SWITCH, QUIET, default=off) == KEPT
    assert thinking_arguments(Thinking(effort="low"), SWITCH, QUIET, default=off) == KEPT
    words = Thinking(effort="high")
    assert thinking_arguments(Thinking(), WORDS, QUIET, default=words) == {"reasoning_effort": "high"}
    assert thinking_arguments(Thinking(effort="low"), WORDS, QUIET, default=words) == {
        "reasoning_effort": "low"
    }


def test_variables_by_name_have_the_last_word_of_their_side() -> None:
    named = Thinking(enabled=True, template_arguments={"enable_thinking": False, "other": 1})
    assert thinking_arguments(named, SWITCH, QUIET) == {"enable_thinking": False, "other": 1}
    server = Thinking(template_arguments={"truncate_history_thinking": True, "enable_thinking": False})
    assert thinking_arguments(Thinking(enabled=True), SWITCH, QUIET, default=server) == {
        "enable_thinking": True,
        "truncate_history_thinking": True,
    }
    assert thinking_arguments(Thinking(), SWITCH, CARRIED, default=server) == dict(
        server.template_arguments or {}
    )
