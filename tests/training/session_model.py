"""Sessions as a harness and an engine may make them: what was really asked and generated, beside the file of it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from hypothesis import strategies as st

from singletree.conversation import Role, Text, Turn
from singletree.training.records import CallEnd, CallStart, SessionComplete, pack
from singletree.training.session_files import SessionFile, turn_json

END = 2
"""The token that ends a turn."""

Action = Literal[
    "continue", "fork", "retry", "race", "edit", "rewind", "compact", "cut", "crash", "swap end", "invent"
]
ACTIONS: tuple[Action, ...] = (
    "continue", "continue", "continue", "fork", "retry", "race", "edit", "rewind", "compact", "cut", "crash",
    "swap end", "invent",
)  # fmt: skip


@dataclass
class RealCall:
    """One call as it was: the engine's prompt and completion, and the client's turns that made the prompt."""

    id: str
    prompt: list[int]
    completion: list[int]
    finish: str | None
    turns: list[Turn]

    @property
    def all(self) -> list[int]:
        return self.prompt + self.completion

    @property
    def answered(self) -> list[Turn]:
        """Return the turns with the answer."""
        return [*self.turns, turn("assistant", self.completion)]


@dataclass
class RealSession:
    """Makes calls one after the other, and writes each of them.

    Attributes:
        restarts: before which calls the server is another process.
        open: the calls whose ends are not written yet, since another one runs beside them.
    """

    path: Path
    seed: int
    restarts: frozenset[int] = frozenset()
    calls: list[RealCall] = field(default_factory=list)
    open: list[RealCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._file = SessionFile(self.path, "s")

    def _tokens(self, least: int = 1, most: int = 6) -> list[int]:
        return [self._random.randint(10, 14) for _ in range(self._random.randint(least, most))]

    def act(self, action: Action) -> RealCall:
        """Make the next call."""
        whole = [call for call in self.calls if call.finish == "stop" and call not in self.open]
        asked = [*self._tokens(), 3]
        prompt, turns = [1, *asked], [turn("user", asked)]
        if whole and action != "compact":
            last = whole[-1] if action == "continue" else self._random.choice(whole)
            if action in ("retry", "race"):
                prompt, turns = list(last.prompt), list(last.turns)
            elif action == "rewind":
                prompt = [*last.prompt[:-1], *asked]
                turns = [*last.turns[:-1], turn("user", asked)]
            elif action == "edit":
                edited = [9, *last.completion[1:]]
                prompt = [*last.prompt, *edited, *asked]
                turns = [*last.turns, turn("assistant", edited), turn("user", asked)]
            elif action == "swap end":
                prompt = [*last.prompt, *last.completion[:-1], 4, *asked]
                turns = [*last.answered, turn("user", asked)]
            elif action == "invent":
                invented = [*self._tokens(), END]
                prompt = [*last.all, *asked, *invented, *asked]
                turns = [
                    *last.answered,
                    turn("user", asked),
                    turn("assistant", invented),
                    turn("user", asked),
                ]
            else:
                prompt, turns = [*last.all, *asked], [*last.answered, turn("user", asked)]
        completion = [*self._tokens(), END]
        finish: str | None = "stop"
        if action == "cut":
            completion, finish = completion[: self._random.randint(0, len(completion) - 1)], "cancelled"
        elif action == "crash":
            completion, finish = [], None
        call = RealCall(f"c{len(self.calls)}", prompt, completion, finish, turns)
        self.write(call, ends_later=action == "race")
        return call

    def write(self, call: RealCall, *, ends_later: bool = False) -> None:
        """Write a call, and the ends of those that ran beside it."""
        if len(self.calls) in self.restarts:
            self._file = SessionFile(self.path, "s")
        self.calls.append(call)
        line = CallStart(
            at=1.0, call=call.id, length=0, crc=0, model="m", route="/v1/messages", logprobs="raw"
        )
        self._file.begin(line, array("I", call.prompt), call.turns)
        self.open.append(call)
        if not ends_later:
            self.end_all()

    def end_all(self) -> None:
        """Write the ends of all calls that run, the last one first; a crashed one has none."""
        for call in reversed(self.open):
            if call.finish is not None:
                self._file.finish(call.id, partial(_end, call))
        self.open.clear()

    def complete(self, reward: float | None = 1.0) -> None:
        """Complete the session."""
        self.end_all()
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
        turn=turn_json(turn("assistant", call.completion)),
    )


def turn(role: Role, tokens: Sequence[int]) -> Turn:
    """Return the turn that is written as these tokens."""
    return Turn(role, (Text(" ".join(map(str, tokens))),))


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
