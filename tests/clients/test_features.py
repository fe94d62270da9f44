"""What single harnesses do beside turns and tools: tools that start early or are loaded later, sub-agents, web search,
counting, compaction.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from clients.conftest import Flags, Perform, Workspace
from clients.harness import APIS, CLAUDE, FEWER, PI, Harness, Task, run
from clients.scenarios import ANSWER, ANSWERING, CALLING, COMMAND, PRINTED
from clients.scripts import HERMES, Style
from clients.served import MODEL, Server
from clients.turns import Stall, call, shell, text_for_user, thought

Serve = Callable[[Style, Flags], Server]

WORDS = Path(__file__).with_name("mcp_words.py")

EARLY = ("claude", "codex", "opencode")
"""They start a tool as soon as its call is complete, the others when the turn is over."""

every_harness = pytest.mark.parametrize("harness", FEWER, ids=lambda harness: harness.title)
both_claudes = pytest.mark.parametrize(
    "harness", [CLAUDE, CLAUDE._replace(version="2.1.197")], ids=lambda harness: harness.title
)


@every_harness
def test_a_tool_starts_while_the_turn_goes_on(
    ran: Perform, harness: Harness, server: Serve, workspace: Workspace
) -> None:
    # A generation is in the log when it is over.
    log, seen = server(HERMES, ()).log, workspace.folder / "seen.jsonl"
    speaking = (
        thought("I look."),
        shell(f"cp {log} {seen.name}"),
        Stall(4.0),
        text_for_user("Meanwhile I go on."),
    )
    log.touch()
    done = ran(harness, HERMES, (speaking, ANSWERING))
    done.went_well(ANSWER, generations=2)
    done.came_back(harness)
    over = [json.loads(line) for line in seen.read_text(encoding="utf-8").splitlines()]
    was_over = any(play["script"] == done.plays[0].script and "<tools>" in play["prompt"] for play in over)
    assert was_over is (harness.name not in EARLY)


def test_tools_that_are_loaded_later_stand_where_they_were_asked_for(ran: Perform) -> None:
    loading = call("ToolSearch", query="select:WebFetch,WebSearch", max_results=5)
    turns = ((thought("I need WebFetch."), loading), (thought("It is there."), shell(COMMAND)), ANSWERING)
    done = ran(CLAUDE, HERMES, turns)
    done.went_well(ANSWER, generations=3)
    done.came_back(CLAUDE)
    for name in ("WebFetch", "WebSearch"):
        assert f'"name": "{name}"' not in done.plays[0].prompt
        assert f'"name": "{name}"' in done.added(1)
    assert "DeferredToolPlaceholder" not in done.plays[-1].prompt
    assert PRINTED in done.added(2)


def _with_words(home: Path) -> Mapping[str, str]:
    """Give pi a server of tools that it has to search for."""
    words = {"command": sys.executable, "args": [str(WORDS)], "exposure": "deferred"}
    file = home / "cache" / "pi" / "mcp.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"mcpServers": {"words": words}}), encoding="utf-8")
    return PI.prepare(home)


@pytest.mark.parametrize("api", APIS)
def test_a_tool_that_pi_finds_stands_where_it_was_found(ran: Perform, server: Serve, api: str) -> None:
    name = "mcp__words__reverse"
    searching = (thought("I need another tool."), call("tool_search", query="reverse a word"))
    turns = (searching, (thought("It is there."), call(name, word="singletree")), ANSWERING)
    pi = PI._replace(api=api, prepare=_with_words)
    done = ran(pi, HERMES, turns)
    done.went_well(ANSWER, generations=3)
    done.came_back(pi)
    assert f'"name": "{name}"' not in done.plays[0].prompt
    assert f'"name": "{name}"' in done.added(1)
    assert "eertelgnis" in done.added(2)
    serving = server(HERMES, ())
    key = serving.sessions()[0]
    assert not key.startswith("nameless"), "pi names its session in a header"
    assert [step["course"] for step in serving.session(key)] == ["first", "appended", "appended"]


def test_a_web_search_is_a_turn_of_its_own(ran: Perform, server: Serve) -> None:
    loading = call("ToolSearch", query="select:WebSearch", max_results=5)
    turns = ((loading,), (call("WebSearch", query="pelicans"),), ANSWERING)
    done = ran(CLAUDE, HERMES, turns)
    done.went_well(ANSWER, generations=3)
    done.came_back(CLAUDE)
    # What the engine says to a prompt that asks for no script.
    assert "Hello there." in done.added(2)
    serving = server(HERMES, ())
    steps = serving.session(serving.sessions()[0])
    assert [(step["line"], step["course"]) for step in steps] == [
        (1, "first"),
        (1, "appended"),
        (2, "first"),
        (1, "appended"),
    ]


@both_claudes
def test_a_sub_agent_is_a_session_of_its_own(ran: Perform, harness: Harness, server: Serve) -> None:
    delegating = call(
        "Agent", description="find the word", prompt="Find the word.", subagent_type="general-purpose"
    )
    done = ran(harness, HERMES, ((thought("I delegate."), delegating), ANSWERING, (text_for_user(ANSWER),)))
    assert done.outcome.complaints == [], done.outcome.output
    assert done.outcome.answer == ANSWER
    serving = server(HERMES, ())
    sub_agent, session = sorted(serving.sessions()[:2], key=len, reverse=True)
    assert sub_agent.startswith(f"{session}/")
    assert [step["course"] for step in serving.session(sub_agent)] == ["first"]
    main = serving.session(session)
    assert [step["course"] for step in main[:2]] == ["first", "appended"]
    # Qwen3's template takes the thoughts out of a turn once the user has spoken again.
    assert all(
        step["break"]["cause"] in ("thinking_dropped", "answer_dropped") for step in main if step["break"]
    )


def test_context_is_counted_by_the_server(ran: Perform, server: Serve) -> None:
    serving = server(HERMES, ())
    before = serving.answers("/v1/messages/count_tokens")
    done = ran(CLAUDE, HERMES, (ANSWERING,), prompt="/context")
    assert done.outcome.complaints == [], done.outcome.output
    assert "Context Usage" in done.outcome.answer
    counted = serving.answers("/v1/messages/count_tokens") - before
    assert set(counted) == {"200"}
    assert counted["200"] > 5


@both_claudes
def test_compaction_asks_behind_the_prefix(
    ran: Perform, harness: Harness, server: Serve, workspace: Workspace, tmp_path: Path
) -> None:
    done = ran(harness, HERMES, (CALLING, ANSWERING))
    done.went_well(ANSWER, generations=2)
    serving = server(HERMES, ())
    resuming = harness._replace(arguments=lambda prompt: ["-c", *harness.arguments(prompt)])
    outcome = run(resuming, Task(serving.url, MODEL, "/compact", tmp_path / "home", workspace.folder))
    assert outcome.complaints == [], outcome.output
    # It leaves the last turn out, so the model says that one again.
    compacting = next(play for play in serving.plays([done.plays[1].script]) if "<summary>" in play.prompt)
    first = done.plays[0].prompt_token_ids
    assert compacting.prompt_token_ids[: len(first)] == first
    assert PRINTED in compacting.prompt
