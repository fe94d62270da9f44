"""Agent sessions as tokens: the turns of ``session_script`` and what their tools return, for many sessions at once."""

from __future__ import annotations

import sysconfig
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.session_script import EDITS, MODULES, TURNS_OF_A_MODULE, turns
from singletree.conversation import Text, ToolCall

HARNESSES: Mapping[str, int] = {
    "claude": 16_000,
    "codex": 8_000,
    "openclaw": 12_000,
    "opencode": 9_000,
    "pi": 2_000,
    "qwen": 11_000,
}
"""Tokens of system prompt and tools, about as the real harnesses send them; sessions of one harness share them."""

_PIECE = 4
_TOOL_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class _ScriptedHands:
    name: str

    @property
    def shell(self) -> Callable[[str], tuple[str, Mapping[str, Any]]]:
        return lambda command: ("bash", {"command": command})

    @property
    def read(self) -> Callable[[Path], tuple[str, Mapping[str, Any]]]:
        return lambda path: ("read", {"path": str(path)})


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One turn of a session.

    Attributes:
        added: what the prompt adds to the last prompt and turn: a task, or results of tools.
        generated: what the model generates.
        pause: seconds for which the tools ran before the prompt came.
    """

    added: array[int]
    generated: array[int]
    pause: float


def tokens_of(text: str) -> array[int]:
    """Return as many token ids as a tokenizer would about make of ``text``; equal texts give equal ids."""
    data = text.encode()
    return array("I", [zlib.crc32(data[at : at + _PIECE]) % 150_000 for at in range(0, len(data), _PIECE)])


@cache
def _library(module: str) -> str:
    return (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text(encoding="utf-8")


@cache
def _system(harness: str) -> array[int]:
    random = Random(harness)
    return array("I", [random.randrange(150_000) for _ in range(HARNESSES[harness])])


def agent_session(number: int, count: int, scale: float = 1.0) -> Iterator[AgentTurn]:
    """Yield the ``count`` turns of session ``number``.

    Args:
        scale: share of the system prompt and the tools' results that is kept, for sessions that are shorter.
    """
    random = Random(number)
    harness = list(HARNESSES)[number % len(HARNESSES)]
    system = _system(harness)
    task = tokens_of(f"Task {number}: look after the modules here, one after another. {random.random()}")
    added = system[: int(len(system) * scale)] + task
    for at, parts in enumerate(_turns(harness, count)):
        text = "".join(
            part.arguments if isinstance(part, ToolCall) else part.text
            for part in parts
            if isinstance(part, ToolCall | Text) or hasattr(part, "text")
        )
        generated = tokens_of(f"{number}.{at} {text}")
        yield AgentTurn(added, generated, random.expovariate(1 / _TOOL_SECONDS) if at else 0.0)
        # Every session works on its own copy of the modules: only the kind of a result is the same in all.
        result = _library(MODULES[(at // TURNS_OF_A_MODULE + number) % len(MODULES)])
        length = len(result) if at % TURNS_OF_A_MODULE == 1 else 1200
        added = tokens_of(f"{number}:{at} " + result[: int(length * scale)])


@cache
def _turns(harness: str, count: int) -> tuple[Any, ...]:
    assert harness in EDITS
    return tuple(turns(_ScriptedHands(harness), Path(sysconfig.get_path("stdlib")), count - 1))
