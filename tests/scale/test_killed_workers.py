"""Real harnesses work on through a long task while the engines behind their server are killed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from clients.conftest import TOKENIZER, Workspace
from clients.harness import CLAUDE, CODEX, Harness, Task, run
from clients.scripts import HERMES
from clients.served import MODEL, TURNS
from clients.turns import Stage, Turn, script, shell, text_for_user, thought
from scale.worker_pool import killing, serving_on_workers

pytestmark = pytest.mark.scale

ANSWER = "All twenty steps are done."
LENGTH = 20
KILL_SECONDS = 4.0
PATIENCE = 900.0


def turns() -> list[Turn]:
    """Turns that each take some time, so that most of the kills are in the middle of one."""
    steps: list[Turn] = []
    for number in range(1, LENGTH):
        words = " ".join(f"{number}-{i}" for i in range(60))
        steps.append(
            (
                thought(f"Step {number}: {words}."),
                text_for_user(f"Step {number}."),
                shell(f"echo step-$(({number} * 7))"),
            )
        )
    return [*steps, (thought("Nothing is left."), text_for_user(ANSWER))]


@pytest.mark.parametrize("harness", [CLAUDE, CODEX], ids=lambda harness: harness.title)
def test_a_harness_notices_nothing(
    harness: Harness,
    installed: Path,
    workspace: Workspace,
    tokens: Callable[[str], int],
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    stage, id = Stage(HERMES, harness, workspace.notes), secrets.token_hex(4)
    names = [f"{id}-{number}" for number in range(LENGTH)]
    with serving_on_workers(installed / TOKENIZER, tmp_path / "server") as pool:
        for name, turn in zip(names, turns(), strict=True):
            (pool.server.scripts / f"{name}.txt").write_text(script(turn, stage, tokens), encoding="utf-8")
        task = Task(
            pool.server.url, MODEL, f"Do the steps. [[script:{','.join(names)}]]", home, workspace.folder
        )
        with killing(pool.workers, KILL_SECONDS) as killed:
            outcome = run(harness, task, PATIENCE)
        assert outcome.complaints == [], outcome.output
        assert outcome.answer == ANSWER, outcome.output
        assert set(pool.server.answers(*TURNS)) == {"200"}
        begun = [json.loads(line) for line in pool.log.read_text(encoding="utf-8").splitlines()]
        assert killed, "nothing was killed"
        assert any(generation["start"] for generation in begun), "no turn went on on another worker"
        sessions = [pool.server.session(key) for key in pool.server.sessions()]
        steps = max(sessions, key=len)
    assert len(steps) >= LENGTH
    assert [step["break"] for step in steps] == [None] * len(steps)
    for before, after in pairwise(steps[-LENGTH:]):
        expected = before["prompt_tokens"] + before["generated_tokens"]
        assert after["matched_tokens"] == expected, (
            "the whole prompt and turn before are the prefix of the next"
        )
