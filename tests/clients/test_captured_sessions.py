"""Real harnesses, captured as they are by their base URL: all that was sampled can be trained on."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from clients import install
from clients.conftest import TOKENIZER, Workspace
from clients.harness import CLAUDE, CODEX, OPENCLAW, OPENCODE, PI, QWEN, Harness, Task, run
from clients.scenarios import ANSWER
from clients.scripts import STYLES
from clients.served import MODEL, Server, serving
from clients.turns import Stage, Turn, script, shell, text_for_user, thought
from singletree.training.exports import count_trained
from singletree.training.graph import check_session, read_session, trajectories

TURNS = 40
CAPTURED = (CLAUDE, CODEX, *(PI._replace(api=api) for api in ("messages", "chat", "responses")),
            OPENCLAW, OPENCODE._replace(api="chat"), QWEN._replace(api="chat"))  # fmt: skip

Post = Callable[[str, str, object], object]


@pytest.fixture(scope="module")
def capturing(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("captured")
    flags = (*STYLES[0].flags, "--capture", str(folder / "sessions"))
    with serving(install.folder() / TOKENIZER, folder, flags) as server:
        yield server


@pytest.mark.parametrize("harness", CAPTURED, ids=lambda harness: harness.title)
def test_a_harness_is_one_trajectory(
    capturing: Server,
    harness: Harness,
    workspace: Workspace,
    tokens: Callable[[str], int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Forty turns: all that the engine sampled for the task is trained on, by its own tokens, in one trajectory."""
    steps: list[Turn] = [
        (thought(f"I run command {turn}."), shell(f"echo number-{turn}")) for turn in range(TURNS - 1)
    ]
    steps.append((thought("I know all."), text_for_user(ANSWER)))
    run_id = secrets.token_hex(4)
    names = [f"{run_id}-{turn}" for turn in range(TURNS)]
    stage = Stage(STYLES[0], harness, workspace.notes)
    for name, turn in zip(names, steps, strict=True):
        (capturing.scripts / f"{name}.txt").write_text(script(turn, stage, tokens), encoding="utf-8")
    prompt = f"Run the commands, then answer. [[script:{','.join(names)}]]"
    task = Task(f"{capturing.url}/sessions/{run_id}", MODEL, prompt, tmp_path / "home", workspace.folder)
    task.home.mkdir(exist_ok=True)
    outcome = run(harness, task)
    assert outcome.complaints == [], outcome.output
    assert outcome.answer == ANSWER, outcome.output

    file = capturing.scripts.parent / "sessions" / f"{run_id}.jsonl"
    graph = read_session(file)
    assert check_session(graph) == []
    assert graph.lacks == []
    # The engine's own log: what it was given, and what it sampled.
    plays = [play for play in capturing.plays(None) if play.prompt_token_ids]
    given = {(*play.prompt_token_ids, -1, *play.token_ids) for play in plays}
    for call in graph.calls.values():
        assert (*call.prompt, -1, *call.completion) in given
    main = [play for play in capturing.plays(names) if "<tools>" in play.prompt]
    assert len(main) == TURNS
    longest = max(trajectories(graph), key=lambda each: each.trained)
    sampled = sum(len(play.token_ids) for play in main)
    found = count_trained(graph)
    size = file.stat().st_size / (found["prompt_tokens"] + found["sampled_tokens"])
    with capsys.disabled():
        figures = {
            "share": longest.trained / sampled,
            "of all calls": found["share_in_one_trajectory"],
            "calls": len(graph.calls),
            "drifted": found["drifted"],
            "bytes a token": round(size, 2),
        }
        print(f"\n{harness.title}: {json.dumps(figures)}")
    assert longest.trained == sampled
    assert found["drifted"] == 0
