"""Agent sessions as tokens, for many sessions at once: shapes recorded of real harnesses, with random ids.

Recorded are the lengths of prompts and turns, which earlier prompt each prompt begins with and how far, side requests,
and what sessions of one harness share (``agent_shapes``). Assumed is how long tools run: the recorded ones, which read
and edit small files, take next to no time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

from benchmarks.agent_shapes import SessionShape, shapes

_TOOL_SECONDS = 3.0
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One request of a session.

    Attributes:
        prompt: its prompt.
        generated: what the model generates.
        pause: seconds between the end of the last turn and this request.
    """

    prompt: array[int]
    generated: array[int]
    pause: float


@cache
def _shapes() -> tuple[SessionShape, ...]:
    return shapes()


def _tokens(random: Random, count: int) -> array[int]:
    return array("I", random.randbytes(_TOKEN_BYTES * max(0, count)))


@cache
def _shared(harness: str, count: int) -> array[int]:
    """Return what all sessions of the harness begin with: system prompt and tools."""
    return _tokens(Random(harness), count)


def agent_session(number: int, count: int | None = None, scale: float = 1.0) -> Iterator[AgentTurn]:
    """Yield the requests of session ``number``. Sessions take the harnesses by turns.

    Args:
        count: the first so many requests; None for all that were recorded.
        scale: share of all lengths that is kept, for sessions that are shorter.
    """
    shape, random = _shapes()[number % len(_shapes())], Random(number)
    shared = _shared(shape.harness, int(shape.shared * scale))
    whole: list[array[int]] = []  # each prompt with its turn
    for at, request in enumerate(shape.requests[:count]):
        length = int(request.prompt * scale)
        if request.follows is not None:
            known = whole[request.follows][: int(request.matched * scale)]
        else:
            known = shared if length >= len(shared) else shared[:0]
        prompt = known[:length] + _tokens(random, length - len(known))
        generated = _tokens(random, max(1, int(request.generated * scale)))
        whole.append(prompt + generated)
        pause = random.expovariate(1 / _TOOL_SECONDS) if at else 0.0
        yield AgentTurn(prompt, generated, pause)
