"""A task that a harness was given, and what came of it on both sides."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path

from clients.harness import SECONDS, Harness, Outcome, Task, run
from clients.relay import relaying
from clients.served import MODEL, TURNS, Play, Server
from clients.turns import Stage, Turn, break_of, script

_TOOLS = "<tools>", '"parameters":'
"""What a prompt with tools has, in Qwen's template and in those that print tools as JSON."""


class Ran:
    """What came of it.

    Attributes:
        outcome: the harness's side.
        plays: the generations of its main requests, oldest first. Side requests, such as for a title, quote the
            prompt and so play the script too; they have no tools.
        turns: which of the turns each of ``plays`` was, from 0.
        refused: how many requests were answered with an HTTP status of failure, by status.
    """

    def __init__(
        self, outcome: Outcome, plays: Sequence[Play], names: Sequence[str], refused: Counter[str]
    ) -> None:
        self.outcome = outcome
        self.plays = [play for play in plays if any(mark in play.prompt for mark in _TOOLS)]
        self.turns = [names.index(play.script) for play in self.plays]
        self.refused = {status: count for status, count in refused.items() if status != "200" and count}

    def went_well(self, answer: str, generations: int) -> None:
        """Nobody complained, nothing was asked twice, and the last word is the model's."""
        assert self.outcome.complaints == [], self.outcome.output
        assert [play.finish for play in self.plays] == ["stop"] * generations, self.outcome.output
        assert self.outcome.answer == answer, self.outcome.output

    def came_back(self, harness: Harness) -> None:
        """Each prompt holds the very tokens that were generated on the one before. Where the harness only appends, it
        begins with that one and those: all of an engine's cache is reused.
        """
        for before, after in pairwise(self.plays):
            if harness.appends:
                cached = before.prompt_token_ids + before.token_ids
                assert after.prompt_token_ids[: len(cached)] == cached
            else:
                assert packed(before.token_ids) in packed(after.prompt_token_ids)

    def added(self, turn: int) -> str:
        """What ``turn`` was told beyond what it has in common with the turn before it."""
        before, after = self.plays[turn - 1].prompt, self.plays[turn].prompt
        return after[len(commonprefix((before, after))) :]  # noqa: RUF071 (by character is what is meant)


def packed(token_ids: Sequence[int]) -> str:
    """The tokens as text with a character each, to look for some in others."""
    return "".join(map(chr, token_ids))


def script_names(count: int) -> list[str]:
    """Names of scripts that no other run has."""
    run_id = secrets.token_hex(4)
    return [f"{run_id}-{number}" for number in range(count)]


def perform(
    server: Server,
    stage: Stage,
    turns: Sequence[Turn],
    home: Path,
    tokens: Callable[[str], int],
    *,
    prompt: str = "Run the command, read notes.txt, then answer.",
    settings: Mapping[str, str] | None = None,
    names: Sequence[str] = (),
    seconds: float = SECONDS,
) -> Ran:
    """Runs the stage's harness while the model says ``turns``, one a request.

    Args:
        home: the harness's, empty.
        tokens: counts those of a text.
        settings: further variables of its environment.
        names: of the scripts of ``turns``, where files that the harness reads name them, too.
        seconds: after which the harness is ended.
    """
    names = names or script_names(len(turns))
    for name, turn in zip(names, turns, strict=True):
        (server.scripts / f"{name}.txt").write_text(script(turn, stage, tokens), encoding="utf-8")
    cut = next(filter(None, map(break_of, turns)), None)
    before = server.answers(*TURNS)
    with ExitStack() as stack:
        url = server.url if cut is None else stack.enter_context(relaying(server.url, cut)).url
        task = Task(url, MODEL, f"{prompt} [[script:{','.join(names)}]]", home, stage.notes.parent)
        outcome = run(stage.harness, task, seconds, settings=settings)
    server.wait_until_idle()
    return Ran(outcome, server.plays(names), names, server.answers(*TURNS) - before)
