"""Sessions as a harness and an engine may make them: what was really asked and generated, beside the file of it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hypothesis import strategies as st

from singletree.training.records import CallEnd, CallStart, SessionComplete, pack
from singletree.training.session_files import SessionFile

END = 2
"""The token that ends a turn."""

Action = Literal["continue", "fork", "retry", "edit", "rewind", "compact", "cut", "crash", "swap end"]
ACTIONS: tuple[Action, ...] = (
    "continue", "continue", "continue", "fork", "retry", "edit", "rewind", "compact", "cut", "crash", "swap end",
)  # fmt: skip


@dataclass
class RealCall:
    """One call as it was: the engine's prompt and completion."""

    id: str
    prompt: list[int]
    completion: list[int]
    finish: str | None

    @property
    def all(self) -> list[int]:
        return self.prompt + self.completion


@dataclass
class RealSession:
    """Makes calls one after the other, and writes each of them.

    Attributes:
        restarts: before which calls the server is another process.
    """

    path: Path
    seed: int
    restarts: frozenset[int] = frozenset()
    calls: list[RealCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._file = SessionFile(self.path, "s")

    def _tokens(self, least: int = 1, most: int = 6) -> list[int]:
        return [self._random.randint(10, 14) for _ in range(self._random.randint(least, most))]

    def act(self, action: Action) -> RealCall:
        """Make the next call."""
        whole = [call for call in self.calls if call.finish == "stop"]
        prompt = [1, *self._tokens(), 3]
        if whole and action != "compact":
            last = whole[-1] if action == "continue" else self._random.choice(whole)
            if action == "retry":
                prompt = list(last.prompt)
            elif action == "rewind":
                prompt = [*last.prompt[:-1], *self._tokens(), 3]
            elif action == "edit":
                turn = [9, *last.completion[1:]]
                prompt = [*last.prompt, *turn, *self._tokens(), 3]
            elif action == "swap end":
                prompt = [*last.prompt, *last.completion[:-1], 4, *self._tokens(), 3]
            else:
                prompt = [*last.all, *self._tokens(), 3]
        completion = [*self._tokens(), END]
        finish: str | None = "stop"
        if action == "cut":
            completion, finish = completion[: self._random.randint(0, len(completion) - 1)], "cancelled"
        elif action == "crash":
            completion, finish = [], None
        call = RealCall(f"c{len(self.calls)}", prompt, completion, finish)
        self.write(call)
        return call

    def write(self, call: RealCall) -> None:
        """Write a call."""
        if len(self.calls) in self.restarts:
            self._file = SessionFile(self.path, "s")
        self.calls.append(call)
        line = CallStart(
            at=1.0, call=call.id, length=0, crc=0, model="m", route="/v1/messages", logprobs="raw"
        )
        self._file.begin(line, array("I", call.prompt), None)
        if call.finish is not None:
            self._file.finish(call.id, lambda: _end(call))

    def complete(self, reward: float | None = 1.0) -> None:
        """Complete the session."""
        self._file.complete(SessionComplete(at=2.0, calls=0, reward=reward))


def _end(call: RealCall) -> CallEnd:
    content = len(call.completion) - (call.completion[-1:] == [END])
    logprobs = pack(array("f", [-token / 8 for token in call.completion]))
    return CallEnd(
        at=1.5,
        call=call.id,
        finish=call.finish or "",
        tokens=pack(array("I", call.completion)),
        content=content,
        logprobs=logprobs,
    )


def actions(most: int = 12) -> st.SearchStrategy[list[Action]]:
    """Return sessions as lists of actions."""
    return st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=most)


def play(
    path: Path, what: Sequence[Action], seed: int = 0, restarts: frozenset[int] = frozenset()
) -> RealSession:
    """Make a session of these actions, and complete it."""
    path.unlink(missing_ok=True)
    session = RealSession(path, seed, restarts)
    for action in what:
        session.act(action)
    session.complete()
    return session
