"""A turn of the scripted model, step by step, and what goes wrong on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from clients.harness import Harness
from clients.scripts import Style, think


class Stage(NamedTuple):
    """What a step depends on: how the model writes, who runs its tools, and on which ``notes``."""

    style: Style
    harness: Harness
    notes: Path


class Fault(Enum):
    """What goes wrong the first time that a turn gets there; the next time, the turn is played to its end."""

    FAIL = "the engine fails"
    OVERLOAD = "the engine is full"
    LENGTH = "the answer is as long as it may be"
    STOP = "the model has no more to say"


class Stall(NamedTuple):
    """A pause, in seconds."""

    seconds: float


Step = Callable[[Stage], str]
Turn = Sequence["Step | Fault | Stall | Break"]


def thought(text: str) -> Step:
    """A span of reasoning."""
    return lambda stage: think(text)


def text_for_user(text: str) -> Step:
    """Words for the user."""
    return lambda stage: f"{text}\n"


class Break(NamedTuple):
    """A word for the user, of one token and nowhere else in the turn, at which the connection breaks."""

    word: str


def break_of(turn: Turn) -> str | None:
    """The word of the turn at which the connection breaks; None where it does not."""
    return next((step.word for step in turn if isinstance(step, Break)), None)


def shell(command: str) -> Step:
    """A call of the harness's shell."""
    return lambda stage: stage.style.call(*stage.harness.shell(command)) + "\n"


_MARK = "HERE"


def cut_shell(command: str) -> Step:
    """A call of the harness's shell that ends inside its arguments, behind ``command``: half a JSON text."""
    return lambda stage: _shell_around(stage, command).partition(_MARK)[0]


def broken_shell(command: str) -> Step:
    """A call of the harness's shell whose arguments break behind ``command``."""
    return lambda stage: _shell_around(stage, command).replace(_MARK, stage.style.breaks) + "\n"


def cut_in_name() -> Step:
    """A call of the harness's shell that ends inside the tool's name."""

    def step(stage: Stage) -> str:
        name, _ = stage.harness.shell("true")
        before, _, _ = stage.style.call(*stage.harness.shell("true")).partition(name)
        return before + name[:2]

    return step


def _shell_around(stage: Stage, command: str) -> str:
    return stage.style.call(*stage.harness.shell(f"{command}; echo one two {_MARK} three"))


def read() -> Step:
    """A call that reads the notes."""
    return lambda stage: stage.style.call(*stage.harness.read(stage.notes)) + "\n"


def write(name: str, text: str) -> Step:
    """A call that makes a file beside the notes."""
    return lambda stage: stage.style.call(*stage.harness.write(stage.notes.with_name(name), text)) + "\n"


def call(name: str, **arguments: Any) -> Step:
    """A call of one harness's own tool."""
    return lambda stage: stage.style.call(name, arguments) + "\n"


def script(turn: Turn, stage: Stage, tokens: Callable[[str], int]) -> str:
    """The turn as a script of the scripted engine; ``tokens`` counts them."""
    text = ""
    options: dict[str, Any] = {}
    for step in turn:
        if isinstance(step, Stall):
            options |= {"stall": step.seconds, "stall_after": tokens(text)}
        elif isinstance(step, Fault):
            options |= _OPTIONS[step](tokens(text))
        elif isinstance(step, Break):
            text += f"{step.word}\n"
            options |= {"stall": _UNTIL_NOTICED, "stall_after": tokens(text)}
        else:
            text += step(stage)
    text = text.rstrip("\n")
    return f"#opts {json.dumps(options)}\n{text}" if options else text


_UNTIL_NOTICED = 5.0
"""Seconds in which the server learns of a broken connection, lest the turn is over before."""

_OPTIONS: Mapping[Fault, Callable[[int], Mapping[str, Any]]] = {
    Fault.FAIL: lambda at: {"fail_after": at, "faults": 1},
    Fault.OVERLOAD: lambda at: {"overloaded": True, "faults": 2},
    Fault.LENGTH: lambda at: {"cut_after": at, "faults": 1},
    Fault.STOP: lambda at: {"stop_after": at, "faults": 1},
}
