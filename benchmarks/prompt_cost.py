"""Time and processor time from a long prompt to the first token of its answer."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.processor import Watch
from benchmarks.servers import Server
from benchmarks.stream_reader import read_streams
from benchmarks.tool_session import Session, grown
from benchmarks.wire_protocols import Protocol, marker, prompt_tokens
from singletree.conversation import Sampling
from singletree.engines.engine import GenerationJob
from singletree.engines.scripted.engine import ScriptedEngine

KINDS = ("cold", "repeat", "grown")
_ANSWER = 4  # tokens
MARKER = marker(_ANSWER)
_REPEATS = 2
_RESULT = 2000  # characters that a further step adds


@dataclass(frozen=True, slots=True)
class PromptCost:
    """One request with a long prompt.

    Attributes:
        kind: ``cold``, a session of which nothing was ever sent; ``repeat``, the same bytes again; ``grown``,
            the session one step later.
        first: ms from the first byte sent to the first text read.
        cpu: CPU ms of the measured process for the whole request, with an answer of four tokens.
        tokens: of the prompt, as the server counted.
        sent: bytes of the request.
    """

    kind: str
    first: float
    cpu: float
    tokens: int
    sent: int


def prompt_costs(server: Server, protocol: Protocol, session: Session) -> list[PromptCost]:
    """One session, told cold, twice again, and then growing by two steps."""
    longer = grown(session, f"{session.steps[3].result[:_RESULT]} {MARKER}", "next")
    longest = grown(longer, f"{session.steps[5].result[:_RESULT]} {MARKER}", "last")
    told = [("cold", session), *(("repeat", session) for _ in range(_REPEATS))]
    return [
        _ask(server, protocol, kind, asked) for kind, asked in (*told, ("grown", longer), ("grown", longest))
    ]


def _ask(server: Server, protocol: Protocol, kind: str, session: Session) -> PromptCost:
    request = protocol.request(session, _ANSWER)
    watch = Watch((server.pid,))
    (answer,) = read_streams(server.port, [request], protocol.mark)
    spent = watch.stop()
    return PromptCost(kind, answer.first * 1e3, spent.cpu[0] * 1e3, prompt_tokens(answer), len(request))


def engine_first(engine: ScriptedEngine, encode: Callable[[str], Sequence[int]], tokens: int) -> float:
    """CPU ms of the scripted engine alone for an answer to a known prompt of so many tokens."""
    prompt = (list(encode(" and")) * tokens)[:tokens] + list(encode(MARKER))

    async def answer() -> float:
        await engine.start()
        began = time.process_time()
        async for _ in engine.generate(GenerationJob(prompt, Sampling(), "first")):
            pass
        return time.process_time() - began

    return statistics.median(asyncio.run(answer()) for _ in range(5)) * 1e3


def median_of(costs: Iterable[PromptCost], kind: str) -> PromptCost:
    """Of one kind, field by field."""
    of_kind = [cost for cost in costs if cost.kind == kind]
    return PromptCost(
        kind,
        statistics.median(cost.first for cost in of_kind),
        statistics.median(cost.cpu for cost in of_kind),
        statistics.median_low(cost.tokens for cost in of_kind),
        statistics.median_low(cost.sent for cost in of_kind),
    )
