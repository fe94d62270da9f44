"""Processor time of a server for each token that it streams."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import uvloop

from benchmarks import tool_session
from benchmarks.processor import Spent, Watch
from benchmarks.servers import Server
from benchmarks.stream_reader import Answer, WrongAnswer, read_streams
from benchmarks.wire_protocols import Protocol, marker
from singletree.conversation import Sampling
from singletree.engines.engine import GenerationJob
from singletree.engines.scripted.engine import ScriptedEngine

LEAST_TOKENS = 800
"""Of all streams together: fewer cost less than what else a process does meanwhile."""

_SHORT = 8  # tokens of the answers that stand for what a request costs without its tokens


@dataclass(frozen=True, slots=True)
class Load:
    """So many streams at once, of so many tokens each, so many seconds apart."""

    streams: int
    tokens: int
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenCost:
    """What one load cost a server.

    Attributes:
        server: CPU µs a token of the measured process.
        engine: CPU µs a token of the engine, where it is another process.
        client: CPU µs a token of the client.
        request: CPU ms of a request with almost no tokens.
        rate: tokens a second of all streams together.
        first: median time to the first token, in ms.
        received: bytes a token on the wire.
        others: how many cores everything else on the machine kept busy meanwhile.
    """

    server: float
    engine: float
    client: float
    request: float
    rate: float
    first: float
    received: float
    others: float


def token_cost(
    server: Server, protocol: Protocol, load: Load, idle: Sequence[float], least_events: float = 1.0
) -> TokenCost:
    """Measure once: the difference between long answers and short ones, so that tokens alone count.

    Args:
        idle: CPU seconds a second of the server's processes when nobody asks; taken off.
        least_events: how many events there must be for each token. Where the engine is another process, tokens that
            came together leave together if the server had no time in between.

    Raises:
        WrongAnswer: also when tokens did not come as an event each.
    """
    short, _ = _run(server, protocol, load.streams, _SHORT, load.delay, idle, least_events)
    long, answers = _run(server, protocol, load.streams, load.tokens + _SHORT, load.delay, idle, least_events)
    count = load.streams * load.tokens
    engines = (long.cpu[1] - short.cpu[1]) / count if len(long.cpu) > 1 else 0.0
    return TokenCost(
        server=(long.cpu[0] - short.cpu[0]) / count * 1e6,
        engine=engines * 1e6,
        client=(long.client - short.client) / count * 1e6,
        request=short.cpu[0] / load.streams * 1e3,
        rate=load.streams * (load.tokens + _SHORT) / long.wall,
        first=statistics.median(answer.first for answer in answers) * 1e3,
        received=sum(answer.received for answer in answers) / (count + _SHORT * load.streams),
        others=long.others / long.wall,
    )


def _run(
    server: Server,
    protocol: Protocol,
    streams: int,
    tokens: int,
    delay: float,
    idle: Sequence[float],
    least_events: float,
) -> tuple[Spent, list[Answer]]:
    request = protocol.request(tool_session.opening(marker(tokens, delay)), tokens)
    watch = Watch(server.pids)
    answers = read_streams(server.port, [request] * streams, protocol.mark)
    spent = watch.stop()
    for answer in answers:
        if not tokens * least_events <= answer.events <= tokens + 16:
            raise WrongAnswer(f"{server.name} sent {answer.events} events, not {tokens}: {answer.end!r}")
    cpu = tuple(seconds - rate * spent.wall for seconds, rate in zip(spent.cpu, idle, strict=True))
    return Spent(spent.wall, cpu, spent.client, spent.others), answers


def idle_rates(server: Server, seconds: float = 2.0) -> tuple[float, ...]:
    """CPU seconds a second of each process of a server to which nobody speaks."""
    watch = Watch(server.pids)
    time.sleep(seconds)
    spent = watch.stop()
    return tuple(cpu / spent.wall for cpu in spent.cpu)


def engine_cost(engine: ScriptedEngine, encode: Callable[[str], Sequence[int]], load: Load) -> float:
    """CPU µs a token of the scripted engine alone, drained here as the server drains it."""
    short = _drain_cpu(engine, encode, load, _SHORT)
    long = _drain_cpu(engine, encode, load, load.tokens + _SHORT)
    return (long - short) / (load.streams * load.tokens) * 1e6


def _drain_cpu(
    engine: ScriptedEngine, encode: Callable[[str], Sequence[int]], load: Load, tokens: int
) -> float:
    prompt = encode(marker(tokens, load.delay))

    async def drain(number: int) -> None:
        async for _ in engine.generate(GenerationJob(prompt, Sampling(), str(number))):
            pass

    async def all_streams() -> float:
        await engine.start()
        began = time.process_time()
        await asyncio.gather(*(drain(number) for number in range(load.streams)))
        return time.process_time() - began

    return uvloop.run(all_streams())


def median_of(costs: Sequence[TokenCost]) -> TokenCost:
    """Field by field."""
    return TokenCost(*(statistics.median(getattr(cost, f.name) for cost in costs) for f in fields(TokenCost)))
